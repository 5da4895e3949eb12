"""Parts of a plan that megatron-core's MIMO and Megatron-Bridge cannot express: towers, placement, data
parallelism.

Source: megatron-core 0.19.2 (Apache-2.0), models/mimo: a rank has one module or all of them, modules on the
same ranks have neither pp nor cp, and later stages of a tower compute nothing (submodules/base.py);
Megatron-Bridge 0.6.2 (Apache-2.0), models/megatron_mimo/megatron_mimo_config.py.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import combinations

from workbench.export import expressible
from workbench.export.adapters import has_adapters
from workbench.export.decoder import Decoder, decoder_of
from workbench.export.latent import inexpressible_latent
from workbench.export.module_layouts import Placed, RankSharing, placed_llm, placed_modules, rank_sharing_of
from workbench.export.narrow_products import inexpressible_in_megatron
from workbench.export.scaled_positions import YARN, inexpressible_yarn, scaling_kind
from workbench.export.trained import Trained
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.item_tokens import packs_tiles
from workbench.model.layer import LayerKind
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan
from workbench.planner.plan_layouts import microbatch_samples

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_moe",
    "gpt2",
    "opt",
    "deepseek_v3",
    "gpt_oss",
)
_SLOPE = 1.702  # of `quick_gelu`
TOWERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
PROJECTORS = {"mlp": "mlp", "linear": "affine"}


def lacking(
    trained: Trained, adapters: Callable[[Trained], str | None] = expressible.with_adapters
) -> str | None:
    """The first part that no layouts let Megatron express; None: there is none.

    Args:
        adapters: returns those that the system does not have.
    """
    part = (
        adapters(trained)
        or _inexpressible_decoder(trained)
        or expressible.masked(trained)
        or expressible.too_precise(trained)
    )
    if part is not None or len(trained.model.modules) > 1:
        return part or _inexpressible_encoder(trained)
    return None if has_adapters(trained) else expressible.frozen_parts(trained)


def inexpressible(plan: Plan, allowed: Collection[RankSharing]) -> str | None:
    """The first part that these layouts cannot express, of what others can; None: there is none.

    Args:
        allowed: of several modules, that the system supports.
    """
    part = expressible.unplaced(plan) or _cut_experts(plan) or inexpressible_in_megatron(plan)
    if part is not None or len(plan.model.modules) == 1:
        return part
    return _inexpressible_placement(plan, allowed)


def _inexpressible_decoder(trained: Trained) -> str | None:
    """The property of the language model that Megatron's GPT lacks; None: there is none."""
    try:
        decoder = decoder_of(trained.model.llm)
    except ValueError as error:
        return str(error)
    if decoder.family and decoder.family not in FAMILIES:
        name = ARCHITECTURES[decoder.family].name
        return f"a language model of the family {name}"
    if decoder.latent is not None:
        return inexpressible_latent(trained, decoder)
    return _inexpressible_sinks(trained, decoder) or _inexpressible_scaling(trained, decoder)


def _inexpressible_scaling(trained: Trained, decoder: Decoder) -> str | None:
    kind = scaling_kind(decoder)
    if kind in (None, "llama3"):
        return None
    if kind == YARN and len(trained.model.modules) > 1:
        return "positions scaled as 'yarn' beside other modules"
    return inexpressible_yarn(decoder)


def _inexpressible_sinks(trained: Trained, decoder: Decoder) -> str | None:
    """What megatron-core lacks of a model with sinks, which is gpt-oss."""
    if not decoder.has_sinks:
        return None
    name = trained.model.llm.name
    alpha = decoder.source.get("swiglu_alpha", _SLOPE)
    parts = {
        f"attention of {name!r} with sinks beside other modules": len(trained.model.modules) > 1,
        f"attention of {name!r} without the biases of its experts": not decoder.qkv_bias,
        f"swiglu_alpha {alpha} of {name!r}, not {_SLOPE}": alpha != _SLOPE,
    }
    return next((part for part, is_so in parts.items() if is_so), None)


def _cut_experts(plan: Plan) -> str | None:
    """Experts with biases, which are those of models with sinks, whose products are cut."""
    llm, layout = plan.model.llm, placed_llm(plan).layout
    if layout.tp == 1 or layout.ep > 1 or not decoder_of(llm).has_sinks:
        return None
    return f"experts of {llm.name!r} with biases, cut over {layout.tp} ranks"


def encoders_of(trained: Trained) -> list[Module]:
    """Every module but the language model."""
    return [module for module in trained.model.modules if module is not trained.model.llm]


def _inexpressible_encoder(trained: Trained) -> str | None:
    for module in encoders_of(trained):
        source = module.source
        if source is None or source.architecture not in TOWERS:
            kind = "no configuration" if source is None else source.architecture
            return f"module {module.name!r} ({kind}): megatron-core's towers are {' and '.join(TOWERS)}"
        if packs_tiles(module):
            return f"tiles of images that {module.name!r} combines"
        if source.projector not in PROJECTORS:
            return f"the projector of {module.name!r}"
        if isinstance(source.feature_layer, tuple):
            return f"features of {module.name!r} from several hidden states"
        if source.feature_layer is not None and TOWERS[source.architecture] != "clip":  # it ends in no norm
            return f"features of {module.name!r} from hidden state {source.feature_layer}"
    return _partly_frozen(trained)


def _partly_frozen(trained: Trained) -> str | None:
    for module in trained.model.modules:
        body = {layer.trainable for layer in module.layers if layer.kind is not LayerKind.PROJECTOR}
        if len(body) > 1:
            return f"some frozen layers of {module.name!r} among trained ones"
    return None


def _inexpressible_placement(plan: Plan, allowed: Collection[RankSharing]) -> str | None:
    placed, sharing = placed_modules(plan), rank_sharing_of(plan)
    llm = plan.model.llm.name
    if sharing not in allowed:
        return str(sharing)
    samples = microbatch_samples(plan) * placed[llm].dp
    for name, each in placed.items():
        cut = f"pp {each.pp}" if each.pp > 1 else f"cp {each.layout.cp}" if each.layout.cp > 1 else None
        parts = {
            f"tp {each.layout.tp} of {name!r}, no power of two": each.layout.tp & (each.layout.tp - 1) > 0,
            f"{cut} of {name!r}: megatron-core's towers are whole on a rank": name != llm and cut is not None,
            f"{cut} of {name!r} on ranks that it shares": sharing is RankSharing.SHARED and cut is not None,
            f"dp {each.dp} of {name!r} under dp {placed[llm].dp} of {llm!r}": each.dp < placed[llm].dp,
            f"dp {each.dp} of {name!r} for {samples} samples that run at a time": samples % each.dp > 0,
        }
        part = next((part for part, is_so in parts.items() if is_so), None)
        if part is not None:
            return part
    return _inexpressible_chain(plan, placed)


def _inexpressible_chain(plan: Plan, placed: Mapping[str, Placed]) -> str | None:
    """Replicas that do not divide each other, or blocks that do not divide by stages."""
    for one, other in combinations(placed.values(), 2):
        if max(one.dp, other.dp) % min(one.dp, other.dp):
            names = f"{one.layout.module!r} and {other.layout.module!r}"
            return f"dp {one.dp} and {other.dp} of {names}, which do not divide each other"
    llm = plan.model.llm
    num_blocks, pp = len(llm.layers) - 2, placed[llm.name].pp
    if num_blocks % pp:
        return f"pp {pp} of {llm.name!r}, which does not divide its {num_blocks} blocks"
    return None
