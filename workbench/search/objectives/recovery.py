"""What a job does when a node is lost: how it recovers, how fast it then is, how often it saves."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from workbench.elastic.availability import Availability


class Recovering(StrEnum):
    """Where the state is that a job goes on with.

    CHECKPOINT: it restarts from the last one, on pipelines equal to those before, as many as there are nodes
    for, as Varuna does. REPLICAS: in the memory of other pipelines, or of other instances of sharded
    weights, from which it is copied, as in Oobleck.
    """

    CHECKPOINT = "checkpoint"
    REPLICAS = "replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One way to go on, with its speed.

    Args:
        kind: of recovery.
        samples_per_s: [n + 1] by number of nodes, 0 where it waits for more.
        samples_per_step: global batch.
        recover_s: from a change of nodes to the next step.
        checkpoint_every: steps between checkpoints; None: it saves none.
        save_s: of a checkpoint, while which training stops.
        write_s: after that, until the checkpoint is one to go back to.
        takes_in: whether a node that comes back is taken in at once, or at the next loss.
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
        """On all nodes."""
        return self.samples_per_step / self.samples_per_s[-1]

    @property
    def num_used(self) -> int:
        """Nodes beyond which it gets no faster."""
        return self.samples_per_s.index(max(self.samples_per_s))


class Saving(StrEnum):
    """How a checkpoint is written.

    BEHIND: training stops while state is copied to the host's memory, and goes on while that is written, as
    in `workbench run`; until then a loss goes back to the checkpoint before. STOPPING: training stops until
    it is written, as in Varuna.
    """

    BEHIND = "behind"
    STOPPING = "stopping"


FailureSim = Callable[[Recovery, Availability, float], float]
"""Useful samples a second over so many seconds of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """What a loss costs.

    Args:
        notice_s: to notice it, plan and connect, where the state is in memory.
        restart_s: of a job that starts anew; loading is added.
        storage_bytes_per_s: to and from checkpoints.
        saving: how they are written.
        copies: of all state, each a pipeline or an instance of sharded weights, that must be left for a job
            whose state is in memory: a loss more than it survives.

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
