"""Families of language models from transformers' modules: plain, and with experts routed in usual ways."""

import math
from types import ModuleType
from typing import Any

from torch import nn

from runtime.models.adapter import CutKind, CutRules
from runtime.models.decoder import DecoderFamily
from runtime.models.glm import CorrectedRouter, GlmMixture
from runtime.models.mixture import Experts, MixtralMixture, Mixture, WideRouter
from runtime.models.separate_experts import SeparateExperts

CLASSES = {"config": "Config", "layer": "DecoderLayer", "rotary": "RotaryEmbedding", "norm": "RMSNorm"}


def family(modeling: ModuleType, name: str, **differs: Any) -> DecoderFamily:
    """A family of transformers' classes in a module, by their names' prefix; `differs`: other fields."""
    named = {field: f"{name}{ending}" for field, ending in CLASSES.items() if field not in differs}
    return DecoderFamily(
        **{field: getattr(modeling, class_name) for field, class_name in named.items()}, **differs
    )


def routed_family(
    modeling: ModuleType,
    name: str,
    mixture: type[Mixture],
    *,
    classes: tuple[str, str, str] = ("TopKRouter", "Experts", "SparseMoeBlock"),
    own_router: type[nn.Module] = WideRouter,
    cuts: CutRules = (),
    **differs: Any,
) -> DecoderFamily:
    """A family whose blocks have experts, with its router in place of transformers'.

    Args:
        mixture: of its experts.
        classes: endings of the names of transformers' router, experts and mixture.
        own_router: which is made from transformers', and whose weights are whole on every rank.
        cuts: of other parts of its blocks.
        differs: as of `family`.
    """
    router, experts, block = (getattr(modeling, f"{name}{ending}") for ending in classes)
    return family(
        modeling,
        name,
        router=router,
        own_router=own_router,
        experts=experts,
        cuts=((Experts, CutKind.EXPERTS), (own_router, CutKind.PARTIAL), *cuts),
        mixture_kinds=((block, mixture),),
        **differs,
    )


def sparse_family(
    modeling: ModuleType,
    name: str,
    separate: SeparateExperts | None,
    *,
    mixture: type[Mixture] = MixtralMixture,
    **differs: Any,
) -> DecoderFamily:
    """A family whose blocks have experts routed as in Mixtral.

    Args:
        separate: names of experts that its checkpoints store one by one; None: they do not.
        mixture: of its experts.
        differs: as of `routed_family`.
    """
    return routed_family(modeling, name, mixture, separate_experts=separate, **differs)


def root_of_width(config: Any) -> float:
    """What Gemma multiplies token embeddings by."""
    return math.sqrt(config.hidden_size)


def corrected_family(modeling: ModuleType, name: str, **differs: Any) -> DecoderFamily:
    """A family whose blocks have experts routed as in GLM-4.5; `differs`: as of `routed_family`."""
    return routed_family(
        modeling,
        name,
        GlmMixture,
        classes=("TopkRouter", "Experts", "MoE"),
        own_router=CorrectedRouter,
        separate_experts=SeparateExperts(),
        predicts_ahead=True,
        **differs,
    )
