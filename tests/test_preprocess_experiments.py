"""Pure parts of the preprocessing studies, and a small hail of kills."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from experiments.bench import preprocess_produce
from experiments.bench.preprocess import RULE, Cell, claims, predicted
from experiments.bench.preprocess_chaos import BATCH_SIZE, survived
from experiments.bench.preprocess_folder import draw_photographs
from experiments.disttrain.preprocessing import SimulatedRow, apart_s, measured_rows, producers_needed

MS = {"disaggregated_ms_p50": 1.0, "colocated_ms_p50": 1000.0, "step_ms": 100.0}


def test_photographs_are_functions_of_their_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        draw_photographs(tmp_path / name, 2, 64, seed=seed)
    one, same, other = ((tmp_path / name / "1.jpg").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    cell = Cell(num_images=1, side_px=64, step_over_decode=0.5)
    expected = predicted(cell, tmp_path / "one", max(os.sched_getaffinity(0)))
    assert cell.name == "1 x 64, starved"
    assert expected.step_ms == pytest.approx(expected.decode_ms / 2)
    assert expected.colocated_ms_p50 == pytest.approx(expected.decode_ms, rel=0.5)
    assert expected.produce_ms > expected.decode_ms
    stall_ms = expected.produce_ms - expected.step_ms + expected.unpack_ms
    assert expected.disaggregated_ms_p50 == pytest.approx(stall_ms, rel=0.5)


def test_nobody_who_takes_batches_is_an_error_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_photographs(tmp_path / "x", 2, 64, seed=1)
    monkeypatch.setattr(preprocess_produce, "taking_batches", lambda address, cores: nullcontext())
    monkeypatch.setattr(preprocess_produce, "WAIT_S", 0.2)
    with pytest.raises(ValueError, match=r"server tcp://127.0.0.1:\d+: no task within 0.2 s"):
        preprocess_produce.produce_s(tmp_path / "x", RULE, batch_size=1, window=2, core=0)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, 0),
        ({"disaggregated_ms_p50": 11.0}, 2),
        ({"disaggregated_ms_p50": 18.0}, 3),
        ({"colocated_ms_p50": 90.0}, 3),
        ({"colocated_ms_p50": 1300.0}, 1),
    ],
)
def test_claims_can_fail(change: dict[str, float], fails: int) -> None:
    found = claims({"10 x 512": MS | change}, {"10 x 512": MS}, None)
    assert list(found.values()).count(False) == fails


def test_producers_that_hide_the_decode() -> None:
    row = SimulatedRow(decode_s=0.04, produce_s=0.05, unpack_s=1e-5)
    assert producers_needed(row, 8) == 1
    assert producers_needed(row, 160) == 4  # the decode alone would take 3.2
    assert apart_s(row, 160, 4) == pytest.approx(160e-5)
    assert apart_s(row, 160, 2) == pytest.approx(2.0)  # unpacking hides behind the decode


def test_rows_come_from_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(
        ValueError, match=r"x.json does not exist; run python -m experiments.bench.preprocess first"
    ):
        measured_rows(path)
    cell = {"decode_ms": 400.0, "produce_ms": 480.0, "unpack_ms": 4.0}
    path.write_text(json.dumps({"predicted": {"40 x 512": cell, "40 x 1024": cell}}))
    assert measured_rows(path)[1024] == SimulatedRow(0.01, 0.012, 0.0001)


def test_a_hail_of_one_iteration(tmp_path: Path) -> None:
    """Too short for a death; what is made of the counts is what it is after a thousand."""
    found = survived(tmp_path / "x", 1, cores=os.sched_getaffinity(0))
    assert found.exactly_once
    assert (found.iterations, found.examples, found.servers_killed) == (1, BATCH_SIZE, 0)
