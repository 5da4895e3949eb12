"""A tied weight on two stages of one rank is one tensor: in memory, for autograd and for the optimizer."""

from dataclasses import replace

import torch

from runtime.step.stage_module import build_stage_module
from runtime.step.tied_weights import tie_with
from runtime.step.weight_bucket import copies_of
from runtime.world.pool import Pool
from tests.test_parity import assert_parity, execute, mixed, on_ranks
from tests.test_sharded_optimizer import on_fewer_ranks
from tests.tiny_valm import tiny_batch
from workbench.memory.stage import state_of
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan, Precision, Program
from workbench.plan.tied import tied_on
from workbench.schedule.action import Action, Pass


def folded() -> Plan:
    """The LLM in two stages on one rank: embedding in one, head in the other."""
    plan = on_ranks(mixed("everything", tied=True), tiny_batch(), encoders=1, llm=(3, 3))
    return on_fewer_ranks(plan, 1)


def test_two_stages_use_one_tensor() -> None:
    plan = folded()
    (one,) = tied_on(plan, 0)
    first, other = (
        build_stage_module(plan, plan.stage[stage], seed=0, dtype=torch.float64) for stage in one.stages
    )
    key = Weights("llm", None, one.name)
    (mine,), (theirs,) = other.weights()[key], first.weights()[key]
    assert mine is not theirs
    assert torch.equal(mine, theirs)
    tie_with(other, first, key)
    assert other.weights()[key] == [theirs]
    assert other.layers[-1].lm_head.weight is first.layers[0].embed_tokens.weight
    assert copies_of([first, other])[key] == [[theirs]]


def test_it_trains_as_in_one_process(pool: Pool) -> None:
    plan = folded()
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def test_it_counts_once_unless_a_stage_leaves_the_device() -> None:
    plan = folded()
    (one,) = tied_on(plan, 0)
    held = {stage.id for stage, kind, _ in state_of(plan, 0) if kind.part == "parameters"}
    assert held >= set(one.stages)
    rows = len(list(state_of(plan, 0)))
    last = one.stages[-1]
    moves = (Action(last, Pass.OFFLOAD), Action(last, Pass.ONLOAD))
    programs = tuple(Program(ranks=p.ranks, actions=(*p.actions, *moves)) for p in plan.programs)
    away = replace(plan, programs=programs)
    assert tied_on(away, 0) == ()
    assert len(list(state_of(away, 0))) == rows + 3  # weight, gradient and moments of its own
