"""Which gradients run: the exact rule of autograd on a partly frozen DAG, and the paper's."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from workbench.model.model_graph import ModelGraph
from workbench.model.trained import is_trained


@dataclass(frozen=True, slots=True)
class Needs:
    """The gradients that the backward of a layer computes."""

    input_grad: bool
    weight_grad: bool

    @property
    def any(self) -> bool:
        return self.input_grad or self.weight_grad


class FrozenRule(StrEnum):
    """How a layer's own trainability counts towards its input gradient.

    EXACT: autograd. The input gradient of a layer runs when a trainable parameter lies
        strictly upstream of its input.
    CORNSTARCH: Equation 3 of the ICML paper, p(L_l) = p(L_{l-1}) or not f(L_l): the
        layer's own parameters count as upstream of it.
    UNAWARE: what frozen-unaware planners assume, every gradient runs.
    """

    EXACT = "exact"
    CORNSTARCH = "cornstarch"
    UNAWARE = "unaware"


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Where gradients run, per module and layer.

    Args:
        needs: what each layer's backward computes.
        carries: whether the output of each layer asks for a gradient, so that a boundary
            behind it has a backward message.
    """

    needs: dict[str, tuple[Needs, ...]]
    carries: dict[str, tuple[bool, ...]]


def gradient_needs(
    model: ModelGraph, present: Collection[str] | None = None, rule: FrozenRule = FrozenRule.EXACT
) -> dict[str, tuple[Needs, ...]]:
    """Module -> gradients that each layer's backward computes; see `gradient_flow`."""
    return gradient_flow(model, present, rule).needs


def gradient_flow(
    model: ModelGraph, present: Collection[str] | None = None, rule: FrozenRule = FrozenRule.EXACT
) -> GradientFlow:
    """Which gradients run in which layer, and which layer outputs ask for one.

    A cross-attention layer without input is skipped: it trains nothing.

    Source: Cornstarch (ICML) section 3.1, Eq. 1-3; across modules as its text demands.
    Differs: by default the exact rule, see `FrozenRule`.

    Args:
        model: the DAG.
        present: modules that contribute items; edges from others carry nothing; None: all.
        rule: which rule.

    Complexity: O(layers + edges).
    """
    needs: dict[str, tuple[Needs, ...]] = {}
    carries: dict[str, tuple[bool, ...]] = {}
    for module in model.in_order:
        name, layers = module.name, module.layers
        entering, runs = [False] * len(layers), [not layer.reads_context for layer in layers]
        for edge in model.edges_into(name):
            if present is None or edge.source in present:
                for entered in edge.entered:
                    runs[entered] = True
                    entering[entered] |= carries[edge.source][edge.after_layer]
        upstream, needs_here, after = False, [], []
        for index, layer in enumerate(layers):
            upstream |= entering[index]
            trained = is_trained(layer) and runs[index]
            counts_itself = rule is FrozenRule.CORNSTARCH and trained
            needs_here.append(
                Needs(True, True)  # noqa: FBT003
                if rule is FrozenRule.UNAWARE
                else Needs(upstream or counts_itself, trained)
            )
            upstream |= trained
            after.append(upstream or rule is FrozenRule.UNAWARE)
        needs[name], carries[name] = tuple(needs_here), tuple(after)
    return GradientFlow(needs, carries)
