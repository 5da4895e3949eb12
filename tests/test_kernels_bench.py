"""The kernel benchmark where there is no GPU: its cells run, its rivals agree, its bars judge."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from experiments.bench import kernel_bars, kernel_turns, kernels
from experiments.bench.kernel_bars import BAR_TOKENS, bars, least_ratios
from experiments.bench.kernel_cells import (
    Cell,
    attention_of,
    built_flex_mask,
    flex_mask,
    runs_on,
    set_up,
)
from experiments.bench.kernel_cells import Contender as Who
from experiments.bench.kernel_rows import BITS, PLAN, KernelRow, RowFile
from experiments.bench.kernel_turns import Unit, host_clock, measure, unit_rows
from tests.interpreter import DEVICE, add_by_descriptor

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TINY = {"heads": 2, "kv_heads": 1, "head_dim": 64}
CPU = torch.device("cpu")
VERSIONS = {"torch": "1", "triton": "2", "cuda": None}


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert kernels.main(["--json"]) == 2
    assert "device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_attention_computes_the_same(ranks: int):
    """Another implementation of the predicate and of attention, on the benchmark's own tensors."""
    cell = Cell("MP", 150, heads=2, kv_heads=1, head_dim=64, ranks=ranks)
    stage = set_up(cell, torch.device(DEVICE), torch.float16)
    with torch.no_grad():
        ours, flex = (attention_of(who, stage)(stage.q, stage.k, stage.v) for who in (Who.OURS, Who.FLEX))
    torch.testing.assert_close(ours, flex, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mask", ["causal", "EP", "EE", "MP"])
def test_flex_attention_gets_the_tiles_that_it_would_make_itself(mask: str):
    stage = set_up(Cell(mask, 1000, **TINY), torch.device(DEVICE), torch.float16)
    ours, made = flex_mask(stage.mask), built_flex_mask(stage.mask)
    for side in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(made, f"{side}_num_blocks")
        assert torch.equal(getattr(ours, f"{side}_num_blocks"), counts)
        for row, count in enumerate(counts[0, 0].tolist()):
            one, other = (getattr(each, f"{side}_indices")[0, 0, row, :count] for each in (ours, made))
            assert torch.equal(one, other)


def test_a_cell_is_measured_for_every_contender():
    stage = set_up(Cell("EE", 130, heads=1, kv_heads=1, head_dim=64), torch.device(DEVICE), torch.float16)
    who = [Who.OURS, Who.FLEX]
    rows = measure(Unit("full", stage.cell, tuple(who)), stage, who, host_clock, seconds=0.0)
    found = {(row.who, row.direction): row for row in rows}
    assert list(dict.fromkeys(row.who for row in rows)) == [each.name for each in who]
    assert all(row.seconds > 0 for row in rows)
    assert found["OURS", "backward"].modelled is None
    assert found["OURS", "forward"].modelled > 0
    assert found["FLEX", "forward"].modelled is None


def test_what_the_copy_engine_adds_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda")
    for capability, runs in (((8, 0), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert runs_on(Who.ENGINE, gpu) is runs
        assert runs_on(Who.OURS, gpu)
    assert not runs_on(Who.ENGINE, CPU)
    assert Who.ENGINE in kernels.contenders_of("full", Cell("causal", 16384))


def test_an_sdpa_baseline_is_causal_or_nothing():
    stage = set_up(Cell("EE", 130, head_dim=64), torch.device(DEVICE), torch.float16)
    with pytest.raises(ValueError, match=r"SDPA flash, causal: EE-.* is not the causal mask"):
        attention_of(Who.FLASH, stage)


def timed(
    who: Who, forward_s: float, backward_s: float, mask: str = "EE", kind: str = "full", **changed: object
) -> list[KernelRow]:
    """Rows of both passes on a cell."""
    one = KernelRow(
        kind=kind,
        mask=mask,
        length=65536,
        head_dim=128,
        dtype="bfloat16",
        seed=0,
        direction="forward",
        who=who.name,
        seconds=forward_s,
        flop=6.0 if mask == "causal" else 3.0,
        modelled=10.0 * forward_s if who is Who.OURS else None,
    )
    both = [one, replace(one, direction="backward", seconds=backward_s, modelled=None)]
    return [replace(row, **changed) for row in both]


def apart(direction: str, who: str, **measured: object) -> KernelRow:
    """What is no pass of a cell."""
    return replace(timed(Who.OURS, 0.0, 0.0)[0], kind=direction, direction=direction, who=who, **measured)


def test_bars_are_ratios_of_times_and_rates():
    measured = [
        *timed(Who.OURS, 1.0, 2.0),
        *timed(Who.FLEX, 1.5, 1.0),
        *timed(Who.OURS, 1.0, 2.0, mask="causal"),
        *timed(Who.FLASH, 2.0, 4.0, mask="causal"),
        apart(PLAN, "OURS", seconds=1e-3),
        apart(PLAN, "FLEX", seconds=5e-2),
        apart(BITS, "DETERMINISTIC", seconds=None),
    ]
    judged = {bar.key: bar for bar in bars(measured)}
    assert judged["K11 bits"].verdict == "ok"
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
    half = timed(Who.OURS, 1.0, 2.0, kind="cp g=4")
    measured = [
        *timed(Who.OURS, 1.0, 2.0, mask="causal"),
        replace(half[0], modelled=5.0),
        half[1],
        *timed(Who.OURS, 1.0, 2.0, kind="hd64"),
        *timed(Who.FLEX, 1.0, 2.0),
    ]
    found = [(row.mask, row.kind, row.error) for row in kernel_bars.simulated_forwards(measured)]
    assert found == [("causal", "full", 0.0), ("EE", "cp g=4", -0.5)]
    assert kernel_bars.simulated_forwards(measured[2:]) == []
    file = RowFile(None, "a GPU", VERSIONS)
    file.add(measured)
    assert [row["simulated_s"] for row in kernels.record(file)["simulated"]] == [1.0, 0.5]


ON_CPU = [who for who in Who if who not in (Who.FLEX_TUNED, Who.FLEX_FLASH, Who.FLASH, Who.CUDNN)]


def test_contenders_that_need_no_gpu_agree(monkeypatch: pytest.MonkeyPatch):
    """Forward and backward of every one, timed by the benchmark's own loop, which refuses other outputs."""
    add_by_descriptor(monkeypatch)
    stage = set_up(Cell("MP", 140, **TINY), torch.device(DEVICE), torch.float16)
    rows = measure(Unit("full", stage.cell, tuple(ON_CPU)), stage, ON_CPU, host_clock, seconds=0.0)
    assert [row.who for row in rows if row.direction == "forward"] == [each.name for each in ON_CPU]


def wrong(contender: Who, stage: object) -> object:
    """Ours as it is; FlexAttention with another output; flash that its library refuses."""
    if contender is Who.OURS:
        return attention_of(contender, stage)
    if contender is Who.FLEX:
        return lambda q, k, v: 1.1 * attention_of(Who.OURS, stage)(q, k, v)

    def refuse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("No available kernel.\n Aborting")

    return refuse


def test_a_contender_that_fails_leaves_the_rows_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_turns, "attention_of", wrong)
    unit = kernel_turns.Unit("full", Cell("causal", 70, **TINY), (Who.OURS, Who.FLEX, Who.FLASH))
    rows = {(row.who, row.direction): row for row in unit_rows(unit, CPU, torch.float16, host_clock, 0.0)}
    assert rows["OURS", "forward"].seconds > 0
    assert rows["OURS", "backward"].seconds > 0
    assert "output of FlexAttention is 1.00e-01 off, want <= 0.02" in rows["FLEX", "forward"].error
    assert rows["FLASH", "backward"].error == "RuntimeError: No available kernel. Aborting"
    assert len(rows) == 5


def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Some rows, then all others, then nothing: a row that is there is not measured again."""
    out = tmp_path / "deep" / "rows.json"
    call = ["--device", "cpu", "--small", "--seconds", "0", "--out", str(out)]
    assert kernels.main([*call, "--cells", "causal", "--contenders", "FLASH"]) == 0
    first = {(row["who"], row["direction"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(first) == set(product(("OURS", "FLASH"), ("forward", "backward")))
    assert kernels.main([*call, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["key"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 11
    key = "kernels/full/causal#0/70/64/float16/forward/FLASH"
    assert rows[key]["seconds"] == first["FLASH", "forward"]["seconds"]
    assert result["left"] == 0
    for name in ("flex_forward_min", "flex_backward_min", "cudnn_causal_min"):
        assert result[name] is None, "nothing of an interpreter is judged"
    assert {bar["verdict"] for bar in result["bars"]} == {"MISSING"}
    before = out.read_bytes()
    monkeypatch.setattr(kernels, "unit_rows", lambda *_: pytest.fail("measured again"))
    assert kernels.main(call) == 0
    assert out.read_bytes() == before


def test_a_call_stops_before_its_limit(monkeypatch: pytest.MonkeyPatch):
    """The longest unit so far must still fit: of units that take 0.2 s a limit of 0.5 s takes two."""
    taken = []
    now_s = 0.0

    def slow(unit: kernel_turns.Unit, *_: object) -> list[KernelRow]:
        nonlocal now_s
        taken.append(unit)
        now_s += 0.2
        return []

    monkeypatch.setattr(kernels, "unit_rows", slow)
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: now_s))
    file = RowFile(None, "a", VERSIONS)
    left = kernels.go_on(kernels.small_units(), file, CPU, limit_s=0.5, seconds=0.0)
    assert (len(taken), left) == (2, 2)


def test_what_the_goals_speak_of_is_measured_first():
    """Causal, EP, EE and MP at 16k and 64k against the rivals; what compiles for minutes is last."""
    found = list(kernels.units(list(kernels.cells(kernels.LENGTHS, 2))))
    assert [(unit.cell.mask, unit.cell.length) for unit in found[:8]] == [
        (mask, length) for length in BAR_TOKENS for mask in ("causal", "EP", "EE", "MP")
    ]
    assert found[0].who == (Who.OURS, Who.FLEX, Who.CUDNN, Who.FLASH)
    assert {unit.who for unit in found[1:4]} == {(Who.OURS, Who.FLEX)}
    slow = [index for index, unit in enumerate(found) if Who.FLEX_TUNED in unit.who]
    assert slow
    assert all(Who.FLEX_TUNED in unit.who or len(unit.who) == 1 for unit in found[slow[0] :])


def test_a_row_is_of_one_pass_of_one_contender_on_one_cell():
    rows = [
        *timed(Who.OURS, 1.0, 2.0),
        *timed(Who.FLEX, 1.5, 3.0),
        *timed(Who.OURS, 1.0, 2.0, kind="hd64"),
    ]
    assert len({row.key for row in rows}) == 6
    alone = {bar.verdict for bar in bars([row for row in rows if row.direction == "backward"])}
    assert alone == {"MISSING"}, "a backward alone is judged by nothing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no file of this benchmark's rows"),
        ('{"rows": [{"key": 1}]}', "no file of this benchmark's rows"),
        (
            '{"script": "experiments.bench.kernels", "format": 0, "device": "a", "versions": {}, "rows": []}',
            "rows of format 0, these would be of 1",
        ),
        (
            '{"script": "experiments.bench.kernels", "format": 1, "device": "b", "versions": {}, "rows": []}',
            "rows of device b, these would be of a; want another --out",
        ),
        (
            '{"script": "experiments.bench.kernels", "format": 1, "device": "a", "versions": {}, "rows": []}',
            "rows of versions {}, these would be of",
        ),
    ],
)
def test_rows_of_something_else_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        RowFile(path, "a", VERSIONS)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert kernels.main(["--device", "cpu", "--small", "--limit", "0"]) == 2
    assert kernels.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


def test_least_ratios_need_every_mask_and_length():
    """The smallest rival's time over ours; null as soon as one cell is missing."""
    cells = list(product(("causal", "EP", "EE", "MP"), BAR_TOKENS))
    ours = [row for mask, length in cells for row in timed(Who.OURS, 1.0, 2.0, mask=mask, length=length)]
    flex = [
        row
        for mask, length in cells
        for row in timed(Who.FLEX, 1.25 if (mask, length) == cells[3] else 1.5, 5.0, mask=mask, length=length)
    ]
    cudnn = [row for length in BAR_TOKENS for row in timed(Who.CUDNN, 0.8, 1.5, mask="causal", length=length)]
    assert least_ratios([*ours, *flex, *cudnn]) == {
        "flex_forward_min": 1.25,
        "flex_backward_min": 2.5,
        "cudnn_causal_min": 0.75,
    }
    partly = least_ratios([*ours, *flex[:-2], *cudnn[:2]])
    assert set(partly.values()) == {None}


def test_the_flash_backend_runs_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    cell = Cell("EE", 16384)
    monkeypatch.setattr(kernels, "has_flash_backend", lambda: True)
    assert Who.FLEX_FLASH in kernels.contenders_of("full", cell)
    monkeypatch.setattr(kernels, "has_flash_backend", lambda: False)
    assert Who.FLEX_FLASH not in kernels.contenders_of("full", cell)


def test_nothing_measured_is_missing_everywhere():
    assert {bar.verdict for bar in bars([])} == {"MISSING"}
