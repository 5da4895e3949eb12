"""What an emulation holds at once, and what it refuses to hold."""

from dataclasses import replace

import pytest

from experiments.fidelity.cases import image_work
from experiments.fidelity.work import LLM, UNMEASURED, this_machine
from experiments.fidelity.work import plan_of as fidelity_plan
from runtime.emulation.emulate import emulate, legal_order
from runtime.emulation.memory import held_bytes, state_bytes
from runtime.run_settings import Collect
from runtime.step.stage_module import StageModule, build_stage_module
from tests.plans import disjoint_plan
from tests.test_emulate import PLANS, REPLICATED, SETTINGS
from tests.test_parity import CUTS, mixed
from tests.tiny_valm import tiny_batch
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule, ScheduleKind


def requires_grad(modules: list[StageModule]) -> set[tuple[str, str]]:
    named = ((m.stage.module, name, p) for m in modules for name, p in m.named_weights())
    return {(module, name) for module, name, parameter in named if parameter.requires_grad}


def test_frozen_weights_are_stored_once():
    built: list[StageModule] = []

    def build(plan, stage, **how) -> StageModule:
        built.append(build_stage_module(plan, stage, **how))
        return built[-1]

    plan = disjoint_plan(mixed("projectors"), tiny_batch(), REPLICATED, replicas=2)
    emulate(lower(plan), SETTINGS, build=build)
    places: dict[tuple[str, str], set[int]] = {}
    for module in built:
        for name, parameter in module.named_weights():
            places.setdefault((module.stage.module, name), set()).add(parameter.data_ptr())
    trained = {key for key, found in places.items() if len(found) == 2}
    assert trained == {key for key in places if key in requires_grad(built)}
    assert trained
    layers = [layer for module in plan.model.modules for layer in module.layers]
    sizes = {flag: sum(p.num_elements for x in layers if x.trainable is flag for p in x.parameters())
             for flag in (True, False)}  # fmt: skip
    assert state_bytes(plan) == (3 * 2 * sizes[True] + sizes[False]) * plan.settings.precision.num_bytes


def one_rank_plan() -> Plan:
    """An encoder and a language model, both trained, on one rank."""
    cuts = {"vision": ((6, (0,)),), LLM: ((6, (0,)),)}
    return fidelity_plan(image_work("everything"), this_machine(UNMEASURED, 1), cuts, samples=(1,) * 6)


def test_one_rank_holds_what_its_account_says():
    lowered = lower(one_rank_plan())
    (peak,) = peak_bytes(lowered, memory_table(lowered)).values()
    assert held_bytes(lowered, legal_order(lowered)) == pytest.approx(peak, rel=1e-3)


def test_microbatches_in_flight_on_all_ranks_count():
    """1F1B keeps fewer of them than GPipe; the state is the same."""
    held = {}
    for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE):
        plan = with_programs(disjoint_plan(mixed("everything"), tiny_batch(), CUTS), Schedule(kind=kind))
        lowered = lower(plan)
        held[kind] = held_bytes(lowered, legal_order(lowered)) - state_bytes(plan)
    assert 0 < held[ScheduleKind.ONE_F_ONE_B] < held[ScheduleKind.GPIPE]


def test_more_ranks_than_the_machine_holds_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Their weights would fit, what they keep for their backwards would not."""
    lowered = lower(PLANS["everything"]())
    between = (state_bytes(lowered.plan) + held_bytes(lowered, legal_order(lowered))) // 2
    monkeypatch.setattr("runtime.emulation.memory.capacity_of", lambda device: between)
    with pytest.raises(ValueError, match=r"emulation holds all 5 ranks on one device: want .* cpu has"):
        emulate(lowered, SETTINGS)


def test_memory_is_watched_of_one_rank_alone():
    with pytest.raises(ValueError, match="it is measured for plans of one rank, got 5"):
        emulate(lower(PLANS["everything"]()), replace(SETTINGS, collect=Collect.MEMORY))
