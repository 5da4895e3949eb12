"""What a rank is told of a run besides its plan."""

from dataclasses import dataclass, field
from enum import Enum

import torch

from runtime.state.checkpoint import Checkpoints
from runtime.step.optimizer import OptimizerSettings
from runtime.step_plans import NextBatches
from workbench.job.run_options import StepOptions
from workbench.plan.plan import Plan, Precision

MOST_THREADS = 1024
TORCH_TYPE = {
    Precision.FLOAT64: torch.float64,
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
}


class Collect(Enum):
    """What a run brings back besides times and losses."""

    NOTHING = "nothing"
    GRADIENTS = "gradients"  # of the last step
    STATE = "state"  # these, weights after it and the optimizer's moments
    MEMORY = "memory"  # bytes held after every action; watching makes a step slower


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(StepOptions):
    """How a plan is run: what a user said of its steps, and what that stands for.

    The weights after the last step of the first repetition are exported, written by the ranks as parts
    (`runtime.models.weights.exporting` makes a folder of them).

    Args:
        threads: of torch, per rank.
        following: batches of the steps after the first, planned while the step before runs.
        checkpoints: where to save while it runs, and where to start; None: neither.
    """

    threads: int = 1
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    collect: Collect = Collect.NOTHING
    following: NextBatches = field(default_factory=NextBatches)
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        if not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads must be 1 to {MOST_THREADS:,}, got {self.threads:,}")
        if self.checkpoints is not None:
            self.checkpoints.check(self.repetitions, self.warmup + self.steps)

    def dtype(self, plan: Plan) -> torch.dtype:
        return TORCH_TYPE[self.precision or plan.settings.precision]

    def optimizer_dtype(self, plan: Plan) -> torch.dtype | None:
        """What the optimizer works in, where weights are narrower."""
        wide = plan.settings.optimizer_precision
        if wide is None or TORCH_TYPE[wide].itemsize <= self.dtype(plan).itemsize:
            return None
        return TORCH_TYPE[wide]
