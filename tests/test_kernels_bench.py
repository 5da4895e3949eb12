"""The kernel benchmark where there is no GPU: its cells run, its rivals agree, its bars judge."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from experiments.bench import kernel_bars, kernels
from experiments.bench.kernel_bars import Timing, bars
from experiments.bench.kernel_cells import Cell, attention_of, set_up
from experiments.bench.kernel_cells import Contender as Who
from tests.interpreter import DEVICE


def clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--json"]) == 0
    assert capsys.readouterr().out == "no GPU\n"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_attention_computes_the_same(ranks: int):
    """Another implementation of the predicate and of attention, on the benchmark's own tensors."""
    cell = Cell("MP", 150, heads=2, kv_heads=1, head_dim=64, ranks=ranks)
    stage = set_up(cell, torch.device(DEVICE), torch.float16)
    with torch.no_grad():
        ours, flex = (attention_of(who, stage)(stage.q, stage.k, stage.v) for who in (Who.OURS, Who.FLEX))
    torch.testing.assert_close(ours, flex, rtol=2e-3, atol=2e-3)


def test_a_cell_is_measured_for_every_contender(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "LEAST_ROUNDS", 1)
    stage = set_up(Cell("EE", 130, heads=1, kv_heads=1, head_dim=64), torch.device(DEVICE), torch.float16)
    who = [Who.OURS, Who.WHOLE]
    timings = kernels.measure("full", stage, who, clock, seconds=0.0)
    assert [timing.who for timing in timings] == who
    assert all(timing.forward_s > 0 and timing.backward_s for timing in timings)
    assert timings[0].modelled > 0


def test_an_sdpa_baseline_is_causal_or_nothing():
    stage = set_up(Cell("EE", 130, head_dim=64), torch.device(DEVICE), torch.float16)
    with pytest.raises(ValueError, match=r"SDPA flash, causal: EE-.* is not the causal mask"):
        attention_of(Who.FLASH, stage)


def timing(who: Who, forward_s: float, backward_s: float, mask: str = "EE", kind: str = "full") -> Timing:
    return Timing(
        mask=mask,
        length=65536,
        kind=kind,
        seed=0,
        who=who,
        forward_s=forward_s,
        backward_s=backward_s,
        forward_flop=6.0 if mask == "causal" else 3.0,
        modelled=10.0 * forward_s if who is Who.OURS else None,
    )


def test_bars_are_ratios_of_times_and_rates():
    measured = [
        timing(Who.OURS, 1.0, 2.0),
        timing(Who.FLEX, 1.5, 1.0),
        timing(Who.OURS, 1.0, 2.0, mask="causal"),
        timing(Who.FLASH, 2.0, 4.0, mask="causal"),
    ]
    judged = {
        bar.key: bar for bar in bars(measured, {"plan_s": 1e-3, "flex_plan_s": 5e-2, "equal_bits": 1.0})
    }
    assert judged["K1"].value == pytest.approx(1.5)
    assert judged["K1"].verdict == "ok"
    assert judged["K2"].value == pytest.approx(0.5)
    assert judged["K2"].verdict == "OFF"
    assert judged["K4 fwd"].value == pytest.approx((3.0 / 1.0) / (6.0 / 2.0))
    assert judged["K6 EE"].value == pytest.approx(0.5)
    assert judged["K7"].value == pytest.approx(50)
    assert judged["K7 time"].verdict == "OFF"
    assert judged["K13"].value == pytest.approx(0.0)
    assert judged["K5 fwd"].verdict == "MISSING"


def test_simulated_forwards_stand_beside_the_measured_ones():
    """The unit comes from causal cells; a mask that takes twice what its tiles say is off by half."""
    measured = [
        timing(Who.OURS, 1.0, 2.0, mask="causal"),
        replace(timing(Who.OURS, 1.0, 2.0, kind="cp g=4"), modelled=5.0),
        timing(Who.OURS, 1.0, 2.0, kind="hd64"),
        timing(Who.FLEX, 1.0, 2.0),
    ]
    found = [(row.mask, row.kind, row.error) for row in kernel_bars.simulated_forwards(measured)]
    assert found == [("causal", "full", 0.0), ("EE", "cp g=4", -0.5)]
    assert kernel_bars.simulated_forwards(measured[1:]) == []
    written = kernels.record(measured, {}, bars(measured, {}))
    assert [row["simulated_s"] for row in written["simulated"]] == [1.0, 0.5]


ON_CPU = [who for who in Who if who not in (Who.FLEX_TUNED, Who.FLEX_FLASH, Who.FLASH, Who.CUDNN)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_contenders_that_need_no_gpu_agree(monkeypatch: pytest.MonkeyPatch):
    """Forward and backward of every one, timed by the benchmark's own loop."""
    monkeypatch.setattr(kernels, "LEAST_ROUNDS", 1)
    stage = set_up(Cell("MP", 140, heads=2, kv_heads=1, head_dim=64), torch.device(DEVICE), torch.float16)
    forwards = [who for who in ON_CPU if who is not Who.FLEX]  # FlexAttention has no backward on a CPU
    timings = kernels.measure("full", stage, forwards, clock, seconds=0.0)
    assert [timing.who for timing in timings] == forwards
    with torch.no_grad():
        ours, flex = (attention_of(who, stage)(stage.q, stage.k, stage.v) for who in (Who.OURS, Who.FLEX))
    torch.testing.assert_close(ours, flex, rtol=2e-3, atol=2e-3)


def test_the_flash_backend_runs_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    cell = Cell("EE", 16384)
    monkeypatch.setattr(kernels, "has_flash_backend", lambda: True)
    assert Who.FLEX_FLASH in kernels.contenders_of("full", cell)
    monkeypatch.setattr(kernels, "has_flash_backend", lambda: False)
    assert Who.FLEX_FLASH not in kernels.contenders_of("full", cell)


def test_nothing_measured_is_missing_everywhere():
    assert {bar.verdict for bar in bars([], {})} == {"MISSING"}
