"""Cost of a change of nodes: for a job on pipeline templates, and for one that restarts from checkpoints."""

from dataclasses import dataclass

from sim.failures.training_system import Checkpoints, System
from workbench.strategies.elastic_templates import ElasticTemplates


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Cost of a change of nodes.

    Args:
        recover_s: seconds to detect, plan and connect, where state is kept in memory.
        restart_s: seconds of a restart of the job.
        checkpoint_every: steps between its checkpoints.
        storage_bytes_per_s: to write and read them.
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

    def systems(self, templates: ElasticTemplates) -> tuple[System, ...]:
        """Two systems: templates, and a grid of equal pipelines that restarts from its last checkpoint."""
        specification, samples = templates.planned.specification, float(len(templates.job.batch))
        counts = range(specification.num_nodes + 1)
        storage_s = templates.checkpoint_bytes / self.storage_bytes_per_s
        return (
            System(
                name="templates",
                samples_per_s=[
                    templates.samples_per_s(count) if count >= specification.threshold else 0.0
                    for count in counts
                ],
                samples_per_step=samples,
                recover_s=self.recover_s + templates.copy_s,
                creation_s=0.0,
            ),
            System(
                name="restarts",
                samples_per_s=[templates.grid_samples_per_s(count) for count in counts],
                samples_per_step=samples,
                recover_s=self.restart_s + storage_s,
                checkpoints=Checkpoints(every=self.checkpoint_every, save_s=storage_s),
                creation_s=0.0,
            ),
        )
