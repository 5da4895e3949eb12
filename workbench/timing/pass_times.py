"""Seconds of the passes of a stage over a microbatch, as sums over its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from workbench.cost.model import LayerTime, unmeasured_of
from workbench.cost.profile import Profile
from workbench.float_sum import float_sum
from workbench.model.frozen import Needs
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of the four passes of one stage over one microbatch, without executor overhead.

    `through_s` (gradients of inputs) and `weights_s` are the parts of a whole backward; `split_through_s`
    and `split_weights_s` those of a split backward, which may run at another pace.
    """

    forward_s: float
    through_s: float
    weights_s: float
    recompute_s: float
    split_through_s: float
    split_weights_s: float
    unmeasured: frozenset[str] = field(default_factory=frozenset)

    def of(self, kind: Pass) -> float:
        """Return the seconds of a pass; `B` is recompute, gradients through the layers and weight gradients.

        `I` + `W` = `B` unless the machine's split backwards were measured.
        """
        return {
            Pass.F: self.forward_s,
            Pass.B: self.recompute_s + self.through_s + self.weights_s,
            Pass.I: self.recompute_s + self.split_through_s,
            Pass.W: self.split_weights_s,
        }[kind]


def with_gathers(
    time: LayerTime,
    forward_gather_s: float,
    backward_gather_s: float,
    unmeasured: frozenset[str] = frozenset(),
) -> LayerTime:
    """Add a gather after a layer's forward, and one after its input's gradient."""
    split_s = None if time.split_input_s is None else time.split_input_s + backward_gather_s
    alone_s = None if time.forward_only_s is None else time.forward_only_s + forward_gather_s
    return replace(
        time,
        forward_s=time.forward_s + forward_gather_s,
        forward_only_s=alone_s,
        input_grad_s=time.input_grad_s + backward_gather_s,
        split_input_s=split_s,
        unmeasured=time.unmeasured | unmeasured,
    )


def pass_times(
    times: Sequence[LayerTime],
    needs: Sequence[Needs],
    recomputed: Sequence[bool],
    again_s: Sequence[float] = (),
) -> PassTimes:
    """Sum over the layers of a stage; a recomputed layer is computed again where any of its gradients runs.

    `recomputed` [layers]: as of `recomputed_in`; `again_s` [layers]: seconds of the parts that are computed
    again where not the whole layer is.

    A forward keeps something for the backward only where a gradient runs and nothing is computed again.
    Recomputed layers without a gradient are checkpointed too if any layer of the stage has one; a stage
    without a backward has no checkpoints.

    Complexity: O(layers).
    """
    has_backward = any(need.any for need in needs)
    pairs = list(zip(times, needs, strict=True))
    return PassTimes(
        forward_s=float_sum(
            time.checkpointed_forward_s(need)
            if again and has_backward
            else time.forward_s
            if need.any
            else time.forward_without_graph_s()
            for (time, need), again in zip(pairs, recomputed, strict=True)
        ),
        through_s=float_sum(time.through_s(need) for time, need in pairs),
        weights_s=float_sum(time.weights_s(need) for time, need in pairs),
        recompute_s=float_sum(
            time.again_s()
            for (time, need), again in zip(pairs, recomputed, strict=True)
            if again and need.any
        )
        + float_sum(
            seconds
            for seconds, need, again in zip(again_s, needs, recomputed, strict=bool(again_s))
            if need.any and not again
        ),
        split_through_s=float_sum(time.split_through_s(need) for time, need in pairs),
        split_weights_s=float_sum(time.split_weights_s(need) for time, need in pairs),
        unmeasured=frozenset(unmeasured_of(times)),
    )


def pace(plan: Plan, stage: Stage, profile: Profile, kind: Pass) -> float:
    """Return the factor between a stage's passes in a running plan and its layers alone in a loop.

    Where all stages of a replica are on the same ranks, there are no messages between its passes, which
    then find caches and cores as a loop does.

    Complexity: O(stages) where the profile distinguishes the two, else O(1).
    """
    if not profile.without_messages:
        return profile.pipeline_factor(kind)
    ranks = {other.flat_ranks for other in plan.stages if other.replica == stage.replica}
    return profile.pipeline_factor(kind) if len(ranks) > 1 else profile.alone_factor(kind)
