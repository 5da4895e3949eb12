"""Plans of more ranks than this machine has: predicted like all others, executed by emulation.

Every core emulates all ranks of a plan by itself, at the same time as the others, because layers were
calibrated at the same time as others, too. An emulation times each action alone and puts the timeline
together by the dependency rules, so these plans test the prices of actions, not contention between messages
and ranks.
"""

from dataclasses import replace
from functools import partial

from experiments.fidelity.work import LLM, Cuts, Plans, Work, plan_of
from runtime.emulation.compose import compose
from runtime.emulation.emulate import Emulation, emulate
from runtime.run_settings import RunSettings
from runtime.world.pool import Place, Pool
from sim.step.engine import simulate
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.accept import accept
from workbench.trace import Trace

MANY = 8  # ranks, of which a plan may leave some idle
PATIENCE = 5  # an emulation's whole time over that of any single wait in it


def text_plans(work: Work, cluster: Cluster) -> Plans:
    """Eight layers on four and on eight ranks, under several schedules, in microbatches of one text."""
    for kind, ranks in (
        (ScheduleKind.ONE_F_ONE_B, (0, 1, 2, 3)),
        (ScheduleKind.GPIPE, (0, 1, 2, 3)),
        (ScheduleKind.INTERLEAVED, (0, 1, 2, 3, 0, 1, 2, 3)),
        (ScheduleKind.ZB_H1, (0, 1, 2, 3)),
        (ScheduleKind.ZB_V, (0, 1, 2, 3, 3, 2, 1, 0)),
        (ScheduleKind.ONE_F_ONE_B, tuple(range(MANY))),
    ):
        schedule = Schedule(kind=kind, virtual_stages=kind.usual_virtual_stages)
        cuts: Cuts = {LLM: tuple((8 // len(ranks), (rank,)) for rank in ranks)}
        make = partial(plan_of, work, cluster, cuts, samples=(1,) * 8, schedule=schedule)
        yield f"{kind} on {1 + max(ranks)} ranks", make


def image_plans(work: Work, cluster: Cluster) -> Plans:
    """Six vision layers followed by six language-model layers."""
    for vision, llm in (((6,), (3, 3)), ((3, 3), (2, 2, 2)), ((3, 3), (2, 1, 1, 2))):
        cuts: Cuts = {
            "vision": _stages(vision, first_rank=0),
            LLM: _stages(llm, first_rank=len(vision)),
        }
        yield f"{_bars(vision)}, {_bars(llm)}", partial(plan_of, work, cluster, cuts, samples=(1,) * 6)


def three_plans(work: Work, cluster: Cluster) -> Plans:
    """Two encoders in parallel before a language model of five layers."""
    for vision, llm in (((6,), (2, 3)), ((3, 3), (2, 1, 2))):
        cuts: Cuts = {
            "vision": _stages(vision, first_rank=0),
            "audio": _stages((4,), first_rank=len(vision)),
            LLM: _stages(llm, first_rank=len(vision) + 1),
        }
        make = partial(plan_of, work, cluster, cuts, samples=(1,) * 6)
        yield f"{_bars(vision)} beside 4, {_bars(llm)}", make


def _stages(layers: tuple[int, ...], *, first_rank: int) -> tuple[tuple[int, tuple[int]], ...]:
    return tuple((count, (first_rank + index,)) for index, count in enumerate(layers))


def _bars(layers: tuple[int, ...]) -> str:
    return " | ".join(map(str, layers))


def emulate_on(
    pool: Pool, plan: Plan, settings: RunSettings, *, num_processes: int, profile: Profile | None = None
) -> tuple[Trace, ...]:
    """Emulate a plan in several processes at the same time; returns a trace per process.

    Args:
        profile: of what one device cannot show, as in `compose`.

    Raises:
        ValueError: the plan is refused, or has collectives that no profile prices.
        WorldFailed: an emulation did not end in time, or an action of it failed.
    """
    lowered, _ = accept(plan)
    limit_s = PATIENCE * settings.timeout_s
    emulations: list[Emulation] = pool.run(_emulated, num_processes, plan, settings, timeout_s=limit_s)
    return tuple(compose(lowered, emulation, simulate, profile) for emulation in emulations)


def _emulated(place: Place, plan: Plan, settings: RunSettings) -> Emulation:
    del place
    lowered, _ = accept(plan)
    return replace(emulate(lowered, settings), states=())
