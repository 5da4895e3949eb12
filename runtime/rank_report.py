"""Results of one rank of a run."""

from dataclasses import dataclass, field

from torch import Tensor

from runtime.step.timing import Notes
from runtime.step_plans import Planning
from workbench.plan.lowered import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """State of one rank at its last step, by (module, Hugging Face name).

    `gradients` are of trainable weights, summed over ranks and before clipping; `weights` are all of them,
    after the step, or none where only gradients are collected; `moments` are AdamW's two or Muon's momentum,
    of weights that the rank updates whole.
    """

    rank: int
    gradients: dict[tuple[str, str], Tensor]
    weights: dict[tuple[str, str], Tensor]
    moments: dict[tuple[str, str], tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's part of a run.

    Args:
        losses: this rank's part of the loss, of every step of the first repetition.
        notes: of the last timed steps, by repetition.
        plans: of these steps, where further batches follow; only from the first rank.
        plannings: how the plan of each step was obtained, by repetition; only from the first rank.
        save_stalls_s: by how long each checkpoint delayed this rank.
    """

    rank: int
    losses: tuple[float, ...]
    notes: tuple[Notes, ...]
    state: RankState | None
    plans: tuple[Lowered, ...] = ()
    plannings: tuple[Planning, ...] = ()
    save_stalls_s: tuple[float, ...] = ()
