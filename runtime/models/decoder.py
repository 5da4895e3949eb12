"""Decoder-only language models: Llama and architectures with the same structure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PretrainedConfig
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2_moe.configuration_lfm2_moe import Lfm2MoeConfig
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

from runtime.models.adapter import (
    NO_TARGET,
    ONE_ROTATION,
    Adapter,
    Context,
    CutKind,
    CutRules,
    InnerLayer,
    MicrobatchData,
    Rotations,
    StageLayer,
)
from runtime.models.attention import pack, positions
from runtime.models.configuration import configuration
from runtime.models.initialise import Fill
from runtime.models.mixture import Experts, MixtureForward, MixtureKinds, WideRouter
from runtime.models.norm import WideRMSNorm, replace_parts, widen_norms
from runtime.models.separate_experts import SeparateExperts
from workbench.model.item_tokens import family_of, source_config
from workbench.model.model_graph import Module

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = hidden width, V = vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Learned positions, added to token embeddings.

    Args:
        name: of the table.
        offset: row of position 0.
    """

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """Differences between architectures that share Llama's structure.

    Args:
        rotary: class of its rotary embedding; None where `positions` names a table.
        rotates_by_axes: whether positions have three axes: time, row and column (M-RoPE).
        rotates_by_layer_type: whether kinds of layers have rotation angles of their own.
        norm: class of its RMSNorm, None where it uses LayerNorm.
        norm_offset: 1.0 where the norm's scale is 1 + weight.
        norm_bias: whether its LayerNorm, if it uses that, has a shift.
        layer_norm: class of its LayerNorm.
        router: class of its router, None where every token goes through the same MLP.
        own_router: makes ours from it.
        experts: class of transformers' experts; None: there are none, or `adapt` replaces them.
        embedding: name of the token table; its padding row is not trained if `pads_embedding`.
        layers: name of the list of its layers.
        final_norm: name of the norm before the head.
        embedding_scale: number by which token embeddings are multiplied, by the configuration.
        scales_features: whether features of encoders among them are, too.
        head_bias: whether the head has a bias, by the configuration.
        logit_scale: number by which logits are multiplied, by the configuration.
        adapt: replaces parts of a layer by our own, with the same names of weights.
        moved: starts of local names of parts that `adapt` moved, and those in their place in checkpoints.
        fills: (ending of a block's local name, initial distribution) where it is another than usual.
        respelled: parts of names, and others that checkpoints may have in their place.
        ignored: prefixes of checkpoint tensors that the language model does not use.
        cuts, mixture_kinds: as of a `StageLayer`, of its blocks.
        regions: of a `StageLayer`, besides the usual ones.
        separate_experts: names of experts that checkpoints store one by one; None: they do not.
        transposes_experts: whether they may store them as [experts, in, out].
        reads_positions: whether its attention scales queries by their positions.
        predicts_ahead: whether they may have a block after the last that predicts the token after the next.
    """

    config: type[PretrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module] | None
    norm: type[nn.Module] | None
    rotates_by_axes: bool = False
    rotates_by_layer_type: bool = False
    positions: PositionTable | None = None
    norm_offset: float = 0.0
    norm_bias: bool = True
    layer_norm: type[nn.LayerNorm] = nn.LayerNorm
    router: type[nn.Module] | None = None
    own_router: Callable[[nn.Module], nn.Module] = WideRouter
    experts: type[nn.Module] | None = None
    embedding: str = "model.embed_tokens"
    pads_embedding: bool = True
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    embedding_scale: Callable[[Any], float] | None = None
    scales_features: bool = False
    head_bias: Callable[[Any], bool] = lambda config: False
    logit_scale: Callable[[Any], float] | None = None
    adapt: Callable[[nn.Module], None] | None = None
    moved: tuple[tuple[str, str], ...] = ()
    fills: tuple[tuple[str, Fill], ...] = ()
    respelled: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    cuts: CutRules = ()
    regions: tuple[str, ...] = ()
    mixture_kinds: MixtureKinds = ()
    separate_experts: SeparateExperts | None = None
    transposes_experts: bool = False
    predicts_ahead: bool = False
    reads_positions: bool = False


def _std(config: PretrainedConfig) -> float:
    """Standard deviation of initial matrices; OPT has its own key for it."""
    return float(config.init_std if hasattr(config, "init_std") else config.initializer_range)


class EmbedTokens(StageLayer):
    """Layer 0: token embeddings, with each edge's features at the positions of its segments; positions."""

    cuts = (("embed_tokens", CutKind.COLUMN),)

    def __init__(self, config: PretrainedConfig, family: DecoderFamily) -> None:
        names = {"embed_tokens": family.embedding}
        table = family.positions
        if table is not None:
            names["embed_positions"] = table.name
        super().__init__(names, _std(config))
        padding = config.pad_token_id if family.pads_embedding else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding)
        self.scale = None if family.embedding_scale is None else family.embedding_scale(config)
        self.feature_scale = self.scale if family.scales_features else None
        self.first_position = 0 if table is None else table.offset
        self.embed_positions = None
        if table is not None:
            rows = config.max_position_embeddings + table.offset
            self.embed_positions = nn.Embedding(rows, config.hidden_size)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD
        merged_TD = self._merged(features, context)
        if self.embed_positions is None:
            return merged_TD
        place_T = _position_ids(context.data, merged_TD.device)
        positions_TD: Tensor = self.embed_positions(place_T + self.first_position)
        return merged_TD + positions_TD

    def _merged(self, features: Mapping[str, Tensor], context: Context) -> Tensor:
        """[T, D] of tokens and features, before positions."""
        ids_T = context.data.input_ids
        assert ids_T is not None, "the first stage of the LLM is given its tokens"
        text = torch.nonzero(ids_T >= 0).squeeze(1)
        text_TD: Tensor = self.embed_tokens(ids_T[text])
        if self.scale is not None:
            text_TD = text_TD * torch.tensor(self.scale).to(text_TD)  # rounded as in transformers
        if len(text) == len(ids_T):
            return text_TD
        merged_TD = text_TD.new_zeros(len(ids_T), text_TD.shape[1]).index_copy(0, text, text_TD)
        for edge, features_ED in features.items():
            scaled_ED = features_ED if self.feature_scale is None else features_ED * self.feature_scale
            merged_TD = merged_TD.index_copy(0, context.data.placed[edge], scaled_ED)
        return merged_TD


def _position_ids(data: MicrobatchData, device: torch.device) -> Tensor:
    """[T] position of every token in its item."""
    return positions(data.tokens_in, device) if data.position_ids is None else data.position_ids


class DecoderBlock(InnerLayer):
    """Layers 1..N: transformers' decoder layer on one packed row."""

    def __init__(self, config: PretrainedConfig, family: DecoderFamily, index: int) -> None:
        super().__init__({"block": f"{family.layers}.{index}"}, _std(config))
        self.cuts, self.mixture_kinds, self.fills = family.cuts, family.mixture_kinds, family.fills
        self.regions = (*self.regions, *family.regions)
        self._moved = family.moved
        self.block = family.layer(config, layer_idx=index)
        self.rotation = config.layer_types[index] if family.rotates_by_layer_type else ONE_ROTATION
        if family.router is not None:
            replace_parts(self, family.router, family.own_router)
        if family.experts is not None:
            replace_parts(self, family.experts, Experts)
        if family.adapt is not None:
            family.adapt(self)
        for mixture in self.mixtures().values():
            mixture.module.forward = MixtureForward(mixture)
        if family.norm is not None:
            widen_norms(self, family.norm, family.norm_offset)

    def hugging_face_name(self, name: str) -> str:
        pairs = (pair for pair in self._moved if name.startswith(pair[0]))
        here, stored = next(pairs, ("", ""))
        return super().hugging_face_name(stored + name.removeprefix(here))

    def fill(self, name: str) -> Fill:
        own = next((fill for ending, fill in self.fills if name.endswith(ending)), None)
        return super().fill(name) if own is None else own

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        y_1TD: Tensor = self.block(
            x_TD[None],
            attention_mask=context.packing,
            position_embeddings=context.rotary.get(self.rotation),
            **({} if context.position_ids is None else {"position_ids": context.position_ids}),
        )
        return y_1TD[0]


_RMS_NORM_EPS: Mapping[type[PretrainedConfig], str] = {
    Lfm2Config: "norm_eps",
    Lfm2MoeConfig: "norm_eps",
    NemotronHConfig: "layer_norm_epsilon",
}


def _layer_norm_eps(config: PretrainedConfig) -> float:
    """Under the key of Phi, GPT-2, StarCoder2 or Nemotron; OPT has no key and uses torch's default."""
    keys = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    return float(next((getattr(config, key) for key in keys if hasattr(config, key)), 1e-5))


def _rms_norm_eps(config: PretrainedConfig) -> float:
    """Under the key of its family, or that of all others."""
    return float(getattr(config, _RMS_NORM_EPS.get(type(config), "rms_norm_eps")))


class NextTokenHead(InnerLayer):
    """Layer N+1: final norm, head and the sum of next-token losses, in float32 or wider."""

    cuts = (("lm_head", CutKind.COLUMN),)

    def __init__(self, config: PretrainedConfig, family: DecoderFamily) -> None:
        super().__init__({"norm": family.final_norm, "lm_head": "lm_head"}, _std(config))
        if family.norm is None:
            eps = _layer_norm_eps(config)
            self.norm: nn.Module = family.layer_norm(config.hidden_size, eps=eps, bias=family.norm_bias)
        else:
            self.norm = WideRMSNorm(config.hidden_size, _rms_norm_eps(config), family.norm_offset)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=family.head_bias(config))
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = None if family.logit_scale is None else float(family.logit_scale(config))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V]; scaled states give scaled logits, at a fraction of the memory."""
        normal_TD = self.norm(hidden_TD)
        scaled_TD = normal_TD if self.logit_scale is None else normal_TD * self.logit_scale
        logits_TV: Tensor = self.lm_head(scaled_TD)
        if self.softcap is None:
            return logits_TV
        return torch.tanh(logits_TV / self.softcap) * self.softcap

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        labels_T = context.data.labels
        assert labels_T is not None, "the head is given its targets"
        logits_TV = self.logits(x_TD)
        wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return functional.cross_entropy(wide_TV, labels_T, ignore_index=NO_TARGET, reduction="sum")


class DecoderAdapter(Adapter):
    """A decoder-only language model."""

    rotary_name = "model.rotary_emb"

    def __init__(self, module: Module, family: DecoderFamily) -> None:
        self.family = family
        super().__init__(module)
        rotates = getattr(self.config, "position_embedding_type", "rope") == "rope"  # Granite's may not
        self._rotary = family.rotary(config=self.config) if family.rotary is not None and rotates else None
        ahead = (f"{family.layers}.{self.num_blocks}.",) if family.predicts_ahead else ()
        self.ignored = (f"{self.rotary_name}.", *family.ignored, *ahead)

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        return configuration(self.family.config, fields)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def ties_embeddings(self) -> bool:
        return bool(getattr(self.config, "tie_word_embeddings", False))  # Qwen3-VL's may lack the key

    @property
    def aliases(self) -> Mapping[str, str]:
        return {"lm_head.weight": f"{self.family.embedding}.weight"} if self.ties_embeddings else {}

    @property
    def separate_experts(self) -> SeparateExperts | None:
        return self.family.separate_experts

    @property
    def transposes_experts(self) -> bool:
        return self.family.transposes_experts

    def spellings(self, name: str) -> tuple[str, ...]:
        other = name
        for part, stored in self.family.respelled:
            other = other.replace(part, stored, 1)
        return (*super().spellings(name), other)

    def first(self) -> StageLayer:
        return EmbedTokens(self.config, self.family)

    def block(self, index: int) -> StageLayer:
        return DecoderBlock(self.config, self.family, index)

    def last(self) -> StageLayer:
        return NextTokenHead(self.config, self.family)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        self._check_lengths(data)
        packing = data.attention or pack(data.tokens_in, device)
        ids_1T = _position_ids(data, device)[None] if self.family.reads_positions else None
        rotary = self._rotations(data, device, dtype)
        return Context(data=data, packing=packing, rotary=rotary, position_ids=ids_1T)

    def _check_lengths(self, data: MicrobatchData) -> None:
        longest, family = max(data.tokens_in), family_of(self.module)
        if family is None or family.longest_item is None:
            return
        limit = family.longest_item(source_config(self.module))
        if longest > limit:
            item = data.items[data.tokens_in.index(longest)]
            raise ValueError(
                f"item {tuple(item)}: module {self.module.name!r} takes up to {limit} tokens, got {longest}"
            )

    def _rotations(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Rotations:
        if self._rotary is None:
            return {}
        like = torch.empty(0, dtype=dtype, device=device)
        ids = _position_ids(data, device)[None] if data.axes is None else data.axes[:, None].to(device)
        if not self.family.rotates_by_layer_type:
            return {ONE_ROTATION: self._rotary(like, ids)}
        ropes = self.config.rope_parameters  # null for a kind of layers that knows no positions
        kinds = [kind for kind in sorted(set(self.config.layer_types)) if ropes.get(kind, {}) is not None]
        return {kind: self._rotary(like, ids, kind) for kind in kinds}
