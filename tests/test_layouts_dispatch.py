"""Graph-aware dispatch: which communicator each pass of each rank uses, against the printed table."""

import csv
from itertools import groupby
from pathlib import Path

import pytest

from tests.layout_jobs import planned
from tests.tiny_valm import tiny_valm
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction
from workbench.schedule.action import COMPUTE, Pass

TABLE = Path(__file__).parent.parent / "experiments" / "reference" / "mimo_figure14.csv"
ROLES = ("E1P0", "E1P1", "E2P0", "L0", "L1", "L2")  # of ranks 0 to 5
CALLS = {  # direction of the row, and whether the rank sends it
    "send_fwd": (Direction.FORWARD, True),
    "recv_fwd": (Direction.FORWARD, False),
    "send_bwd": (Direction.BACKWARD, True),
    "recv_bwd": (Direction.BACKWARD, False),
}


def printed():
    with TABLE.open() as file:
        return [
            (r["phase"], r["schedule_call"], int(r["rank"][1:]), r["communicator"])
            for r in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def lowered():
    model = tiny_valm(vision=Trainable.ALL, audio=Trainable.ALL)
    layouts = {"vision": (1, 2, 1), "audio": (1, 1, 1), "llm": (1, 3, 1)}
    return lower(planned(model, layouts, microbatch=1, images=(2,) * 8, num_ranks=6))


def phases_of(program):
    """Passes by phase: forwards before the first backward, both in turn, backwards after the last forward."""
    passes = [action for action in program if action.kind in COMPUTE]
    first = next(index for index, action in enumerate(passes) if action.kind is not Pass.F)
    last = max(index for index, action in enumerate(passes) if action.kind is Pass.F)
    return {"warm": passes[: first - 1], "steady": passes[first - 1 : last + 2], "cool": passes[last + 2 :]}


def communicator(lowered, rank, action, call):
    direction, sends = CALLS[call]
    rows = (lowered.outputs if sends else lowered.inputs).get(action, ())
    mine = [
        row
        for row in map(lowered.transfers.__getitem__, rows)
        if row.direction is direction
        and (rank == row.source_rank if sends else rank in row.destination_ranks)
    ]
    kinds = {"nc" if ">" in row.edge else "p2p" for row in mine}
    assert len(kinds) <= 1, f"{action} on rank {rank}"
    return kinds.pop() if kinds else ""


def test_roles_are_the_printed_ones(lowered):
    stages = lowered.plan.stages
    names = {"vision": "E1P", "audio": "E2P", "llm": "L"}
    depth = {name: list(group) for name, group in groupby(stages, key=lambda stage: stage.module)}
    assert [f"{names[s.module]}{depth[s.module].index(s)}" for s in stages] == list(ROLES)
    assert [stage.flat_ranks for stage in stages] == [(rank,) for rank in range(6)]


@pytest.mark.parametrize(("phase", "call", "rank", "kind"), printed())
def test_every_cell_of_the_table(lowered, phase, call, rank, kind):
    """Halves of paired calls resolve to edges of their own, and all microbatches of a phase to the same."""
    passes = phases_of(lowered.plan.program[rank])[phase.removesuffix("_end")]
    halves = call.split("/")
    wanted = {half: Pass.F if half.endswith("fwd") else Pass.B for half in halves}
    found = {
        communicator(lowered, rank, action, half)
        for half in halves
        for action in passes
        if action.kind is wanted[half]
    }
    assert found - {kind} == set(), f"{phase} {call} on {ROLES[rank]}"
    assert found or phase.startswith(("warm", "cool")), "a steady phase has both passes"


def test_deeper_ranks_warm_up_less(lowered):
    """Forwards before the first backward: the distance to the last stage of the LLM, plus one."""
    warm = [
        next(index for index, action in enumerate(lowered.plan.program[rank]) if action.kind is Pass.B)
        for rank in range(6)
    ]
    assert warm == [5, 4, 4, 3, 2, 1]
