"""Lets layers with one member's parts of weights compute the same as whole layers.

A block has two sums in the forward and two in the backward. Weights stay plain tensors in transformers' own
modules, and hooks add the sums, so that code which takes modules apart or calls them again (a split backward,
recomputation) needs no change, and every wait ends in time and names its peers.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
Differs: the loss needs three numbers per token from each member (largest logit, sum of exponentials, logit
of its own targets), the last two in one message.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from runtime.models.adapter import NO_TARGET, Context, CutKind, StageLayer
from runtime.models.decoder import EmbedTokens, NextTokenHead
from runtime.models.mixture import Experts
from runtime.models.norm import WideRMSNorm
from runtime.parallel.tensor.cuts import SUMMED_BIAS, Cuts, in_region, is_summed_with_experts, kind_of
from runtime.parallel.tensor.group import TensorGroup
from runtime.parallel.tensor.pieces import summed_in_pieces
from runtime.parallel.tensor.sequence import Talk

# Shape suffixes: T = packed tokens, D = hidden width, V = vocabulary of one member.

# Attributes of attention modules that count heads, or their features, and that name a head's width.
HEAD_COUNTS = (
    *("num_heads", "num_key_value_heads", "split_size", "embed_dim"),
    *("num_k_heads", "num_v_heads", "key_dim", "value_dim"),
    *("n_groups", "intermediate_size", "conv_dim"),
)
HEAD_WIDTHS = ("head_dim", "head_k_dim")


def parallelize(layer: StageLayer, cuts: Cuts, group: TensorGroup, talk: Talk, num_pieces: int = 1) -> None:
    """Let a layer with this member's parts of weights compute the same as the whole layer.

    Args:
        layer: as built, with its weights cut.
        cuts: from `cuts_of` of the whole layer.
        group: the members, all of which call this.
        talk: the group, or the parts of tokens that its members have between the layer's regions.
        num_pieces: number of pieces of products whose results are summed, to overlap product and sum.
    """
    if isinstance(layer, EmbedTokens):
        _OwnTokens(layer.embed_tokens, cuts.cut["embed_tokens.weight"].start(group.member, group.size), group)
        return
    for name, module in list(layer.named_modules()):
        if name in cuts.experts:
            continue
        own_name = name.rpartition(".")[2]
        kind = kind_of(layer, name, module)
        is_region = name.startswith("block.") and own_name in layer.regions
        if is_region:
            _fewer_heads(module, group.size)
        if _enters(layer, name, module) if is_region else _enters_alone(layer, kind, name):
            module.register_forward_pre_hook(partial(_enter_input, talk), with_kwargs=True)
        _compute_own_part(module, kind, group)
        if group.member > 0:
            _leave_out_bias(module, name, kind)
        if (summed := _summed(layer, name, module, kind)) is not None:
            _sum_output(summed, talk, num_pieces)
    if isinstance(layer, NextTokenHead):
        first = cuts.cut["lm_head.weight"].start(group.member, group.size)
        layer.run = partial(_vocabulary_loss, layer, first, group)  # type: ignore[method-assign]


def _summed(layer: StageLayer, name: str, module: nn.Module, kind: CutKind) -> nn.Module | None:
    """The module whose output members sum: once for all experts of a layer, where rows are tokens."""
    owner = name.rpartition(".")[0]
    if kind is CutKind.EXPERTS:
        mixture = layer.get_submodule(owner)
        return getattr(mixture, "total", mixture)
    return module if kind is CutKind.ROW and not is_summed_with_experts(name) else None


def whole_name(name: str) -> str:
    """The name in the whole layer of a parameter of the parallel one."""
    return name.removesuffix(SUMMED_BIAS) + "bias" if name.endswith(f".{SUMMED_BIAS}") else name


def _enters(layer: StageLayer, name: str, region: nn.Module) -> bool:
    """Whether a region's input is entered once for all products that read it."""
    kinds = {kind_of(layer, f"{name}.{child_name}", child) for child_name, child in region.named_children()}
    return bool(kinds & {CutKind.COLUMN, CutKind.EXPERTS, CutKind.FUSED})


def _enters_alone(layer: StageLayer, kind: CutKind, name: str) -> bool:
    """Whether a product enters its own input, as it is in no region that does."""
    owner = name.rpartition(".")[0]
    if kind is CutKind.FUSED and not is_summed_with_experts(name):
        return owner.rpartition(".")[2] not in layer.regions
    return kind is CutKind.COLUMN and not in_region(layer, name)


def _enter_input(
    talk: Talk, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    del module
    if args:
        return (talk.enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": talk.enter(kwargs["hidden_states"])}


def _fewer_heads(attention: nn.Module, size: int) -> None:
    """Set the counts of heads, also in the configuration, to those of this member."""
    module: Any = attention
    if not any(hasattr(module, width) for width in HEAD_WIDTHS):
        return
    for count in HEAD_COUNTS:
        if hasattr(module, count):
            setattr(module, count, getattr(module, count) // size)
    if hasattr(module, "config") and hasattr(module.config, "num_attention_heads"):
        module.config = copy.copy(module.config)
        module.config.num_attention_heads //= size


def _leave_out_bias(module: Any, name: str, kind: CutKind) -> None:
    """Biases of experts' results are added by the first member alone, before the sum over members."""
    if isinstance(module, Experts):
        module.adds_bias = False
    elif kind is CutKind.ROW and is_summed_with_experts(name):
        module.forward = lambda x: functional.linear(x, module.weight)


def _compute_own_part(module: Any, kind: CutKind, group: TensorGroup) -> None:
    """Set the forward of modules that know the whole width of what is cut."""
    if kind is CutKind.ALL_HEADS:
        module.forward = partial(_normed_over_members, module, group)
    if isinstance(module, Conv1D):
        module.forward = partial(_transposed, module)


def _normed_over_members(norm: WideRMSNorm, group: TensorGroup, x: Tensor) -> Tensor:
    """A norm over the heads of all members, of which this one has some; two sums of one number a token."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = group.enter(group.leave(wide.pow(2).sum(-1, keepdim=True)))
    scaled = wide * torch.rsqrt(squares / (group.size * x.shape[-1]) + norm.eps)
    return norm.weight * scaled.to(x.dtype)


def _transposed(module: Any, x: Tensor) -> Tensor:
    """GPT-2's `Conv1D` with the width of its actual weight, and without a bias where it has none."""
    return functional.linear(x, module.weight.t(), module.bias)


def _sum_output(product: nn.Module, talk: Talk, num_pieces: int) -> None:
    bias = getattr(product, "bias", None)
    if bias is not None:
        product.register_parameter("bias", None)
        product.register_parameter(SUMMED_BIAS, bias)
    in_pieces = num_pieces > 1 and isinstance(product, nn.Linear | Conv1D)
    if in_pieces:
        whole: Callable[[Tensor], Tensor] = product.forward
        product.forward = lambda x: summed_in_pieces(whole, x, talk, num_pieces)

    def summed(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        total = output if in_pieces else talk.leave(output)
        return total if bias is None else total + module.summed_bias

    product.register_forward_hook(summed)


class _OwnTokens:
    """A token table with some rows per member: tokens of others give zeros, then all are summed."""

    def __init__(self, table: nn.Embedding, first: int, group: TensorGroup) -> None:
        self._group = group
        self._num_rows = table.weight.shape[0]
        self._first = first
        self._foreign = torch.empty(0, dtype=torch.bool)  # of the current call
        table.num_embeddings = self._num_rows
        if table.padding_idx is not None:
            own = table.padding_idx - first
            table.padding_idx = own if 0 <= own < self._num_rows else None
        table.register_forward_pre_hook(self._localise)
        table.register_forward_hook(self._complete)

    def _localise(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        del module
        local_T = args[0] - self._first
        self._foreign = (local_T < 0) | (local_T >= self._num_rows)
        return (local_T.masked_fill(self._foreign, 0),)

    def _complete(self, module: nn.Module, args: tuple[Tensor], output_TD: Tensor) -> Tensor:
        del module, args
        return self._group.leave(output_TD.masked_fill(self._foreign[:, None], 0))


def _vocabulary_loss(
    head: NextTokenHead, first: int, group: TensorGroup, x_TD: Tensor, context: Context
) -> Tensor:
    """`NextTokenHead.run` for logits partitioned among members; `first` is this member's first row."""
    labels_T = context.data.labels
    assert labels_T is not None, "the head is given its targets"
    logits_TV = head.logits(x_TD)
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    largest_T = wide_TV.detach().amax(-1)
    group.largest(largest_T)
    shifted_TV = wide_TV - largest_T[:, None]
    num_rows = logits_TV.shape[1]
    local_T = labels_T - first
    is_own_T = (local_T >= 0) & (local_T < num_rows)
    target_T = shifted_TV.gather(1, local_T.clamp(0, num_rows - 1)[:, None]).squeeze(1)
    parts = torch.stack([shifted_TV.exp().sum(-1), target_T.masked_fill(~is_own_T, 0)])
    sums_T, target_T = group.leave(parts)
    return (sums_T.log() - target_T).masked_fill(labels_T == NO_TARGET, 0).sum()
