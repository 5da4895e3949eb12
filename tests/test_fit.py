"""Measured rows: the file, and the profile made from them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost_models import SMALL, block, causal, linear
from workbench.calibrate.fit import affine_fit, fit
from workbench.calibrate.measurement import (
    CollectiveRow,
    CopyRow,
    Header,
    LayerRow,
    LinkRow,
    MatmulRow,
    Measurement,
    Mixing,
    OptimizerRow,
    OverheadRow,
    Row,
    merge_rows,
    read_measurement,
    write_measurement,
)
from workbench.cost.collectives import Collective, Collectives
from workbench.cost.model import CostModel
from workbench.cost.profile import dump_profile, parse_profile
from workbench.cost.roofline import Gemm
from workbench.cost.signature import signature

HEADER = Header(
    device="cpu",
    device_name="a machine",
    memory_bytes=2**34,
    num_threads=1,
    date="2026-01-02",
    clocks="unlocked",
    versions=(("python", "3.11.7"), ("torch", "2.13.0")),
)


def layer_row(rows: int, tokens: int, *, factor: float = 1.0) -> LayerRow:
    forward_s = factor * (1e-4 + rows * (2e-6 * tokens + 1e-9 * tokens**2))
    return LayerRow(
        signature=signature(block(SMALL)),
        precision="float32",
        rows=rows,
        tokens_in=tokens,
        tokens_out=tokens,
        attention_area=tokens * (tokens + 1) // 2,
        forward_s=forward_s,
        input_grad_s=forward_s,
        weight_grad_s=0.8 * forward_s,
        weight_only_s=1.7 * forward_s,
        spread=0.02,
        repeats=5,
    )


LAYERS = tuple(layer_row(rows, tokens) for rows in (1, 2, 4) for tokens in (32, 64, 128, 256))
OTHERS: tuple[Row, ...] = (
    MatmulRow(precision="float32", m=64, n=64, k=64, seconds=2 * 64**3 / 1e10),
    MatmulRow(precision="float32", m=128, n=64, k=64, seconds=2 * 128 * 64**2 / 2e10),
    CopyRow(num_bytes=2**20, seconds=2**20 / 5e9),
    CopyRow(num_bytes=2**24, seconds=2**24 / 1e10),
    OverheadRow(action="F", seconds=1e-4),
    OverheadRow(action="F", seconds=3e-4),
    OptimizerRow(precision="float32", num_parameters=1000, seconds=1e-4 + 1e-6),
    OptimizerRow(precision="float32", num_parameters=100_000, seconds=1e-4 + 1e-4),
    LinkRow(link="intra", num_bytes=1000, seconds=5e-5 + 1e-6),
    LinkRow(link="intra", num_bytes=1_000_000, seconds=5e-5 + 1e-3),
    CollectiveRow(collective="all_reduce", link="intra", num_ranks=2, num_bytes=2**20, seconds=2e-3),
)
ALL = Measurement(HEADER, (*LAYERS, *OTHERS))


def test_a_file_round_trips(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    write_measurement(ALL, path)
    assert read_measurement(path) == ALL


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"kind": "header"', '"kind": "layer"', r"rows.jsonl:1: want kind header, got 'layer'"),
        ('"kind": "layer"', '"kind": "liar"', r"rows.jsonl:2: want kind matmul \| copy \| .*got 'liar'"),
        (
            '"forward_s"',
            '"forward_ms"',
            r"rows.jsonl:2: unknown field 'forward_ms'; a layer has attention_area",
        ),
        ('"rows": 1, ', "", r"rows.jsonl:2: layer: .*'rows'"),
        ('"rows": 1, ', '"rows": "one", ', r"rows.jsonl:2: layer rows: want a count >= 0, got 'one'"),
        (
            '"input_grad_s": 0',
            '"input_grad_s": -0',
            r"rows.jsonl:2: layer input_grad_s: want a finite number",
        ),
        ('"precision": "float32"', '"precision": 32', r"rows.jsonl:2: layer precision: want text, got 32"),
        ('"format_version": 1', '"format_version": 9', r"rows.jsonl: want format_version 1, got 9"),
        ('{"kind": "layer"', '{kind: "layer"', r"rows.jsonl:2: not JSON"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "rows.jsonl"
    write_measurement(ALL, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_measurement(path)


def test_nothing_takes_no_time(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    write_measurement(
        Measurement(HEADER, (MatmulRow(precision="float32", m=8, n=8, k=8, seconds=0.0),)), path
    )
    with pytest.raises(ValueError, match=r"rows.jsonl:2: matmul seconds: want more than 0 seconds, got 0.0"):
        read_measurement(path)


def test_an_empty_file_is_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="want a header line, the file is empty"):
        read_measurement(path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"device_name": "another"}, "device_name"),
        ({"num_threads": 2}, "num_threads"),
        ({"clocks": "locked"}, "clocks"),
    ],
)
def test_rows_of_other_software_or_machines_are_never_mixed(change: dict[str, object], name: str):
    other = Measurement(replace(HEADER, **change), LAYERS)
    with pytest.raises(ValueError, match=f"rows of different {name} are never mixed"):
        merge_rows([ALL, other])
    with pytest.raises(ValueError, match=f"rows of different {name} are never mixed"):
        fit("mine", [ALL, other])


def test_software_is_mixed_only_when_asked():
    versions = (("cuda", "13.0"), ("python", "3.11.7"), ("torch", "2.12.0"))
    other = Measurement(replace(HEADER, versions=versions), LAYERS)
    with pytest.raises(
        ValueError, match=r"torch 2\.13\.0 and 2\.12\.0; measure again or allow it with --mix-vers"
    ):
        fit("mine", [ALL, other])
    mixed = fit("mine", [ALL, other], Mixing.ALLOWED)
    assert dict(mixed.provenance.versions) == {
        "cuda": "13.0",
        "python": "3.11.7",
        "torch": "2.13.0 + 2.12.0",
    }


def test_a_package_that_only_one_file_names_is_no_conflict():
    kernels = Measurement(replace(HEADER, versions=(("torch", "2.13.0"), ("triton", "3.6"))), OTHERS)
    merged = merge_rows([Measurement(HEADER, LAYERS), kernels])
    assert dict(merged.header.versions) == {"python": "3.11.7", "torch": "2.13.0", "triton": "3.6"}


def test_days_may_differ():
    later = Measurement(replace(HEADER, date="2026-01-03"), OTHERS)
    assert merge_rows([Measurement(HEADER, LAYERS), later]) == ALL


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="want at least one measurement"):
        fit("mine", [])
    with pytest.raises(ValueError, match="profile 'mine': want at least one row"):
        fit("mine", [Measurement(HEADER, ())])


def test_fitted_profile_predicts_its_own_rows():
    profile = fit("mine", [ALL])
    assert parse_profile(dump_profile(profile)) == profile
    cost = CostModel(profile)
    for row in LAYERS:
        work = causal(row.tokens_in, row.rows)
        time = cost.layer_time(block(SMALL), work, tp=1, cp=1, precision="float32")
        assert (time.forward_s, time.input_grad_s, time.weight_grad_s) == (
            row.forward_s,
            row.input_grad_s,
            row.weight_grad_s,
        )
        assert not time.unmeasured


def test_facts_of_the_profile():
    profile = fit("mine", [ALL])
    assert (profile.device, profile.memory_bytes) == ("cpu", 2**34)
    assert profile.provenance.versions == HEADER.versions
    assert profile.peak("float32") == pytest.approx(2e10)
    assert profile.memory_bytes_per_s == pytest.approx(1e10)
    assert profile.overhead_s("F") == pytest.approx(2e-4)
    assert profile.overhead_s("STEP") == pytest.approx(1e-4)
    assert dict(profile.optimizer_s_per_parameter)["float32"] == pytest.approx(1e-9)
    link = profile.machine_link("intra")
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(5e-5), pytest.approx(1e9))
    assert Collectives(profile).seconds(Collective.ALL_REDUCE, 2**20, 2, link.link) == pytest.approx(2e-3)
    assert CostModel(profile).matmul_s(Gemm(64, 64, 64), "float32")[0] == pytest.approx(2 * 64**3 / 1e10)


def test_leave_one_out_of_layers_that_follow_the_curve_is_small():
    fits = {found.table: found for found in fit("mine", [ALL]).fits}
    assert fits["layers, forward"].num_points == fits["layers, backward"].num_points == len(LAYERS)
    assert fits["layers, forward"].p90 < 0.01
    noisy = tuple(layer_row(r.rows, r.tokens_in, factor=1 + i % 2) for i, r in enumerate(LAYERS))
    fits = {found.table: found for found in fit("mine", [Measurement(HEADER, (*noisy, *OTHERS))]).fits}
    assert fits["layers, forward"].median > 0.1


def test_order_of_rows_does_not_matter():
    assert fit("mine", [Measurement(HEADER, ALL.rows[::-1])]) == fit("mine", [ALL])


def test_repeated_sizes_are_medians():
    rows = tuple(layer_row(1, 64, factor=factor) for factor in (1.0, 5.0, 1.2))
    (table,) = fit("mine", [Measurement(HEADER, (*rows, *OTHERS))]).layers
    (point,) = table.points
    assert point.forward_s == layer_row(1, 64, factor=1.2).forward_s


def test_only_layers_is_enough_for_layers_and_nothing_else():
    profile = fit("mine", [Measurement(HEADER, LAYERS)])
    cost = CostModel(profile)
    assert cost.layer_time(block(SMALL), causal(64), tp=1, cp=1, precision="float32").forward_s > 0
    assert set(profile.unmeasured) >= {"matmul", "memory-bound kernels", "links", "optimizer step"}
    with pytest.raises(ValueError, match="profile 'mine' has no matmul rate in float32, only in: none"):
        cost.layer_time(linear(), causal(64), tp=1, cp=1, precision="float32")


@given(st.floats(0.0, 1e-3), st.floats(1e-10, 1e-6))
def test_affine_fit_recovers_a_line(base_s: float, per_unit_s: float):
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    found = affine_fit(sizes, base_s + per_unit_s * sizes)
    assert found == (pytest.approx(base_s, abs=1e-9 + per_unit_s), pytest.approx(per_unit_s, rel=1e-3))


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(ValueError, match="do not grow with the size"):
        affine_fit(np.array([1.0, 2.0, 4.0]), np.array([4.0, 2.0, 1.0]))


def test_slow_messages_make_a_link_inexact_and_do_not_refuse_it():
    """Without the second, times do not grow with the size."""
    timed = [(1_000, 5e-4), (10_000, 1e-4), (100_000, 6e-4), (1_000_000, 4.5e-4)]
    rows = [LinkRow(link="intra", num_bytes=size, seconds=seconds) for size, seconds in timed]
    profile = fit("mine", [Measurement(HEADER, (*LAYERS, *rows))])
    (quality,) = (each for each in profile.fits if each.table == "intra link")
    assert quality.p90 > 0.5
