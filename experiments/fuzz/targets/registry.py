"""All targets, by name."""

from collections.abc import Mapping

from experiments.fuzz.target import Target
from experiments.fuzz.targets import (
    data,
    jobs,
    kept,
    machines,
    messages,
    models,
    plans,
    recordings,
    runnable,
    searches,
    sizes,
    state,
)

TARGETS: Mapping[str, Target] = {
    target.name: target
    for room in (
        *(jobs, plans, runnable, machines, sizes, models, state, data, kept, recordings, messages),
        searches,
    )
    for target in room.TARGETS
}
