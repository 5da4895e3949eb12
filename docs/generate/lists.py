"""Pages that list what there is: strategies, schedules and model families."""

from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import code, page, table
from workbench.job.parts import zoo_names
from workbench.job.schema import ScheduleChoiceSpec
from workbench.model.families.registry import FAMILIES
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import STRATEGIES

STRATEGIES_INTRO = """`workbench plan JOB --strategy NAME` makes a plan of a job. Where a job leaves stage
counts open, a strategy searches them under its budget of ranks, by what the strategy itself would minimise;
the simulator then chooses among the few plans that it believes best. With `--judge planner` the strategy's
own choice stands, as it was published. Losses, gradients and weights
after a step are the same under every strategy, within rounding; only time and memory differ. `workbench
search JOB` ranks them all, and [Write a strategy](../guides/write-a-strategy.md) adds one."""

MODELS_INTRO = """`workbench models` prints this. A family that plans can be simulated; one that runs has an
adapter that builds its layers from `transformers`, and `run --weights` reads its real weights."""


SCHEDULES_INTRO = """`schedule.kind` in a job file, or `--schedule`. The runtime executes them all, on DAGs
of modules with frozen weights and missing modalities too. [The job file](job.md#schedulechoicespec) says what
their parameters mean, and [Write a schedule](../guides/write-a-schedule.md) adds one."""


def strategies_page() -> str:
    """The page on strategies, from their registry."""
    rows = ((code(spec.name), spec.summary, ", ".join(_conditions(spec))) for spec in STRATEGIES)
    return page("Strategies", STRATEGIES_INTRO, table(("`--strategy`", "what it does", "wants"), rows))


def schedules_page() -> str:
    """The page on schedules, from their registry."""
    headers = ("`schedule.kind`", "what it does", "backward split", "stages on a rank", "takes besides")
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
        yield "batches large enough for one split of the ranks"
    if spec.wants_prices:
        yield "pools with prices"


def _yes(holds: bool) -> str:  # noqa: FBT001  (what is said)
    return "yes" if holds else "no"
