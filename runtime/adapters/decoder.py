"""Decoder-only language models: Llama and the architectures built like it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PretrainedConfig
from transformers.models.gemma.modeling_gemma import (
    GemmaConfig,
    GemmaDecoderLayer,
    GemmaRMSNorm,
    GemmaRotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.mistral.modeling_mistral import (
    MistralConfig,
    MistralDecoderLayer,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)
from transformers.models.phi.modeling_phi import PhiConfig, PhiDecoderLayer, PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import (
    Phi3Config,
    Phi3DecoderLayer,
    Phi3RMSNorm,
    Phi3RotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Config,
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from runtime.adapters.adapter import ATTENTION, NO_TARGET, Adapter, Context, MicrobatchData, StageLayer
from runtime.adapters.attention import pack, positions
from runtime.adapters.norm import WideRMSNorm, widen_norms
from workbench.graph.model_graph import Module

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = hidden width, V = vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """What differs between architectures that share Llama's outline.

    Args:
        norm: class of its RMSNorm, None where it uses LayerNorm.
        norm_offset: 1.0 where the norm's scale is 1 + weight.
        final_norm: name of the norm before the head.
        scales_embedding: whether token embeddings are multiplied by sqrt(width).
        head_bias: whether the head has a bias.
    """

    config: type[PretrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module]
    norm: type[nn.Module] | None
    norm_offset: float = 0.0
    final_norm: str = "model.norm"
    scales_embedding: bool = False
    head_bias: bool = False


DECODERS: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily(
        config=LlamaConfig, layer=LlamaDecoderLayer, rotary=LlamaRotaryEmbedding, norm=LlamaRMSNorm
    ),
    "qwen2": DecoderFamily(
        config=Qwen2Config, layer=Qwen2DecoderLayer, rotary=Qwen2RotaryEmbedding, norm=Qwen2RMSNorm
    ),
    "mistral": DecoderFamily(
        config=MistralConfig, layer=MistralDecoderLayer, rotary=MistralRotaryEmbedding, norm=MistralRMSNorm
    ),
    "gemma": DecoderFamily(
        config=GemmaConfig,
        layer=GemmaDecoderLayer,
        rotary=GemmaRotaryEmbedding,
        norm=GemmaRMSNorm,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "phi3": DecoderFamily(
        config=Phi3Config, layer=Phi3DecoderLayer, rotary=Phi3RotaryEmbedding, norm=Phi3RMSNorm
    ),
    "phi": DecoderFamily(
        config=PhiConfig,
        layer=PhiDecoderLayer,
        rotary=PhiRotaryEmbedding,
        norm=None,
        final_norm="model.final_layernorm",
        head_bias=True,
    ),
}


class EmbedTokens(StageLayer):
    """Layer 0: token embeddings, with each edge's features at the places its segments hold."""

    def __init__(self, config: PretrainedConfig, family: DecoderFamily) -> None:
        super().__init__({"embed_tokens": "model.embed_tokens"}, config.initializer_range)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.scale = math.sqrt(config.hidden_size) if family.scales_embedding else None

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD
        ids_T = context.data.input_ids
        assert ids_T is not None, "the first stage of the LLM is given its tokens"
        text = torch.nonzero(ids_T >= 0).squeeze(1)
        text_TD = self.embed_tokens(ids_T[text])
        if self.scale is not None:
            text_TD = text_TD * torch.tensor(self.scale).to(text_TD)  # rounded as transformers rounds it
        if len(text) == len(ids_T):
            return text_TD
        merged_TD = text_TD.new_zeros(len(ids_T), text_TD.shape[1]).index_copy(0, text, text_TD)
        for edge, features_ED in features.items():
            merged_TD = merged_TD.index_copy(0, context.data.placed[edge], features_ED)
        return merged_TD


class DecoderBlock(StageLayer):
    """Layers 1..N: transformers' decoder layer on one packed row."""

    def __init__(self, config: PretrainedConfig, family: DecoderFamily, index: int) -> None:
        super().__init__({"block": f"model.layers.{index}"}, config.initializer_range)
        self.block = family.layer(config, index)
        if family.norm is not None:
            widen_norms(self, family.norm, family.norm_offset)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "a block is given its input"
        y_1TD: Tensor = self.block(
            hidden_TD[None], attention_mask=context.packing, position_embeddings=context.rotary
        )
        return y_1TD[0]


class NextTokenHead(StageLayer):
    """Layer N+1: final norm, head and the sum of next-token losses, in float32 or wider."""

    def __init__(self, config: PretrainedConfig, family: DecoderFamily) -> None:
        super().__init__({"norm": family.final_norm, "lm_head": "lm_head"}, config.initializer_range)
        if family.norm is None:
            self.norm: nn.Module = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        else:
            self.norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_offset)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=family.head_bias)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V]."""
        logits_TV: Tensor = self.lm_head(self.norm(hidden_TD))
        return logits_TV

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        labels_T = context.data.labels
        assert hidden_TD is not None, "the head is given its input"
        assert labels_T is not None, "the head is given its targets"
        logits_TV = self.logits(hidden_TD)
        wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return functional.cross_entropy(wide_TV, labels_T, ignore_index=NO_TARGET, reduction="sum")


class DecoderAdapter(Adapter):
    """A decoder-only language model."""

    def __init__(self, module: Module, architecture: str, config: str) -> None:
        super().__init__(module)
        self.family = DECODERS[architecture]
        self.config = self.family.config.from_dict(json.loads(config))
        self.config._attn_implementation = ATTENTION
        rope_type = self.config.rope_parameters["rope_type"]
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"module {module.name!r}: rope type {rope_type!r} depends on the longest sequence of a "
                "batch, so results would depend on grouping; give a fixed one, e.g. 'default' or 'yarn'"
            )
        self._rotary = self.family.rotary(config=self.config)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers) + 2

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def ties_embeddings(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @property
    def aliases(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.ties_embeddings else {}

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("model.rotary_emb.",)

    def _layer(self, index: int) -> StageLayer:
        if index == 0:
            return EmbedTokens(self.config, self.family)
        if index == self.num_layers - 1:
            return NextTokenHead(self.config, self.family)
        return DecoderBlock(self.config, self.family, index - 1)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        ids_T = positions(data.tokens_in, device) if data.position_ids is None else data.position_ids
        rotary = self._rotary(torch.empty(0, dtype=dtype, device=device), ids_T[None])
        return Context(data=data, packing=data.attention or pack(data.tokens_in, device), rotary=rotary)
