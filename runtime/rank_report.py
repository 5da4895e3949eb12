"""What one rank of a run brings back."""

from dataclasses import dataclass, field

from torch import Tensor

from runtime.step.timing import Notes
from runtime.step_plans import Planning
from workbench.plan.lowered import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank holds at its last step, by (module, Hugging Face name).

    `gradients` are of trainable weights, summed over ranks and before clipping; `weights` are
    all, after the step, or none where gradients alone were asked for; `moments` are AdamW's two of the
    weights that it updates whole.
    """

    rank: int
    gradients: dict[tuple[str, str], Tensor]
    weights: dict[tuple[str, str], Tensor]
    moments: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's part of a run.

    Args:
        losses: this rank's part of the loss, of every step of the first repetition.
        notes: of the last timed steps, repetition by repetition.
        plans: of these steps, where batches follow the first; told by the first rank alone.
        plannings: how each of its steps came by its plan, repetition by repetition, likewise.
        save_stalls_s: how long each checkpoint held up this rank.
    """

    rank: int
    losses: tuple[float, ...]
    notes: tuple[Notes, ...]
    state: RankState | None
    plans: tuple[Lowered, ...] = ()
    plannings: tuple[Planning, ...] = ()
    save_stalls_s: tuple[float, ...] = ()
