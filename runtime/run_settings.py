"""Settings of a run besides its plan."""

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
    """What a run collects besides times and losses."""

    NOTHING = "nothing"
    GRADIENTS = "gradients"  # of the last step
    STATE = "state"  # gradients, weights after the step and the optimizer's moments
    MEMORY = "memory"  # bytes in use after every action; this slows down steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(StepOptions):
    """Settings of a run: a user's options of its steps, and objects made from them.

    The weights after the last step of the first repetition are exported: ranks write parts, and
    `runtime.state.weights_export.exporting` combines them in a folder.

    Args:
        threads: of torch, per rank.
        following: batches of the steps after the first, planned while the previous step runs.
        checkpoints: where to save and to resume; None: neither.
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
        """Type of the optimizer's copy of weights; None where it updates them directly."""
        wide = plan.settings.optimizer_precision
        if wide is None or TORCH_TYPE[wide].itemsize <= self.dtype(plan).itemsize:
            return None
        return TORCH_TYPE[wide]
