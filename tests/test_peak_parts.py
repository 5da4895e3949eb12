"""What is in a rank's memory, by part: it adds up to the account, and each part is what its name says."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line import workbench
from tests.guard.entries import jobs
from tests.guard.project import accepted
from tests.strategies import plans
from tests.test_memory import llama_plan, toy_plan
from tests.test_one_peak import KINDS
from workbench.memory.account import check_memory, memory_table, peak_bytes
from workbench.memory.holdings import Part
from workbench.memory.peak_parts import held_at
from workbench.memory.rank_peaks import fullest_ranks, rank_peaks
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.schedule.action import parse_action
from workbench.schedule.offload import with_offload
from workbench.units import GIB

CASES = (
    ("trained", "cornstarch", "zb-h1"),
    ("missing", "cornstarch", "interleaved"),
    ("missing", "dip", "1f1b"),
    ("missing", "hsdp", "1f1b"),
    ("divided", "cornstarch", "zb-v"),
    ("divided", "encoders-replicated", "1f1b"),
)
LLAMA_WEIGHTS = 8_030_261_248


def assert_adds_up(lowered: Lowered) -> None:
    """At every position of every program, and before it."""
    table = memory_table(lowered)
    for rank in lowered.plan.ranks:
        current = table.static_bytes[rank]
        expected: list[tuple[int | None, int]] = [(None, current)]
        lines = zip(table.acquired_bytes[rank], table.released_bytes[rank], strict=True)
        for position, (acquired, released) in enumerate(lines):
            expected.append((position, current + acquired))
            current += acquired - released
        for position, num_bytes in expected:
            parts = held_at(lowered, rank, position)
            assert sum(part.num_bytes for part in parts) == num_bytes
            assert all(part.num_bytes > 0 for part in parts)


@given(plans(), st.sampled_from(Kernels), st.sampled_from(Precision), st.sampled_from(Recompute))
def test_parts_add_up_to_the_account(
    plan: Plan, kernels: Kernels, precision: Precision, recompute: Recompute
) -> None:
    modules = tuple(ModuleSettings(module=module.name, recompute=recompute) for module in plan.model.modules)
    settings = Settings(precision=precision, kernels=kernels, modules=modules)
    assert_adds_up(lower(replace(plan, settings=settings)))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_sharded_weights_add_up(kind: str) -> None:
    assert_adds_up(lower(KINDS[kind]()))


@pytest.mark.parametrize(("job", "strategy", "schedule"), CASES)
def test_parts_of_strategies_plans_add_up(job: str, strategy: str, schedule: str) -> None:
    assert_adds_up(accepted(jobs()[job], strategy, schedule).lowered)


def test_parts_of_weights_that_go_to_the_host_and_back_add_up() -> None:
    """A program of which one stage's weights are on the host between its forwards and its backwards."""
    plan = llama_plan()
    programs = tuple(
        replace(program, actions=with_offload(program.actions, [plan.stages_on[program.ranks[0]][0].id]))
        for program in plan.programs
    )
    moved = replace(plan, programs=programs)
    assert_adds_up(lower(moved))
    [offload] = [action for action in moved.program[0] if action.kind == "OFFLOAD"]
    [onload] = [action for action in moved.program[0] if action.kind == "ONLOAD"]
    assert held(moved, 0, str(offload))[Part.WEIGHTS] == held(moved, 0, str(onload))[Part.WEIGHTS] > 0


def held(plan: Plan, rank: int, action: str) -> dict[Part, int]:
    position = plan.program[rank].index(parse_action(action))
    return {part.part: part.num_bytes for part in held_at(lower(plan), rank, position)}


def test_state_of_llama_8b() -> None:
    """2 bytes a weight, 12 of optimizer state, and at the end of the step 2 of gradients."""
    plan = llama_plan()
    steps = [held(plan, rank, "STEP") for rank in plan.ranks]
    for part, num_bytes in ((Part.WEIGHTS, 2), (Part.OPTIMIZER, 12), (Part.GRADIENTS, 2)):
        assert sum(step[part] for step in steps) == num_bytes * LLAMA_WEIGHTS
    assert all(Part.ACTIVATIONS not in step and Part.WORKING not in step for step in steps)


def test_gradients_that_a_first_backward_makes_are_gradients() -> None:
    """Inside it some are made and some activations freed; it is no pass with 15 GiB of tensors in work."""
    plan = llama_plan()
    before, during, after = (held(plan, 0, action) for action in ("0F0", "0B0", "STEP"))
    assert Part.GRADIENTS not in before
    assert 0.9 * after[Part.GRADIENTS] < during[Part.GRADIENTS] <= after[Part.GRADIENTS]
    assert during[Part.WORKING] < 0.1 * during[Part.GRADIENTS]
    assert during.get(Part.ACTIVATIONS, 0) < before[Part.ACTIVATIONS]


def test_sharded_weights_are_whole_between_gather_and_free() -> None:
    plan = KINDS["sharded"]()
    program = plan.program[0]
    gather = next(action for action in program if action.kind == "ALL_GATHER")
    unit_bytes = held(plan, 0, str(gather))[Part.GATHERED]
    assert Part.GATHERED not in held(plan, 0, "STEP")
    assert unit_bytes >= 2 * held(plan, 0, "STEP")[Part.WEIGHTS] / len(plan.stages_on[0])


def test_a_rank_s_peak_is_the_one_it_is_accepted_by() -> None:
    lowered = lower(toy_plan(replicas=2))
    table = memory_table(lowered)
    peaks = peak_bytes(lowered, table)
    assert {peak.rank: peak.num_bytes for peak in rank_peaks(lowered, table, peaks)} == peaks
    by_module = {
        module: max(
            peaks[rank]
            for stage in lowered.plan.stages
            if stage.module == module
            for rank in stage.flat_ranks
        )
        for module in ("vision", "audio", "llm")
    }
    assert [peaks[rank] for rank in fullest_ranks(lowered, table)] == list(by_module.values())
    with pytest.raises(ValueError, match="rank 99 is not in the plan; want one of 0 to "):
        list(rank_peaks(lowered, table, [99]))


def test_a_refusal_s_parts_add_up() -> None:
    """As printed: each to three digits."""
    lowered = lower(llama_plan(memory_bytes=40 * GIB))
    with pytest.raises(ValueError, match="does not fit") as refusal:
        check_memory(lowered, memory_table(lowered))
    total, parts = re.search(r"fit: (\S+) GiB .* in it: (.*); want", str(refusal.value)).groups()
    sizes = [float(size) for size in re.findall(r"(\S+) GiB", parts)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == pytest.approx(float(total), abs=0.1)


def test_check_shows_any_rank_s_memory(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert (
        workbench(
            "plan", "examples/tiny.yaml", "--profile", "examples/elastic-cpu.json", "-o", plan
        ).exit_code
        == 0
    )
    checked = json.loads(workbench("check", plan, "--json").stdout)
    assert [peak["rank"] for peak in checked["peaks"]] == [0, 1, 2]
    assert max(peak["peak_bytes"] for peak in checked["peaks"]) == checked["peak_bytes"]
    [alone] = json.loads(workbench("check", plan, "--json", "--rank", "3").stdout)["peaks"]
    assert alone["rank"] == 3
    assert sum(part["bytes"] for part in alone["parts"]) == alone["peak_bytes"]
    rows = json.loads(workbench("check", plan, "--format", "json", "--rank", "3").stdout)
    assert {row["part"]: row["memory_bytes"] for row in rows if row["table"] == "peak memory"} == {
        part["part"]: part["bytes"] for part in alone["parts"]
    }
    refused = workbench("check", plan, "--rank", "4")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "workbench: error: rank 4 is not in the plan; want one of 0 to 3\n"
