"""The layers of a model's modules as one chain, so that a template spans all modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.elastic.chain import LayerChain
from workbench.elastic.template import TemplateStage
from workbench.model.model_graph import ModelGraph

Owner = tuple[str, int]  # module, layer of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """A chain and whose layer each of its layers is."""

    chain: LayerChain
    owners: tuple[Owner, ...]

    def runs_of(self, stage: TemplateStage) -> tuple[tuple[str, int, int], ...]:
        """(module, first layer, end) of a template's stage; more than one where it crosses modules."""
        mine = self.owners[stage.first : stage.end]
        names = dict.fromkeys(name for name, _ in mine)
        layers = {name: [layer for owner, layer in mine if owner == name] for name in names}
        return tuple((name, held[0], held[-1] + 1) for name, held in layers.items())


def chain_order(model: ModelGraph) -> tuple[Owner, ...]:
    """All layers in an order in which data can pass: modules topologically, ties as they are listed.

    A DAG becomes a chain: encoders beside each other stand one after the other, and what they send
    to the LLM travels past the stages between. Their order costs nothing in the objective, which is a
    sum over stages and the slowest one.
    """
    return tuple((module.name, layer) for module in model.in_order for layer in range(len(module.layers)))


def model_chain(
    model: ModelGraph,
    widths: Sequence[int],
    time_s: Callable[[str, int, int], float],
    held_bytes: Callable[[str, int, int], int],
    capacity_bytes: float,
) -> ModelChain:
    """Templates of a whole multimodal model are cut from this.

    Args:
        widths: GPUs a stage may have.
        time_s, held_bytes: of (module, layer, GPUs): forward and backward seconds of a microbatch, and
            bytes on each GPU.

    Raises:
        ValueError: what LayerChain refuses.
    """
    owners = chain_order(model)
    return ModelChain(
        chain=LayerChain(
            widths=tuple(widths),
            time_s=tuple(tuple(time_s(*owner, width) for width in widths) for owner in owners),
            held_bytes=tuple(tuple(held_bytes(*owner, width) for width in widths) for owner in owners),
            capacity_bytes=capacity_bytes,
        ),
        owners=owners,
    )
