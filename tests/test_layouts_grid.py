"""The grid of layouts: what it enumerates, what it keeps, and a sample of it executed."""

import json
from dataclasses import replace
from itertools import combinations

import pytest

from experiments.mimo import kept_runs, parity_grid
from experiments.mimo.parity_grid import Point, holds, one_encoder, pairwise_cover, summary, two_encoders
from experiments.mimo.parity_grid_runs import NUM_RANKS, Gap, Layout, plan_of
from runtime.world.pool import Pool
from workbench.planner.rank_spans import Placement


def test_enumerates_every_pair_that_fits():
    alone = parity_grid.layouts()
    assert len(alone) == len(set(alone)) == 27
    assert all(x.num_ranks <= 8 and x.tp in (1, 2, 4) and x.dp in (1, 2, 3, 4) for x in alone)
    apart = {(a, b) for a in alone for b in alone if a.num_ranks + b.num_ranks <= NUM_RANKS}
    shared = {(a, b) for a in alone for b in alone if a.num_ranks == b.num_ranks}
    found = one_encoder()
    assert {p.layouts for p in found if p.placement is Placement.APART} == apart
    assert {p.layouts for p in found if p.placement is Placement.SHARED} == shared
    assert len(found) == len(apart) + len(shared) == 417


def test_cover_has_every_pair_of_two_modules_that_fits_beside_a_third():
    alone, points = parity_grid.layouts(), two_encoders()
    for placement in Placement:
        mine = [p.layouts for p in points if p.placement is placement]
        assert all(parity_grid.fits(chosen, placement) for chosen in mine)
        for i, j in combinations(range(3), 2):
            covered = {(chosen[i], chosen[j]) for chosen in mine}
            wanted = {
                (a, b)
                for a in alone
                for b in alone
                if any(parity_grid.fits((a, b, c), placement) for c in alone)
            }
            assert covered == wanted
    assert len(points) < 500 < sum(len(parity_grid._fitting(("a", "b", "c"), each)) for each in Placement)


def test_cover_of_nothing_is_nothing():
    assert pairwise_cover(()) == ()


@pytest.mark.parametrize("point", [*one_encoder()[37::150], *two_encoders()[100::200]], ids=str)
def test_sample_trains_as_one_process(point: Point, pool: Pool) -> None:
    found = parity_grid.outcome(point, pool, {})
    assert float(found["gap"]) <= parity_grid.BOUND


def test_known_outcomes_are_not_run_again(tmp_path, monkeypatch):
    calls = []

    def run(plan, pool):
        calls.append(plan)
        return Gap(0.0, 1e-15, 2e-15)

    monkeypatch.setattr(parity_grid, "gap_of", run)
    monkeypatch.setattr(kept_runs, "Pool", lambda size: Pool(1))
    points = one_encoder()[:3]
    kept = replace(parity_grid.KEPT, path=tmp_path / "kept.jsonl")
    first = kept.play(points[:2], parity_grid.outcome, 60.0)
    second = kept.play(points, parity_grid.outcome, 60.0)
    assert len(calls) == 3
    assert second[:2] == first
    assert holds(summary(points, second))
    assert not holds(summary(points, second[:2])), "a point that was not reached"
    assert [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()] == second


def test_what_is_off_is_told():
    points = one_encoder()[:3]
    outcomes = [{"gap": 1e-3, "plan": "a"}, {"refused": "no"}, {"failed": "rank 1", "plan": "b"}]
    told = summary(points, outcomes)
    assert told["refused"] == {"no": 1}
    assert told["beyond_bound"] == outcomes[:1]
    assert told["failed"] == outcomes[2:]
    assert not holds(told)


def test_a_shared_point_lies_on_the_same_ranks():
    plan = plan_of({"vision": Layout(1, 4, 1, 1), "llm": Layout(2, 1, 2, 1)}, Placement.SHARED)
    assert all(len(stages) == 2 for stages in plan.stages_on.values())
    assert len(plan.ranks) == 4
