"""Language models that are Llama's outline with parts of their own, as one table."""

from collections.abc import Mapping

from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.opt import modeling_opt as opt
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_vl import configuration_qwen2_vl as qwen2_vl_config
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runtime.models.cut_kind import CutKind
from runtime.models.decoder import DecoderFamily, PositionTable
from runtime.models.llama4 import ChosenExperts, Llama4Mixture, RoutedExperts, adapt
from runtime.models.mixture import MixtralMixture
from runtime.models.router import WideRouter

DECODERS: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily(
        config=llama.LlamaConfig,
        layer=llama.LlamaDecoderLayer,
        rotary=llama.LlamaRotaryEmbedding,
        norm=llama.LlamaRMSNorm,
    ),
    "llama4_text": DecoderFamily(
        config=llama4.Llama4TextConfig,
        layer=llama4.Llama4TextDecoderLayer,
        rotary=llama4.Llama4TextRotaryEmbedding,
        norm=llama4.Llama4TextRMSNorm,
        adapt=adapt,
        cuts=((RoutedExperts, CutKind.EXPERTS), (llama4.Llama4Router, CutKind.PARTIAL)),
        mixture_kinds=((ChosenExperts, Llama4Mixture),),
    ),
    "qwen2": DecoderFamily(
        config=qwen2.Qwen2Config,
        layer=qwen2.Qwen2DecoderLayer,
        rotary=qwen2.Qwen2RotaryEmbedding,
        norm=qwen2.Qwen2RMSNorm,
    ),
    "qwen2_vl_text": DecoderFamily(
        config=qwen2_vl_config.Qwen2VLTextConfig,
        layer=qwen2_vl.Qwen2VLDecoderLayer,
        rotary=qwen2_vl.Qwen2VLRotaryEmbedding,
        rotates_by_axes=True,
        norm=qwen2_vl.Qwen2VLRMSNorm,
    ),
    "qwen3": DecoderFamily(
        config=qwen3.Qwen3Config,
        layer=qwen3.Qwen3DecoderLayer,
        rotary=qwen3.Qwen3RotaryEmbedding,
        norm=qwen3.Qwen3RMSNorm,
    ),
    "mistral": DecoderFamily(
        config=mistral.MistralConfig,
        layer=mistral.MistralDecoderLayer,
        rotary=mistral.MistralRotaryEmbedding,
        norm=mistral.MistralRMSNorm,
    ),
    "mixtral": DecoderFamily(
        config=mixtral.MixtralConfig,
        layer=mixtral.MixtralDecoderLayer,
        rotary=mixtral.MixtralRotaryEmbedding,
        norm=mixtral.MixtralRMSNorm,
        router=mixtral.MixtralTopKRouter,
        cuts=((mixtral.MixtralExperts, CutKind.EXPERTS), (WideRouter, CutKind.PARTIAL)),
        mixture_kinds=((mixtral.MixtralSparseMoeBlock, MixtralMixture),),
    ),
    "gemma": DecoderFamily(
        config=gemma.GemmaConfig,
        layer=gemma.GemmaDecoderLayer,
        rotary=gemma.GemmaRotaryEmbedding,
        norm=gemma.GemmaRMSNorm,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "gemma2": DecoderFamily(
        config=gemma2.Gemma2Config,
        layer=gemma2.Gemma2DecoderLayer,
        rotary=gemma2.Gemma2RotaryEmbedding,
        norm=gemma2.Gemma2RMSNorm,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "gemma3_text": DecoderFamily(
        config=gemma3.Gemma3TextConfig,
        layer=gemma3.Gemma3DecoderLayer,
        rotary=gemma3.Gemma3RotaryEmbedding,
        rotates_by_layer_type=True,
        norm=gemma3.Gemma3RMSNorm,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "phi3": DecoderFamily(
        config=phi3.Phi3Config,
        layer=phi3.Phi3DecoderLayer,
        rotary=phi3.Phi3RotaryEmbedding,
        norm=phi3.Phi3RMSNorm,
    ),
    "phi": DecoderFamily(
        config=phi.PhiConfig,
        layer=phi.PhiDecoderLayer,
        rotary=phi.PhiRotaryEmbedding,
        norm=None,
        final_norm="model.final_layernorm",
        head_bias=True,
    ),
    "gpt2": DecoderFamily(
        config=gpt2.GPT2Config,
        layer=gpt2.GPT2Block,
        rotary=None,
        positions=PositionTable(name="transformer.wpe"),
        norm=None,
        embedding="transformer.wte",
        pads_embedding=False,
        layers="transformer.h",
        final_norm="transformer.ln_f",
    ),
    "opt": DecoderFamily(
        config=opt.OPTConfig,
        layer=opt.OPTDecoderLayer,
        rotary=None,
        positions=PositionTable(name="model.decoder.embed_positions", offset=2),
        norm=None,
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
    ),
}
