"""Attention by tiles beside the table: the same price where both can tell."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench import tiled_attention as bench
from sim.attention.gpu import compute_units
from sim.attention.price import anchored_gpus
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, RowWork, Work
from workbench.model.layer import Attention

COSTS = {device: CostModel(load_profile(device)) for device in bench.DEVICES}


@pytest.mark.parametrize("device", bench.DEVICES)
@pytest.mark.parametrize("length", [128, 700, 2048, 16384])
def test_a_row_takes_what_the_table_says(device, length):
    row = bench.beside(device, COSTS[device], length)
    assert row.anchored_forward == pytest.approx(1.0, abs=0.02)
    assert row.anchored_backward == pytest.approx(1.0, abs=0.02)


def test_the_rate_of_a_long_launch_is_another_price():
    """What anchoring is for."""
    row = bench.beside("A40", COSTS["A40"], 512)
    assert row.long_forward < 0.6
    assert row.long_backward < 0.6


@settings(deadline=None)
@given(
    device=st.sampled_from(bench.DEVICES),
    kv_heads=st.sampled_from([1, 4, 8, 32]),
    group=st.sampled_from([1, 4, 8]),
    head_dim=st.sampled_from([64, 72, 128]),
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=3),
    is_causal=st.booleans(),
)
def test_no_tile_is_faster_than_what_no_launch_is_above(
    device, kv_heads, group, head_dim, lengths, is_causal
):
    """By which the bound of a search holds for tokens that ranks share as well."""
    cost = COSTS[device]
    heads = Attention(
        name="heads", num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim, causal=is_causal
    )
    area = (length * (length + 1) // 2 if is_causal else length**2 for length in lengths)
    work = Work(tuple(RowWork(n, n, pairs) for n, pairs in zip(lengths, area, strict=True)))
    num_units = compute_units(device)
    gpus = anchored_gpus(cost, heads, work, tp=1, precision="bfloat16", num_units=num_units)
    forward, backward = cost.most_attention_flop_per_s(heads, "bfloat16")
    tile_flop = 4 * head_dim * 128 * 128
    least_s = tile_flop / forward
    seconds = [gpu.timing.tile_s / num_units for gpu in gpus]
    assert seconds[0] >= least_s * (1 - 1e-12)
    assert seconds[1] >= least_s * ATTENTION_BACKWARD_FLOP / backward * (1 - 1e-12)


def test_the_command_prints_rows_and_the_last_line_has_the_keys(monkeypatch, capsys):
    monkeypatch.setattr(bench, "LENGTHS", (512, 1024))
    assert bench.run.main(["--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert len(record["rows"]) == 4
    assert record["long_least"] <= record["anchored_least"] <= record["anchored_most"]
    assert sum(line.startswith(("A40", "H100")) for line in lines) >= 4
