"""What a change of nodes costs a job on templates, and one that restarts from checkpoints."""

from dataclasses import dataclass

from sim.failures.training_system import Checkpoints, System
from workbench.strategies.elastic_templates import ElasticTemplates


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a change of nodes costs.

    Args:
        recover_s: to notice, plan and connect, where state is kept in memory.
        restart_s: of a job that starts anew.
        checkpoint_every: steps between its checkpoints.
        storage_bytes_per_s: to and from them.
    """

    recover_s: float
    restart_s: float
    checkpoint_every: int
    storage_bytes_per_s: float

    def __post_init__(self) -> None:
        if min(self.recover_s, self.restart_s) < 0 or self.storage_bytes_per_s <= 0:
            raise ValueError(
                f"want recovery and restart in >= 0 s and storage of > 0 GB/s, got {self.recover_s} s, "
                f"{self.restart_s} s and {self.storage_bytes_per_s / 1e9} GB/s"
            )

    def systems(self, found: ElasticTemplates) -> tuple[System, ...]:
        """Templates; and a grid of equal pipelines that goes back to its last checkpoint."""
        specification, samples = found.planned.specification, float(len(found.job.batch))
        counts = range(specification.num_nodes + 1)
        loading_s = found.loaded_bytes / self.storage_bytes_per_s
        saving_s = found.saved_bytes / self.storage_bytes_per_s
        return (
            System(
                name="templates",
                samples_per_s=[
                    found.samples_per_s(count) if count >= specification.threshold else 0.0
                    for count in counts
                ],
                samples_per_step=samples,
                recover_s=self.recover_s + found.copy_s,
                creation_s=0.0,
            ),
            System(
                name="restarts",
                samples_per_s=[found.grid_samples_per_s(count) for count in counts],
                samples_per_step=samples,
                recover_s=self.restart_s + loading_s,
                checkpoints=Checkpoints(every=self.checkpoint_every, save_s=saving_s),
                creation_s=0.0,
            ),
        )
