"""Pages that list what there is: strategies, schedules and model families."""

from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import code, page, table
from workbench.job.parts import zoo_names
from workbench.job.schema import ScheduleChoiceSpec
from workbench.model.families.registry import FAMILIES
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import STRATEGIES

STRATEGIES_INTRO = """A strategy turns a job into a plan. `workbench plan JOB --strategy NAME` uses one
strategy, and `workbench search JOB` ranks the plans of all of them.

All strategies train the same model: losses, gradients and weights after a step are equal, within
rounding. Only time and memory differ.

If a job leaves stage counts open, a strategy searches them within its ranks, by its own criterion. The
simulator then chooses among the few plans that the strategy rates best. With `--judge planner`, the
strategy's own choice is used, as published. [Write a strategy](../guides/write-a-strategy.md) shows how
to add one."""

MODELS_INTRO = """`workbench models` prints this table. A family that plans can be planned and simulated.
A family that runs also has an adapter, which builds its layers from `transformers`; `run --weights` reads
its real weights. Use `config` with the `model_type`, or `zoo` with a name, in a [module of a
job](job.md#modulespec)."""


SCHEDULES_INTRO = """A schedule is the order of passes on each rank. Set it by `schedule.kind` in a job
file, or by `--schedule`. The runtime executes all of them, also on DAGs of modules with frozen weights
and missing modalities. [The job file](job.md#schedulechoicespec) explains their parameters, and [Write a
schedule](../guides/write-a-schedule.md) shows how to add one."""


def strategies_page() -> str:
    """The page on strategies, from their registry."""
    rows = ((code(spec.name), spec.summary, ", ".join(_conditions(spec))) for spec in STRATEGIES)
    return page("Strategies", STRATEGIES_INTRO, table(("`--strategy`", "what it does", "needs"), rows))


def schedules_page() -> str:
    """The page on schedules, from their registry."""
    headers = ("`schedule.kind`", "what it does", "splits backward", "stages per rank", "parameters")
    return page("Schedules", SCHEDULES_INTRO, table(headers, (_schedule_row(kind) for kind in ScheduleKind)))


def models_page() -> str:
    """The page on model families, from their registry."""
    rows = (
        (f.name, f.role, code(f.model_type or f.zoo or "-"), _yes(f.plans), _yes(not f.reason), f.reason)
        for f in FAMILIES
    )
    headers = ("family", "role", "`model_type` or `zoo`", "plans", "runs", "why not")
    zoo = ", ".join(code(name) for name in zoo_names())
    return page("Models", MODELS_INTRO, table(headers, rows), "## Names for `zoo`", zoo)


def _schedule_row(kind: ScheduleKind) -> tuple[str, ...]:
    spec = kind.spec
    stages = f"{spec.usual_virtual_stages}{' or more' if spec.takes_more_stages else ''}"
    takes = [parameter for parameter in ScheduleChoiceSpec.model_fields if spec.takes(parameter)]
    return code(kind.value), spec.summary, _yes(spec.splits_backward), stages, ", ".join(map(code, takes))


def _conditions(spec: Any) -> Iterator[str]:
    if spec.batch_level:
        yield "a large batch: one split of the ranks serves all batches"
    if spec.wants_prices:
        yield "pools with prices"


def _yes(holds: bool) -> str:  # noqa: FBT001  (what is said)
    return "yes" if holds else "no"
