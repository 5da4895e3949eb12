"""Goodput of a job under a kind of recovery, while nodes leave and join."""

from sim.failures.simulate import simulate_failures
from sim.failures.training_system import Checkpoints, Joins, System
from workbench.elastic.availability import Availability
from workbench.search.objectives.recovery import Recovery


def useful_samples_per_s(recovery: Recovery, trace: Availability, until_s: float) -> float:
    """Samples that count per second of wall time, from 0 to `until_s`; ValueError as `simulate_failures`."""
    return simulate_failures(system_of(recovery), trace, until_s).samples_per_s


def system_of(recovery: Recovery) -> System:
    """The recovery as a system of the failure simulator; nodes that make it no faster are spares."""
    every, checkpoints = recovery.checkpoint_every, None
    if every is not None:
        checkpoints = Checkpoints(every=every, save_s=recovery.save_s, copy_s=recovery.write_s)
    return System(
        name=recovery.kind.value,
        samples_per_s=recovery.samples_per_s,
        samples_per_step=recovery.samples_per_step,
        recover_s=recovery.recover_s,
        checkpoints=checkpoints,
        joins=Joins.AT_ONCE if recovery.takes_in else Joins.AT_RECOVERY,
        most_nodes=recovery.num_used,
        creation_s=0.0,
    )
