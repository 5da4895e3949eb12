"""Where a plan's time goes: seconds on the critical path by stage and by microbatch."""

from collections import Counter
from dataclasses import dataclass

from workbench.explain.critical_path import path_of
from workbench.plan.plan import Plan
from workbench.search.joint.evaluate import Judge

MicrobatchKey = tuple[str, int, int]  # module, replica, index


@dataclass(frozen=True, slots=True)
class Hints:
    """Seconds on the critical path.

    Args:
        stages: by stage.
        microbatches: by module, replica and index.
    """

    stages: dict[int, float]
    microbatches: dict[MicrobatchKey, float]

    def sample_weights(self, plan: Plan) -> dict[int, float]:
        """By sample, the seconds of the microbatches that contain it."""
        seconds: Counter[int] = Counter()
        for microbatch in plan.microbatches:
            key = microbatch.module, microbatch.replica, microbatch.index
            for item in microbatch.items:
                seconds[item.sample] += self.microbatches.get(key, 0.0)  # type: ignore[assignment]
        return dict(seconds)


def hints_of(plan: Plan, judge: Judge) -> Hints:
    """Attribute the critical path of a plan's step. Complexity: that of the judge's timeline."""
    stages: Counter[int] = Counter()
    microbatches: Counter[MicrobatchKey] = Counter()
    for step in path_of(judge.timeline(plan)):
        if step.action is None or step.action.stage is None:
            continue
        stage = plan.stage[step.action.stage]
        stages[stage.id] += step.seconds  # type: ignore[assignment]
        if step.action.microbatch is not None:
            key = stage.module, stage.replica, step.action.microbatch
            microbatches[key] += step.seconds  # type: ignore[assignment]
    return Hints(dict(stages), dict(microbatches))
