"""Step time of a plan with a device for every rank: predicted from a profile, and emulated on one device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from experiments.fidelity.in_pipeline import Rehearsal, with_pipeline_factors
from runtime.emulation.compose import compose
from runtime.emulation.emulate import emulate
from runtime.run_settings import RunSettings
from runtime.step.first_weights import DrawnWeights
from runtime.world.device import kind_of_device
from sim.step.engine import simulate
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile
from workbench.job.matching import check_profile
from workbench.memory.account import MemoryTable
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.timing.accept import accept
from workbench.timing.price import Price, price
from workbench.timing.provenance import with_provenance
from workbench.trace import Trace

STEPS = 5
WARMUP = 2  # AdamW makes its state in the first step; sums of gradients still grow the heap in the second
WAIT_S = 60.0  # of any single wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Everything predicted for a plan, and the profile it is based on."""

    plan: Plan
    profile: Profile
    plan_hash: str
    lowered: Lowered
    prices: Price
    memory: MemoryTable
    simulated: Trace

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return self.simulated.iteration_s

    @property
    def durations_s(self) -> Mapping[Action, float]:
        """Seconds of every action, on its slowest rank."""
        return self.prices.durations_s


def predict(plan: Plan, profile: Profile) -> Prediction:
    """Check, price and simulate a plan; ValueError when it is refused."""
    lowered, memory = accept(plan)
    prices = price(lowered, CostModel(profile))
    simulated = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory)
    return Prediction(
        plan=plan,
        profile=profile,
        plan_hash=plan_hash(plan),
        lowered=lowered,
        prices=prices,
        memory=memory,
        simulated=with_provenance(simulated, plan, profile, prices),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of emulating a plan.

    Args:
        trace: one step composed from the medians of all actions by the simulator's rules.
        steps: every timed step composed from its own times; they show the spread.
        losses: of every step, including warm-up.
    """

    trace: Trace
    steps: tuple[Trace, ...]
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return self.trace.iteration_s

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds of the iteration, step by step."""
        return tuple(step.iteration_s for step in self.steps)


def execute_emulated(
    plan: Plan,
    device: torch.device,
    *,
    steps: int = STEPS,
    profile: Profile | None = None,
    drawn: DrawnWeights | None = None,
) -> Execution:
    """Emulate a plan's ranks on one device, an action at a time, and compose their times.

    Args:
        device: emulates all ranks.
        steps: number of timed steps after warm-up.
        profile: of the device, used only for collectives, which one device cannot show; None: the
            shipped profile of the cluster's device, where the plan has collectives.
        drawn: as in `emulate`.

    Raises:
        ValueError: what `accept` and `emulate` refuse, or a profile of another device.
        RankError: an action failed.
    """
    if profile is not None:
        check_profile(profile, kind_of_device(device))
    lowered, _ = accept(plan)
    settings = RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S)
    emulation = emulate(lowered, settings, device=device, drawn=drawn)
    return Execution(
        trace=compose(lowered, emulation, simulate, profile),
        steps=tuple(compose(lowered, emulation.of_step(index), simulate, profile) for index in range(steps)),
        losses=emulation.losses,
    )


def rehearsed(profile: Profile, runs: Sequence[tuple[Prediction, Execution]]) -> Profile:
    """Return the profile with factors fitted to these runs: how much slower passes are in a pipeline.

    The plans must not be among the judged ones; errors as in `with_pipeline_factors`.
    """
    return with_pipeline_factors(
        profile,
        [Rehearsal(simulated=predicted.simulated, executed=executed.steps) for predicted, executed in runs],
    )
