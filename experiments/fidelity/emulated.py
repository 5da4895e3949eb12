"""What a plan with more ranks than this machine has cores would take: emulated, never executed."""

from runtime.emulate import emulate
from runtime.rank_job import RunSettings
from workbench.commands.emulation import compose
from workbench.cost.profile import Profile
from workbench.plan.accept import accept
from workbench.plan.plan import Plan
from workbench.trace import Trace


def emulated_trace(plan: Plan, *, profile: Profile | None = None, repetitions: int = 3) -> Trace:
    """One step after a warm-up, every action timed alone, the median over the repetitions.

    Comparable with an execution where no two ranks share a core: an emulated action has the
    machine to itself.

    Args:
        plan: that runs on any number of ranks.
        profile: of collectives; None: the shipped one of the cluster's device, where needed.
        repetitions: each from fresh weights.

    Raises:
        ValueError: what `accept` and `emulate` refuse.
    """
    lowered, _ = accept(plan)
    return compose(lowered, emulate(lowered, RunSettings(warmup=1, repetitions=repetitions)), profile)
