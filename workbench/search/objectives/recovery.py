"""How a job recovers from the loss of a node, how fast it is then, and how often it saves."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite, sqrt

from workbench.elastic.availability import Availability


class Recovering(StrEnum):
    """Where the state comes from when a job recovers.

    CHECKPOINT: it restarts from the last checkpoint, on as many of the same pipelines as there are nodes
    for, as in Varuna. REPLICAS: state is copied from the memory of other pipelines, or of other instances
    of sharded weights, as in Oobleck.
    """

    CHECKPOINT = "checkpoint"
    REPLICAS = "replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One way to recover, with its speed.

    Args:
        kind: where the state comes from.
        samples_per_s: [n + 1] by number of nodes, 0 where the job waits for more.
        samples_per_step: global batch.
        recover_s: from a change of nodes to the next step.
        checkpoint_every: steps between checkpoints; None: no checkpoints.
        save_s: blocking time of a checkpoint.
        write_s: time after that until the checkpoint can be restored.
        takes_in: whether a returning node joins at once, or at the next loss.
    """

    kind: Recovering
    samples_per_s: tuple[float, ...]
    samples_per_step: int
    recover_s: float
    checkpoint_every: int | None = None
    save_s: float = 0.0
    write_s: float = 0.0
    takes_in: bool = True

    @property
    def step_s(self) -> float:
        """Seconds per step on all nodes."""
        return self.samples_per_step / self.samples_per_s[-1]

    @property
    def num_used(self) -> int:
        """Number of nodes beyond which it gets no faster."""
        return self.samples_per_s.index(max(self.samples_per_s))


class Saving(StrEnum):
    """How a checkpoint is written.

    BEHIND: training stops while state is copied to the host's memory, and continues while that is written,
    as in `workbench run`; a loss before it is complete goes back to the previous checkpoint. STOPPING:
    training stops until it is written, as in Varuna.
    """

    BEHIND = "behind"
    STOPPING = "stopping"


FailureSim = Callable[[Recovery, Availability, float], float]
"""Useful samples per second over the given seconds of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Costs of a loss.

    Args:
        notice_s: to detect it, plan and connect, if the state is in memory.
        restart_s: to start the job anew; loading is added.
        storage_bytes_per_s: to and from checkpoints.
        saving: how checkpoints are written.
        copies: of all state, each a pipeline or an instance of sharded weights, that must remain for a job
            with its state in memory: one more loss than it survives.

    Raises:
        ValueError: a time below 0, or storage without a rate.
    """

    notice_s: float = 2.0
    restart_s: float = 60.0
    storage_bytes_per_s: float = 1e9
    saving: Saving = Saving.BEHIND
    copies: int = 2

    def __post_init__(self) -> None:
        if min(self.notice_s, self.restart_s) < 0 or self.storage_bytes_per_s <= 0 or self.copies < 2:
            raise ValueError(
                f"recovery: want times >= 0 s, storage of > 0 GB/s and >= 2 pipelines left, got "
                f"{self.notice_s:g} s, {self.restart_s:g} s, {self.storage_bytes_per_s / 1e9:g} GB/s and "
                f"{self.copies}"
            )


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Optimal seconds of work between checkpoints; the MTBF if saving takes twice as long or longer.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equation 37.
    """
    if not (isfinite(mtbf_s) and mtbf_s > 0 and save_s >= 0):
        raise ValueError(
            f"want a mean time between failures > 0 s and a save in >= 0 s, got {mtbf_s} s and {save_s} s"
        )
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - save_s
