"""The layers of a model's modules as one chain, so that a template spans all modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.elastic.chain import LayerChain
from workbench.elastic.template import TemplateStage
from workbench.model.model_graph import ModelGraph

Owner = tuple[str, int]  # module, layer of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """A chain, and the module layer that each of its layers is."""

    chain: LayerChain
    owners: tuple[Owner, ...]

    def runs_of(self, stage: TemplateStage) -> tuple[tuple[str, int, int], ...]:
        """(module, first layer, end) of a template's stage; several if it spans modules."""
        owners = self.owners[stage.first : stage.end]
        names = dict.fromkeys(name for name, _ in owners)
        layers = {name: [layer for owner, layer in owners if owner == name] for name in names}
        return tuple((name, indices[0], indices[-1] + 1) for name, indices in layers.items())


def chain_order(model: ModelGraph) -> tuple[Owner, ...]:
    """All layers in data order: modules topologically, ties as they are listed.

    A DAG becomes a chain: parallel encoders are placed one after the other, and their outputs to the LLM
    bypass the stages between. Their order does not affect the objective, which is a sum over stages and the
    slowest one.
    """
    return tuple((module.name, layer) for module in model.in_order for layer in range(len(module.layers)))


def model_chain(
    model: ModelGraph,
    widths: Sequence[int],
    time_s: Callable[[str, int, int], float],
    held_bytes: Callable[[str, int, int], int],
    capacity_bytes: float,
) -> ModelChain:
    """The chain from which templates of a whole multimodal model are cut.

    Args:
        widths: possible GPUs per stage.
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
