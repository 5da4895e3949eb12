"""Preprocessing simulated and measured."""

import heapq
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench import preprocess_produce
from experiments.bench.preprocess import RULE, Cell, claims, predicted
from experiments.bench.preprocess_chaos import BATCH_SIZE, survived
from experiments.bench.preprocess_folder import draw_photographs
from experiments.disttrain.preprocessing import SimulatedRow, apart_s, measured_rows, producers_needed
from sim.preprocess import CpuNode, Preprocessing, colocated_stalls_s, disaggregated_stalls_s

ONE = (CpuNode(cores=1, num_producers=1),)


def recurrence(decode_s: list[list[float]], step_s: float, window: int, producers: int) -> list[float]:
    """Examples in order, each to the producer that is free first, each batch no sooner than it opens."""
    free_s = [0.0] * producers
    turned_s: list[float] = []
    ready_s: list[float] = []
    stalls = []
    now_s = 0.0
    for position in range(len(decode_s)):
        turned_s.append(now_s)
        while len(ready_s) < min(position + window, len(decode_s)):
            opened_s = turned_s[max(0, len(ready_s) - window + 1)]
            ends = [opened_s]
            for one_s in decode_s[len(ready_s)]:
                ends.append(max(heapq.heappop(free_s), opened_s) + one_s)
                heapq.heappush(free_s, ends[-1])
            ready_s.append(max(ends))
        start_s = now_s
        now_s = max(now_s, ready_s[position])
        stalls.append(now_s - start_s)
        now_s += step_s
    return stalls


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_stalls_are_those_of_the_recurrence(
    decode: list[list[int]], step: int, window: int, producers: int
) -> None:
    """With a core for every producer; whole numbers, so that sums are exact."""
    decode_s = [[float(one) for one in batch] for batch in decode]
    setup = Preprocessing(
        produce_s=tuple(map(tuple, decode_s)),
        step_s=float(step),
        window=window,
        nodes=(CpuNode(cores=producers, num_producers=producers),),
    )
    assert disaggregated_stalls_s(setup) == pytest.approx(recurrence(decode_s, step, window, producers))


@pytest.mark.parametrize(("step_s", "expected"), [(4.0, 0.0), (3.0, 0.0), (1.0, 2.0), (0.0, 3.0)])
def test_a_steady_trainer_waits_for_what_its_step_does_not_hide(step_s: float, expected: float) -> None:
    batches = ((1.0, 1.5, 0.5),) * 8
    stalls = disaggregated_stalls_s(Preprocessing(produce_s=batches, step_s=step_s, window=2, nodes=ONE))
    assert stalls[0] == 3.0
    assert stalls[2:] == (expected,) * 6
    assert colocated_stalls_s(batches) == (3.0,) * 8


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5), st.integers(0, 60), st.integers(2, 4))
def test_handing_over_counts_like_the_decode(
    decode: int, hand_over: int, num: int, step: int, window: int
) -> None:
    """In closed form, one producer: a steady stall is n (decode + hand-over) - step, and none below 0."""
    batches = ((float(decode + hand_over),) * num,) * 8
    setup = Preprocessing(produce_s=batches, step_s=float(step), window=window, nodes=ONE)
    assert disaggregated_stalls_s(setup)[window:] == (max(0.0, num * (decode + hand_over) - step),) * (
        8 - window
    )


def test_a_window_of_one_hides_nothing() -> None:
    setup = Preprocessing(produce_s=((1.0, 1.0),) * 4, step_s=9.0, window=1, nodes=ONE)
    assert disaggregated_stalls_s(setup) == (2.0,) * 4


def test_cores_are_shared_and_nodes_add_up() -> None:
    batch = ((1.0,) * 4,) * 3

    def first_s(*nodes: CpuNode) -> float:
        return disaggregated_stalls_s(Preprocessing(produce_s=batch, step_s=0.0, window=1, nodes=nodes))[0]

    assert first_s(CpuNode(cores=1, num_producers=4)) == pytest.approx(4.0)
    assert first_s(CpuNode(cores=2, num_producers=4)) == pytest.approx(2.0)
    assert first_s(*ONE, *ONE, *ONE, *ONE) == pytest.approx(1.0)
    assert colocated_stalls_s(batch, cores=8) == (1.0,) * 3  # one example is one core's work
    assert colocated_stalls_s(batch, cores=2, worker_share=0.5) == (4.0,) * 3


def test_travel_keeps_a_producer_and_the_rest_the_trainer() -> None:
    setup = Preprocessing(
        produce_s=((1.0, 1.0),) * 2,
        step_s=0.0,
        window=1,
        nodes=ONE,
        travel_s=0.25,
        handover_s=0.5,
        unpack_s=0.125,
    )
    assert disaggregated_stalls_s(setup) == (2.5 + 0.5 + 0.125,) * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"produce_s": ()}, ">= 1 batch"),
        ({"produce_s": ((-1.0,),)}, "times >= 0 s"),
        ({"step_s": float("nan")}, "finite"),
        ({"window": 0}, "window >= 1"),
        ({"nodes": ()}, ">= 1 CPU node"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"produce_s": ((1.0,),), "step_s": 1.0, "window": 1, "nodes": ONE}
    with pytest.raises(ValueError, match=words):
        Preprocessing(**(good | change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=">= 1 core"):
        CpuNode(cores=0, num_producers=1)


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
