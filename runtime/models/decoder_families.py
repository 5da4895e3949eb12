"""Table of language models with Llama's structure and parts of their own."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.opt import modeling_opt as opt
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3_omni
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_vl_moe

from runtime.models import cohere, deepseek, delta_net
from runtime.models import gemma4 as own_gemma4
from runtime.models import gpt_oss as own_gpt_oss
from runtime.models import granite_hybrid as own_granite
from runtime.models import lfm2 as own_lfm2
from runtime.models import nemotron_h as own_nemotron_h
from runtime.models.adapter import CutKind, CutRules
from runtime.models.decoder import DecoderFamily, PositionTable
from runtime.models.glm import CorrectedRouter, GlmMixture
from runtime.models.llama4 import Llama4Mixture, adapt
from runtime.models.mixture import Experts, MixtralMixture, Mixture, WideRouter
from runtime.models.separate_experts import SeparateExperts

CLASSES = {"config": "Config", "layer": "DecoderLayer", "rotary": "RotaryEmbedding", "norm": "RMSNorm"}


def family(modeling: ModuleType, name: str, **differs: Any) -> DecoderFamily:
    """A family of transformers' classes in a module, by their names' prefix; `differs`: other fields."""
    named = {field: f"{name}{ending}" for field, ending in CLASSES.items() if field not in differs}
    return DecoderFamily(
        **{field: getattr(modeling, class_name) for field, class_name in named.items()}, **differs
    )


def sparse_family(
    modeling: ModuleType,
    name: str,
    separate: SeparateExperts | None,
    *,
    mixture: type[Mixture] = MixtralMixture,
    cuts: CutRules = (),
    **differs: Any,
) -> DecoderFamily:
    """A family whose blocks have experts routed as in Mixtral.

    Args:
        separate: names of experts that its checkpoints store one by one; None: they do not.
        mixture: of its experts.
        cuts: of other parts of its blocks.
        differs: as of `family`.
    """
    router, experts, block = (
        getattr(modeling, f"{name}{ending}") for ending in ("TopKRouter", "Experts", "SparseMoeBlock")
    )
    return family(
        modeling,
        name,
        router=router,
        experts=experts,
        cuts=((Experts, CutKind.EXPERTS), (WideRouter, CutKind.PARTIAL), *cuts),
        mixture_kinds=((block, mixture),),
        separate_experts=separate,
        **differs,
    )


HYBRID: Mapping[str, Any] = {  # gated DeltaNet in some blocks
    "adapt": delta_net.adapt,
    "cuts": delta_net.CUTS,
    "fills": delta_net.FILLS,
    "ignored": ("mtp.",),  # a head that predicts several tokens
    "norm_offset": 1.0,
}


def corrected_family(
    modeling: ModuleType, name: str, *, cuts: CutRules = (), **differs: Any
) -> DecoderFamily:
    """A family whose blocks have experts routed as in GLM-4.5.

    Args:
        cuts: of other parts of its blocks.
        differs: as of `family`.
    """
    router, experts, block = (getattr(modeling, f"{name}{end}") for end in ("TopkRouter", "Experts", "MoE"))
    return family(
        modeling,
        name,
        router=router,
        own_router=CorrectedRouter,
        experts=experts,
        cuts=((Experts, CutKind.EXPERTS), (CorrectedRouter, CutKind.PARTIAL), *cuts),
        mixture_kinds=((block, GlmMixture),),
        separate_experts=SeparateExperts(),
        predicts_ahead=True,
        **differs,
    )


DECODERS: Mapping[str, DecoderFamily] = {
    "llama": family(llama, "Llama"),
    "llama4_text": family(
        llama4,
        "Llama4Text",
        adapt=adapt,
        cuts=((Experts, CutKind.EXPERTS), (llama4.Llama4Router, CutKind.PARTIAL)),
        mixture_kinds=((llama4.Llama4TextMoe, Llama4Mixture),),
    ),
    "qwen2": family(qwen2, "Qwen2"),
    "qwen2_vl_text": family(qwen2_vl, "Qwen2VL", config=qwen2_vl.Qwen2VLTextConfig, rotates_by_axes=True),
    "qwen3": family(qwen3, "Qwen3"),
    "qwen3_vl_text": family(qwen3_vl, "Qwen3VLText", rotates_by_axes=True),
    "qwen3_vl_moe_text": sparse_family(
        qwen3_vl_moe, "Qwen3VLMoeText", None, rotates_by_axes=True, transposes_experts=True
    ),
    "qwen3_omni_moe_text": sparse_family(
        qwen3_omni,
        "Qwen3OmniMoeThinkerText",
        SeparateExperts(),
        config=qwen3_omni.Qwen3OmniMoeTextConfig,
        rotates_by_axes=True,
    ),
    "qwen3_next": sparse_family(
        qwen3_next, "Qwen3Next", SeparateExperts(), mixture=delta_net.GatedMixture, **HYBRID
    ),
    "qwen3_5_text": family(
        qwen3_5,
        "Qwen3_5",
        config=qwen3_5.Qwen3_5TextConfig,
        rotary=qwen3_5.Qwen3_5TextRotaryEmbedding,
        rotates_by_axes=True,
        **HYBRID,
    ),
    "qwen3_5_moe_text": sparse_family(
        qwen3_5_moe,
        "Qwen3_5Moe",
        SeparateExperts(),
        mixture=delta_net.GatedMixture,
        config=qwen3_5_moe.Qwen3_5MoeTextConfig,
        rotary=qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding,
        rotates_by_axes=True,
        **HYBRID,
    ),
    "qwen3_moe": sparse_family(qwen3_moe, "Qwen3Moe", SeparateExperts()),
    "deepseek_v2": family(
        deepseek_v2,
        "DeepseekV2",
        router=deepseek_v2.DeepseekV2TopkRouter,
        own_router=deepseek.GroupedRouter,
        experts=deepseek_v2.DeepseekV2Experts,
        cuts=((Experts, CutKind.EXPERTS), (deepseek.GroupedRouter, CutKind.PARTIAL), *deepseek.CUTS),
        mixture_kinds=((deepseek_v2.DeepseekV2Moe, GlmMixture),),
        separate_experts=SeparateExperts(),
        adapt=deepseek.adapt,
    ),
    "deepseek_v3": corrected_family(deepseek_v3, "DeepseekV3", cuts=deepseek.CUTS),
    "glm4": family(glm4, "Glm4"),
    "glm4_moe": corrected_family(glm4_moe, "Glm4Moe"),
    "glm4v_text": family(glm4v, "Glm4vText", norm=glm4v.Glm4vRMSNorm, rotates_by_axes=True),
    "glm4v_moe_text": corrected_family(glm4v_moe, "Glm4vMoeText", rotates_by_axes=True),
    "mistral": family(mistral, "Mistral"),
    "mixtral": sparse_family(
        mixtral, "Mixtral", SeparateExperts(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")
    ),
    "gemma": family(gemma, "Gemma", norm_offset=1.0, scales_embedding=True),
    "gemma2": family(gemma2, "Gemma2", norm_offset=1.0, scales_embedding=True),
    "gemma3_text": family(
        gemma3,
        "Gemma3",
        config=gemma3.Gemma3TextConfig,
        rotates_by_layer_type=True,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "gemma4_text": family(
        gemma4,
        "Gemma4Text",
        norm=gemma4.Gemma4RMSNorm,
        rotates_by_layer_type=True,
        scales_embedding=True,
        adapt=own_gemma4.adapt,
        moved=((f"block.{own_gemma4.BESIDE}.", "block."),),
        cuts=own_gemma4.CUTS,
        fills=own_gemma4.FILLS,
        regions=(own_gemma4.BESIDE,),
        mixture_kinds=((own_gemma4.Routed, own_gemma4.Gemma4Mixture),),
    ),
    "cohere2": family(cohere2, "Cohere2", norm=None, norm_bias=False, adapt=cohere.adapt, scales_logits=True),
    "phi3": family(phi3, "Phi3"),
    "phi": family(phi, "Phi", norm=None, final_norm="model.final_layernorm", head_bias=True),
    "gpt2": family(
        gpt2,
        "GPT2",
        layer=gpt2.GPT2Block,
        rotary=None,
        positions=PositionTable(name="transformer.wpe"),
        norm=None,
        embedding="transformer.wte",
        pads_embedding=False,
        layers="transformer.h",
        final_norm="transformer.ln_f",
    ),
    "gpt_oss": family(
        gpt_oss,
        "GptOss",
        adapt=own_gpt_oss.adapt,
        cuts=own_gpt_oss.CUTS,
        fills=own_gpt_oss.FILLS,
        mixture_kinds=((gpt_oss.GptOssMLP, own_gpt_oss.GptOssMixture),),
    ),
    "lfm2": family(
        lfm2,
        "Lfm2",
        final_norm="model.embedding_norm",
        adapt=own_lfm2.adapt,
        cuts=own_lfm2.CUTS,
        regions=own_lfm2.REGIONS,
    ),
    "nemotron_h": family(
        nemotron_h,
        "NemotronH",
        layer=nemotron_h.NemotronHBlock,
        rotary=None,
        router=nemotron_h.NemotronHTopkRouter,
        own_router=CorrectedRouter,
        embedding="model.embeddings",
        pads_embedding=False,
        final_norm="model.norm_f",
        adapt=own_nemotron_h.adapt,
        cuts=own_nemotron_h.CUTS,
        fills=own_nemotron_h.FILLS,
        regions=own_nemotron_h.REGIONS,
        mixture_kinds=((nemotron_h.NemotronHMoE, own_nemotron_h.LatentMixture),),
        separate_experts=own_nemotron_h.SEPARATE,
        respelled=(("model.", "backbone."),),
        ignored=("mtp.",),
    ),
    "granitemoehybrid": family(
        granite,
        "GraniteMoeHybrid",
        router=granite.GraniteMoeHybridTopKRouter,
        own_router=own_granite.ChosenRouter,
        experts=granite.GraniteMoeHybridExperts,
        scales_embedding=True,
        scales_logits=True,
        adapt=own_granite.adapt,
        moved=own_granite.MOVED,
        cuts=own_granite.CUTS,
        fills=own_granite.FILLS,
        regions=own_granite.REGIONS,
        mixture_kinds=((granite.GraniteMoeHybridMoE, own_granite.GraniteMixture),),
        respelled=own_granite.RESPELLED,
    ),
    "opt": family(
        opt,
        "OPT",
        rotary=None,
        positions=PositionTable(name="model.decoder.embed_positions", offset=2),
        norm=None,
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
    ),
}
