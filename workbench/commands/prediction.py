"""A plan's simulated trace, with what the prediction rests on."""

from workbench.cost.model import CostModel
from workbench.cost.profile import Profile
from workbench.plan.lowered import Lowered
from workbench.plan.memory import MemoryTable
from workbench.plan.price import price
from workbench.plan.provenance import with_provenance
from workbench.trace import Trace


def predict(lowered: Lowered, memory: MemoryTable, profile: Profile) -> Trace:
    """Simulate a plan with the prices of a profile; what was not measured stands in the details.

    On a GPU, attention of token shards is simulated tile by tile.

    Raises:
        ValueError: a plan that the profile cannot price, or that deadlocks.
    """
    from sim.attention_price import attention_of
    from sim.deadlock import DeadlockError
    from sim.engine import simulate

    cost = CostModel(profile)
    prices = price(lowered, cost, attention=attention_of(lowered.plan, cost))
    try:
        trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory)
    except DeadlockError as error:
        raise ValueError(str(error)) from error
    return with_provenance(trace, lowered.plan, profile, prices)
