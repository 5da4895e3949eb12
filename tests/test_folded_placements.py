"""One of many equal components stands for all, wherever modules lie and whatever is sharded."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.bench.speed_cases import CASES
from tests.examples import examples
from tests.test_candidates import COST, in_brief, in_full, job_of, on_nodes_of
from workbench.job.job import Job
from workbench.plan import build as building
from workbench.plan.alike import alike_replicas, components
from workbench.plan.folded import checked_part, judged_part
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.planner.groupings import round_robin
from workbench.planner.layout_choice import Degrees
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.search.joint.arrangement import Arrangement, Placement, stages_of
from workbench.search.joint.choice import Choice, build, draft_of

MODULES = ("vision", "audio", "llm")
CASE = replace(
    CASES[1],
    name="joint",
    layout={"vision": (1, 1), "audio": (1, 1), "llm": (2, 1)},
    replicas=4,
    microbatches=2,
)
IN_PHASES = next(usual(kind) for kind in ScheduleKind if kind.spec.shares_ranks_in_part)
Sizes = tuple[int, int, int]  # replicas, stages, tensor-parallel ranks


def placed(
    placement: Placement,
    sizes: Mapping[str, Sizes],
    *,
    node: tuple[int, ...] = (4, 1),
    sharding: Mapping[str, Sharding] | None = None,
    schedule: Schedule | None = None,
    cp: Mapping[str, int] | None = None,
    is_odd: bool = False,
) -> tuple[Job, Choice]:
    """A choice of eight samples in groups of one.

    Args:
        node: ranks and network cards of one, and bytes of a rank.
        cp: context-parallel ranks of modules that have several.
        is_odd: the last sample has sizes of its own.
    """
    wanted = sum(dp * pp * tp * (cp or {}).get(name, 1) for name, (dp, pp, tp) in sizes.items())
    job = on_nodes_of(job_of(CASE), *node, least=max(16, wanted))
    if is_odd:
        *others, last = job.batch
        longer = tuple(
            replace(each, tokens_in=each.tokens_in + 64, tokens_out=each.tokens_out + 64)
            for each in last.segments
        )
        job = replace(job, batch=(*others, replace(last, segments=longer)))
    modules = tuple(ModuleSettings(module=name, sharding=how) for name, how in (sharding or {}).items())
    job = replace(job, layouts=(), replicas=1, settings=replace(job.settings, modules=modules))
    schedule = schedule or (IN_PHASES if placement is Placement.EVERYWHERE else Schedule())
    degrees = tuple(
        Degrees(module=name, tp=tp, cp=(cp or {}).get(name, 1), pp=pp, dp=dp)
        for name, (dp, pp, tp) in sizes.items()
    )
    arrangement = Arrangement(placement=placement, degrees=degrees)
    groups = tuple((sample.id,) for sample in job.batch)
    choice = Choice(
        stages=(),
        microbatches=round_robin(job, groups, {name: dp for name, (dp, _, _) in sizes.items()}),
        schedule=schedule,
        settings=job.settings,
    )
    return job, replace(choice, stages=stages_of(job, arrangement, schedule, draft_of(job, choice), COST))


def in_no_part(job: Job, choice: Choice) -> Plan:
    """The plan with programs that are made for all replicas at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "first_of_all", lambda draft: draft)
        return build(job, choice, COST)


def holds(job: Job, choice: Choice) -> Plan:
    plan = build(job, choice, COST)
    assert plan == in_no_part(job, choice)
    for known in (plan, judged_part(plan)):  # what is alike in a copy has to be found anew
        anew = replace(known)
        assert (components(known), alike_replicas(known)) == (components(anew), alike_replicas(anew))
    assert in_brief(plan) == in_full(plan)
    return plan


ALIKE = {"vision": (4, 1, 1), "audio": (4, 1, 1), "llm": (4, 2, 1)}
FAN_IN = {"vision": (4, 1, 1), "audio": (2, 1, 2), "llm": (2, 2, 2)}
FAN_OUT = {"vision": (2, 1, 1), "audio": (2, 1, 1), "llm": (4, 2, 1)}
WIDE = {"vision": (4, 1, 2), "audio": (4, 1, 2), "llm": (4, 2, 2)}
GRIDS = {"vision": (8, 1, 2), "audio": (8, 1, 2), "llm": (4, 1, 4)}


@pytest.mark.parametrize(
    ("placement", "sizes", "node", "parts", "alike"),
    [
        pytest.param(Placement.ISLANDS, ALIKE, (4, 4), 4, 4, id="islands"),
        pytest.param(Placement.ISLANDS, ALIKE, (2, 1), 2, 4, id="islands-a-port-of-two"),
        pytest.param(Placement.ISLANDS, ALIKE, (4, 1), 1, 4, id="islands-a-port-of-all"),
        pytest.param(Placement.ISLANDS, ALIKE, (3, 1), 1, 4, id="islands-that-lie-unlike"),
        pytest.param(Placement.ISLANDS, FAN_IN, (2, 1), 2, 2, id="fan-in"),
        pytest.param(Placement.ISLANDS, FAN_OUT, (4, 4), 2, 2, id="fan-out"),
        pytest.param(Placement.ISLANDS, FAN_OUT, (2, 1), 1, 2, id="fan-out-a-port-of-all"),
        pytest.param(Placement.TOGETHER, ALIKE, (2, 1), 2, 4, id="together-a-port-of-two"),
        pytest.param(Placement.FIRST_STAGE, WIDE, (2, 1), 4, 4, id="first-stage"),
        pytest.param(Placement.FIRST_STAGE, WIDE, (4, 1), 2, 4, id="first-stage-a-port-of-two"),
        pytest.param(Placement.EVERYWHERE, GRIDS, (2, 1), 4, 4, id="everywhere-grids-of-their-own"),
    ],
)
def test_which_part_is_judged(
    placement: Placement, sizes: Mapping[str, Sizes], node: tuple[int, int], parts: int, alike: int
) -> None:
    plan = holds(*placed(placement, sizes, node=node))
    assert len(judged_part(plan).stages) * parts == len(plan.stages)
    assert len(checked_part(plan).stages) * alike == len(plan.stages)


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        pytest.param((4, 1), 4, id="as-all-are"),
        pytest.param((2, 1), 2, id="as-one-other-is"),
        pytest.param((3, 1), 2, id="as-no-other-is"),
    ],
)
def test_a_replica_on_a_node_with_less_memory_is_held_against_that(node: tuple[int, int], parts: int) -> None:
    job, choice = placed(Placement.ISLANDS, ALIKE, node=node)
    last = job.cluster.node_of(max(build(job, choice, COST).ranks))
    nodes = list(job.cluster.nodes)
    nodes[last] = replace(nodes[last], memory_bytes=10**9)
    plan = holds(replace(job, cluster=replace(job.cluster, nodes=tuple(nodes))), choice)
    assert f"but node {last} (" in str(in_brief(plan))
    assert len(checked_part(plan).stages) * parts == len(plan.stages)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Job, Choice]:
    placement = draw(st.sampled_from(Placement))
    counts, few = st.sampled_from((1, 2, 4)), st.sampled_from((1, 2))
    llm = draw(counts), draw(few), draw(few)
    sizes: dict[str, Sizes] = {}
    for name in ("vision", "audio"):
        dp, pp, tp = draw(counts), draw(few), draw(few)
        if placement is Placement.FIRST_STAGE:
            dp, pp, tp = llm[0], 1, llm[2]
        elif placement is Placement.EVERYWHERE:
            dp, pp, tp = draw(st.sampled_from([(llm[0], llm[1], llm[2]), (llm[0] * llm[1], 1, llm[2])]))
        elif placement is not Placement.ISLANDS:
            dp = llm[0]
        if placement is Placement.TOGETHER and sizes:
            dp, pp, tp = sizes["vision"]
        sizes[name] = dp, pp, tp
    schedule = usual(draw(st.sampled_from(ScheduleKind))) if draw(st.booleans()) else None
    sharding = {name: draw(st.sampled_from(Sharding)) for name in MODULES}
    node = draw(st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 1), (8, 4), (3, 1)]))
    memory_bytes = draw(st.sampled_from([160, 160, 40, 20])) * 10**9
    try:
        return placed(
            placement,
            {**sizes, "llm": llm},
            node=(*node, memory_bytes),
            sharding=sharding if draw(st.booleans()) else None,
            schedule=schedule,
            is_odd=draw(st.integers(0, 3)) == 0,
        )
    except ValueError:  # ranks that there are not, a schedule that is for other stages
        assume(condition=False)
        raise


@examples(60)
@given(choices())
def test_a_part_is_judged_as_the_whole(choice: tuple[Job, Choice]) -> None:
    try:
        build(*choice, COST)
    except ValueError as error:
        refusal = str(error)
    else:
        holds(*choice)
        return
    with pytest.raises(ValueError) as whole:
        in_no_part(*choice)
    assert str(whole.value) == refusal
