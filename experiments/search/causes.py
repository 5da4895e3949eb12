"""What a plan's step goes into, as shares of the mean rank's time: what is left for another plan to gain."""

from collections import defaultdict

from sim.predict import predict, prices_of
from workbench.cost.model import CostModel
from workbench.explain.critical_path import CAUSES, COMPUTE, Cause
from workbench.explain.explanation import parts_of_all
from workbench.explain.idle import idle_by_cause, idle_time
from workbench.plan.plan import Plan
from workbench.timing.accept import accept
from workbench.trace import Lane

KERNELS = "kernels"


def causes_of(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Cause -> share of the step, largest first; together 1.

    A rank computes, and its passes are kernels, stragglers among token shards, collectives inside layers and
    launches; or it stands still, for a cause of `IdleCause`. Ranks without a stage count.

    Args:
        plan: of the batch that it was made for.

    Raises:
        ValueError: the plan is refused.

    Complexity: one run of the engine and a few prices.
    """
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, cost)
    parts = parts_of_all(lowered, cost, prices_of)
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in trace.spans:
        if span.lane is not Lane.COMPUTE:
            continue
        took_s, cause = span.end_s - span.start_s, CAUSES[span.action.kind]
        if cause not in COMPUTE or span.action not in parts:
            seconds[cause] += took_s
            continue
        of = parts[span.action]
        seconds[KERNELS] += of.kernels * took_s
        seconds[Cause.STRAGGLER] += of.straggler * took_s
        seconds[Cause.INSIDE] += of.collectives * took_s
        seconds[Cause.LAUNCH] += of.launch * took_s
    ranks = plan.cluster.num_ranks
    shares = {str(cause): each / ranks / trace.iteration_s for cause, each in seconds.items()}
    for idle in idle_by_cause(plan, idle_time(lowered, trace)):
        shares[str(idle.cause)] = shares.get(str(idle.cause), 0.0) + idle.seconds / trace.iteration_s
    return dict(
        sorted(((cause, share) for cause, share in shares.items() if share), key=lambda each: -each[1])
    )
