"""What tells decoder-only architectures apart, as one table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.mllama import modeling_mllama as mllama
from transformers.models.opt import modeling_opt as opt
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runtime.models.llama4 import adapt, longest_item


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Learned positions, added to the tokens.

    Args:
        name: of the table.
        offset: rows before that of position 0.
    """

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """What differs between architectures that share Llama's outline.

    Args:
        rotary: class of its rotary embedding; None where `positions` is its table.
        rotates_by_layer_type: whether kinds of layers turn by angles of their own.
        norm: class of its RMSNorm, None where it uses LayerNorm.
        norm_offset: 1.0 where the norm's scale is 1 + weight.
        router: class of its router, None where every token goes through the same MLP.
        embedding: name of the token table; its padding row is not trained if `pads_embedding`.
        layers: name of the list of its layers.
        final_norm: name of the norm before the head.
        scales_embedding: whether token embeddings are multiplied by sqrt(width).
        head_bias: whether the head has a bias.
        adapt: puts parts of our own into a layer, under the same names of weights.
        longest_item: tokens of the longest item, where the architecture changes behind them.
    """

    config: type[PretrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module] | None
    norm: type[nn.Module] | None
    rotates_by_layer_type: bool = False
    positions: PositionTable | None = None
    norm_offset: float = 0.0
    router: type[nn.Module] | None = None
    embedding: str = "model.embed_tokens"
    pads_embedding: bool = True
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    scales_embedding: bool = False
    head_bias: bool = False
    adapt: Callable[[nn.Module], None] | None = None
    longest_item: Callable[[PretrainedConfig], int] | None = None


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
        longest_item=longest_item,
    ),
    "qwen2": DecoderFamily(
        config=qwen2.Qwen2Config,
        layer=qwen2.Qwen2DecoderLayer,
        rotary=qwen2.Qwen2RotaryEmbedding,
        norm=qwen2.Qwen2RMSNorm,
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
    ),
    "mllama_text_model": DecoderFamily(
        config=mllama.MllamaTextConfig,
        layer=mllama.MllamaSelfAttentionDecoderLayer,
        rotary=mllama.MllamaRotaryEmbedding,
        norm=mllama.MllamaTextRMSNorm,
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
