"""Table of language models with Llama's structure and parts of their own."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from transformers.models.apertus import modeling_apertus as apertus
from transformers.models.arcee import modeling_arcee as arcee
from transformers.models.aria import modeling_aria as aria
from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.cohere_compass import modeling_cohere_compass as cohere_compass
from transformers.models.cosmos3_edge import modeling_cosmos3_edge as cosmos3_edge
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.dots1 import modeling_dots1 as dots1
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie4_5
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie4_5_moe
from transformers.models.exaone4 import modeling_exaone4 as exaone4
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_moe_dsa
from transformers.models.glm_ocr import modeling_glm_ocr as glm_ocr
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.granite import modeling_granite as granite
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite_hybrid
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan_v1_dense
from transformers.models.hunyuan_v1_moe import modeling_hunyuan_v1_moe as hunyuan_v1_moe
from transformers.models.hyperclovax import modeling_hyperclovax as hyperclovax
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2_moe
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax_m2
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mistral4 import modeling_mistral4 as mistral4
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.nemotron import modeling_nemotron as nemotron
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.olmo3 import modeling_olmo3 as olmo3
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.opt import modeling_opt as opt
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3_omni
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_vl_moe
from transformers.models.seed_oss import modeling_seed_oss as seed_oss
from transformers.models.smollm3 import modeling_smollm3 as smollm3
from transformers.models.solar_open import modeling_solar_open as solar_open
from transformers.models.starcoder2 import modeling_starcoder2 as starcoder2

from runtime.models import aria as own_aria
from runtime.models import cohere, deepseek, delta_net, ernie, hunyuan, indexer, minimax, xielu
from runtime.models import gemma4 as own_gemma4
from runtime.models import gpt_oss as own_gpt_oss
from runtime.models import granite_hybrid as own_granite
from runtime.models import lfm2 as own_lfm2
from runtime.models import nemotron_h as own_nemotron_h
from runtime.models.adapter import CutKind, CutRules
from runtime.models.decoder import DecoderFamily, PositionTable
from runtime.models.decoder_kinds import corrected_family, family, root_of_width, routed_family, sparse_family
from runtime.models.glm import CorrectedRouter, GlmMixture
from runtime.models.llama4 import Llama4Mixture, adapt
from runtime.models.mixture import Experts
from runtime.models.separate_experts import SeparateExperts

HYBRID: Mapping[str, Any] = {  # gated DeltaNet in some blocks
    "adapt": delta_net.adapt,
    "cuts": delta_net.CUTS,
    "fills": delta_net.FILLS,
    "ignored": ("mtp.",),  # a head that predicts several tokens
    "norm_offset": 1.0,
}


MIXTRAL_NAMES = SeparateExperts(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")
NORMS: CutRules = tuple((f"block.self_attn.{name}", CutKind.ALL_HEADS) for name in ("q_norm", "k_norm"))
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
    "qwen2_moe": sparse_family(
        qwen2_moe,
        "Qwen2Moe",
        SeparateExperts(),
        mixture=delta_net.GatedMixture,
        cuts=delta_net.GATE_CUTS,
    ),
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
    "deepseek_v2": routed_family(
        deepseek_v2,
        "DeepseekV2",
        GlmMixture,
        classes=("TopkRouter", "Experts", "Moe"),
        own_router=deepseek.GroupedRouter,
        cuts=deepseek.CUTS,
        separate_experts=SeparateExperts(),
        adapt=deepseek.adapt,
    ),
    "deepseek_v3": corrected_family(deepseek_v3, "DeepseekV3", cuts=deepseek.CUTS),
    "deepseek_v32": corrected_family(deepseek_v32, "DeepseekV32", cuts=indexer.CUTS, adapt=indexer.adapt),
    "glm4": family(glm4, "Glm4"),
    "glm4_moe": corrected_family(glm4_moe, "Glm4Moe"),
    "glm4_moe_lite": corrected_family(glm4_moe_lite, "Glm4MoeLite", cuts=deepseek.CUTS),
    "glm_moe_dsa": corrected_family(glm_moe_dsa, "GlmMoeDsa", cuts=indexer.CUTS, adapt=indexer.adapt_shared),
    "glm4v_text": family(glm4v, "Glm4vText", norm=glm4v.Glm4vRMSNorm, rotates_by_axes=True),
    "glm_ocr_text": family(
        glm_ocr, "GlmOcrText", norm=glm_ocr.GlmOcrRMSNorm, rotates_by_axes=True, predicts_ahead=True
    ),
    "glm4v_moe_text": corrected_family(glm4v_moe, "Glm4vMoeText", rotates_by_axes=True),
    "paddleocr_vl_text": family(
        paddleocr, "PaddleOCR", config=paddleocr.PaddleOCRTextConfig, rotates_by_axes=True
    ),
    "cosmos3_edge_text": family(cosmos3_edge, "Cosmos3EdgeText", rotates_by_axes=True),
    "mistral": family(mistral, "Mistral"),
    "ministral3": family(ministral3, "Ministral3", reads_positions=True),
    "mistral4": routed_family(
        mistral4,
        "Mistral4",
        GlmMixture,
        classes=("TopkRouter", "Experts", "MoE"),
        own_router=deepseek.GroupedRouter,
        cuts=deepseek.CUTS,
        reads_positions=True,
    ),
    "mixtral": sparse_family(mixtral, "Mixtral", MIXTRAL_NAMES),
    "gemma": family(gemma, "Gemma", norm_offset=1.0, embedding_scale=root_of_width),
    "gemma2": family(gemma2, "Gemma2", norm_offset=1.0, embedding_scale=root_of_width),
    "gemma3_text": family(
        gemma3,
        "Gemma3",
        config=gemma3.Gemma3TextConfig,
        rotates_by_layer_type=True,
        norm_offset=1.0,
        embedding_scale=root_of_width,
    ),
    "gemma4_text": family(
        gemma4,
        "Gemma4Text",
        norm=gemma4.Gemma4RMSNorm,
        rotates_by_layer_type=True,
        embedding_scale=root_of_width,
        adapt=own_gemma4.adapt,
        moved=((f"block.{own_gemma4.BESIDE}.", "block."),),
        cuts=own_gemma4.CUTS,
        fills=own_gemma4.FILLS,
        regions=(own_gemma4.BESIDE,),
        mixture_kinds=((own_gemma4.Routed, own_gemma4.Gemma4Mixture),),
    ),
    "olmo2": family(olmo2, "Olmo2", cuts=NORMS),
    "olmo3": family(olmo3, "Olmo3", cuts=NORMS, rotates_by_layer_type=True),
    "exaone4": family(exaone4, "Exaone4"),
    "olmoe": sparse_family(olmoe, "Olmoe", SeparateExperts(), cuts=NORMS),
    "dots1": corrected_family(dots1, "Dots1"),
    "solar_open": corrected_family(solar_open, "SolarOpen"),
    "minimax_m2": routed_family(
        minimax_m2,
        "MiniMaxM2",
        minimax.MiniMaxMixture,
        own_router=minimax.SigmoidRouter,
        cuts=NORMS,
        adapt=minimax.adapt,
        separate_experts=MIXTRAL_NAMES,
    ),
    "ernie4_5": family(ernie4_5, "Ernie4_5", rotary=ernie.PairedRotary, adapt=ernie.adapt),
    "ernie4_5_moe": routed_family(
        ernie4_5_moe,
        "Ernie4_5_Moe",
        GlmMixture,
        own_router=ernie.ErnieRouter,
        rotary=ernie.PairedRotary,
        adapt=ernie.adapt,
        separate_experts=SeparateExperts(moved=("gate.moe_statics.", "moe_statics.")),
        ignored=("mtp", "model.mtp"),
        head_bias=attrgetter("use_bias"),
    ),
    "hunyuan_v1_dense": family(hunyuan_v1_dense, "HunYuanDenseV1"),
    "hunyuan_v1_moe": family(
        hunyuan_v1_moe,
        "HunYuanMoEV1",
        router=hunyuan_v1_moe.HunYuanMoEV1Gate,
        own_router=hunyuan.HunyuanRouter,
        experts=hunyuan_v1_moe.HunYuanMoEV1Experts,
        cuts=((Experts, CutKind.EXPERTS), ("block.mlp.gate.wg", CutKind.PARTIAL)),
        mixture_kinds=((hunyuan_v1_moe.HunYuanMoEV1Moe, hunyuan.HunyuanMixture),),
        separate_experts=SeparateExperts(),
    ),
    "cohere2": family(
        cohere2,
        "Cohere2",
        norm=None,
        norm_bias=False,
        adapt=cohere.adapt,
        logit_scale=attrgetter("logit_scale"),
    ),
    "cohere_compass_text": family(
        cohere_compass,
        "CohereCompass",
        config=cohere_compass.CohereCompassTextConfig,
        norm=None,
        norm_bias=False,
        rotates_by_axes=True,
        rotates_by_layer_type=True,
        adapt=cohere.adapt_norms,
        logit_scale=lambda config: config.logit_scale or 1.0,
    ),
    "seed_oss": family(seed_oss, "SeedOss"),
    "smollm3": family(smollm3, "SmolLM3"),
    "granite": family(
        granite,
        "Granite",
        embedding_scale=attrgetter("embedding_multiplier"),
        scales_features=True,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "hyperclovax": family(
        hyperclovax,
        "HyperCLOVAX",
        embedding_scale=attrgetter("embedding_multiplier"),
        scales_features=True,
        logit_scale=attrgetter("logits_scaling"),
    ),
    "arcee": family(arcee, "Arcee"),
    "nemotron": family(nemotron, "Nemotron", norm=None, layer_norm=nemotron.NemotronLayerNorm1P),
    "starcoder2": family(starcoder2, "Starcoder2", norm=None),
    "apertus": family(apertus, "Apertus", adapt=xielu.adapt, cuts=xielu.CUTS, fills=xielu.FILLS),
    "phi3": family(phi3, "Phi3"),
    "phi": family(phi, "Phi", norm=None, final_norm="model.final_layernorm", head_bias=lambda _: True),
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
    "aria_text": family(
        aria,
        "AriaText",
        adapt=own_aria.adapt,
        cuts=own_aria.CUTS,
        mixture_kinds=((aria.AriaTextMoELayer, own_aria.AriaMixture),),
        respelled=own_aria.RESPELLED,
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
    "lfm2_moe": family(
        lfm2_moe,
        "Lfm2Moe",
        router=lfm2_moe.Lfm2MoeTopKRouter,
        own_router=own_lfm2.LfmRouter,
        experts=lfm2_moe.Lfm2MoeExperts,
        final_norm="model.embedding_norm",
        adapt=own_lfm2.adapt,
        cuts=((Experts, CutKind.EXPERTS), (own_lfm2.LfmRouter, CutKind.PARTIAL), *own_lfm2.CUTS),
        regions=own_lfm2.REGIONS,
        mixture_kinds=((lfm2_moe.Lfm2MoeSparseMoeBlock, own_lfm2.LfmMixture),),
        separate_experts=own_lfm2.SEPARATE,
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
        granite_hybrid,
        "GraniteMoeHybrid",
        router=granite_hybrid.GraniteMoeHybridTopKRouter,
        own_router=own_granite.ChosenRouter,
        experts=granite_hybrid.GraniteMoeHybridExperts,
        embedding_scale=attrgetter("embedding_multiplier"),
        scales_features=True,
        logit_scale=lambda config: 1 / config.logits_scaling,
        adapt=own_granite.adapt,
        moved=own_granite.MOVED,
        cuts=own_granite.CUTS,
        fills=own_granite.FILLS,
        regions=own_granite.REGIONS,
        mixture_kinds=((granite_hybrid.GraniteMoeHybridMoE, own_granite.GraniteMixture),),
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
