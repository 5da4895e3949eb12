"""What of a plan Megatron-Bridge 0.6 cannot say: its towers, its places, its data parallelism.

Source: Megatron-Bridge 0.6.2 (Apache-2.0), models/megatron_mimo/megatron_mimo_config.py.
"""

from collections.abc import Mapping
from itertools import combinations

from workbench.export import sayable
from workbench.export.megatron import unsayable_decoder
from workbench.export.placed import Placed, Placing, llm_of, placed_modules, placing_of
from workbench.model.layer import LayerKind
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan

TOWERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
PROJECTORS = {"mlp": "mlp", "linear": "affine"}


def unsayable(plan: Plan) -> str | None:
    """The first part; None: it can say the plan."""
    found = (
        sayable.unplaced(plan) or unsayable_decoder(plan) or sayable.masked(plan) or sayable.too_precise(plan)
    )
    if found is not None or len(plan.model.modules) == 1:
        return found or sayable.frozen_parts(plan)
    return _unsayable_encoder(plan) or _unsayable_places(plan)


def encoders_of(plan: Plan) -> list[Module]:
    """Every module but the language model."""
    return [module for module in plan.model.modules if module is not llm_of(plan)]


def _unsayable_encoder(plan: Plan) -> str | None:
    for module in encoders_of(plan):
        source = module.source
        if source is None or source.architecture not in TOWERS:
            kind = "no configuration" if source is None else source.architecture
            return f"module {module.name!r} ({kind}): megatron-core's towers are {' and '.join(TOWERS)}"
        if source.projector not in PROJECTORS:
            return f"the projector of {module.name!r}"
        if source.feature_layer is not None:
            return f"features of {module.name!r} from hidden state {source.feature_layer}"
    return _partly_frozen(plan)


def _partly_frozen(plan: Plan) -> str | None:
    for module in plan.model.modules:
        body = {layer.trainable for layer in module.layers if layer.kind is not LayerKind.PROJECTOR}
        if len(body) > 1:
            return f"some frozen layers of {module.name!r} among trained ones"
    return None


def _unsayable_places(plan: Plan) -> str | None:
    placed, placing = placed_modules(plan), placing_of(plan)
    llm = llm_of(plan).name
    if placing is not Placing.APART:
        return str(placing) if placing is Placing.SHARED else "modules that share some of their ranks"
    for name, each in placed.items():
        if each.layout.tp & (each.layout.tp - 1):
            return f"tp {each.layout.tp} of {name!r}, no power of two"
        if name != llm and (each.pp > 1 or each.layout.cp > 1):
            degree = f"pp {each.pp}" if each.pp > 1 else f"cp {each.layout.cp}"
            return f"{degree} of {name!r}: megatron-core's towers are whole on a rank"
        if name != llm and each.dp < placed[llm].dp:
            return f"dp {each.dp} of {name!r} under dp {placed[llm].dp} of {llm!r}"
    return _unsayable_chain(plan, placed)


def _unsayable_chain(plan: Plan, placed: Mapping[str, Placed]) -> str | None:
    """Replicas that do not divide each other, and blocks that do not divide by stages."""
    for one, other in combinations(placed.values(), 2):
        if max(one.dp, other.dp) % min(one.dp, other.dp):
            names = f"{one.layout.module!r} and {other.layout.module!r}"
            return f"dp {one.dp} and {other.dp} of {names}, which do not divide each other"
    llm = llm_of(plan)
    num_blocks, pp = len(llm.layers) - 2, placed[llm.name].pp
    if num_blocks % pp:
        return f"pp {pp} of {llm.name!r}, which does not divide its {num_blocks} blocks"
    return None
