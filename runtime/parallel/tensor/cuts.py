"""The weights that tensor-parallel ranks cut: by heads, by inner features, by the vocabulary.

Attention is cut by heads, an MLP by its inner features, the token table and the head by the vocabulary: the
first product's weights by output features (column), the second's by input features (row). Norms, positions,
patch embeddings and convolutions are whole on every member.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
Differs: parts may be unequal except for heads, so a vocabulary needs no padding; each expert is cut over all
members.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from runtime.models.adapter import CutKind, StageLayer
from runtime.models.lora import is_adapter
from runtime.models.mixture import SHARED_EXPERT, SHARED_EXPERTS, SHARED_MLP
from runtime.models.norm import WideRMSNorm
from runtime.models.separate_experts import MIXTURE
from workbench.model.lora import DOWN, UP

# Products for all tokens inside a mixture; Granite 4's mixture is itself named `shared_mlp`.
BESIDE_EXPERTS = (SHARED_EXPERT, SHARED_EXPERTS, f"{MIXTURE}.{SHARED_MLP}")
SUMMED_BIAS = "summed_bias"  # bias of a row product: added once, after the sum
EXPERT_BIAS = "down_proj_bias"  # biases of experts' row products: added by the first member, before the sum

_BY_NAME = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc"), CutKind.COLUMN),
    **{"linear_fc1": CutKind.COLUMN, "linear_fc2": CutKind.ROW},
    **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), CutKind.COLUMN),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "down_proj", "fc2", "c_proj"), CutKind.ROW),
    **dict.fromkeys(("proj", "projection_layer"), CutKind.ROW),
    **dict.fromkeys(("qkv_proj", "qkv", "in_proj_qkv", "gate_up_proj", "c_attn"), CutKind.FUSED),
}
_PRODUCTS = (nn.Linear, Conv1D)
_NORMS = (nn.LayerNorm, WideRMSNorm)


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of a weight: every block along `dim` is split into a part for each member.

    Args:
        blocks: their sizes: one of the whole dim, or those of several products in one weight.
        unit: number of features that stay together.
    """

    dim: int
    blocks: tuple[int, ...]
    unit: int = 1

    def parts(self, size: int) -> list[tuple[int, ...]]:
        """[members] sizes of each one's parts of all blocks; the first members have the larger ones."""
        return [tuple(self._part(block, member, size) for block in self.blocks) for member in range(size)]

    def start(self, member: int, size: int) -> int:
        """Start of a member's part, for a single block."""
        return sum(self._part(self.blocks[0], before, size) for before in range(member))

    def own(self, whole: Tensor, member: int, size: int) -> Tensor:
        """A copy of one member's part."""
        parts = []
        for block, values in zip(self.blocks, whole.split(self.blocks, self.dim), strict=True):
            sizes = [self._part(block, index, size) for index in range(size)]
            parts.append(values.split(sizes, self.dim)[member])
        return torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole weight, from all members' parts."""
        sizes = self.parts(len(parts))
        split = [part.split(part_sizes, self.dim) for part, part_sizes in zip(parts, sizes, strict=True)]
        return torch.cat([torch.cat(block, self.dim) for block in zip(*split, strict=True)], self.dim)

    def shapes(self, shape: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """[members] shape of each one's part, given that of any of them."""
        before, after = tuple(shape[: self.dim]), tuple(shape[self.dim + 1 :])
        return [(*before, sum(part), *after) for part in self.parts(size)]

    def _part(self, block: int, member: int, size: int) -> int:
        units, remainder = divmod(block // self.unit, size)
        return (units + (member < remainder)) * self.unit


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cuts of one layer by local parameter name, and the weights that have partial gradients.

    `experts` names modules whose experts are distributed instead, and exchange tokens themselves.
    """

    cut: dict[str, Cut] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()


def cuts_of(layer: StageLayer, size: int) -> Cuts:
    """How `size` members share a layer as its adapter builds it.

    Raises:
        ValueError: heads that the number of members does not divide, fewer features than members, or a
            module without a rule.
    """
    cuts = Cuts()
    partial: list[str] = []
    for name, module in layer.named_modules():
        kind = kind_of(layer, name, module)
        if kind is CutKind.PARTIAL:
            partial += [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
        if kind is CutKind.EXPERTS and hasattr(module, EXPERT_BIAS):
            partial.append(f"{name}.{EXPERT_BIAS}")
        if kind is CutKind.ROW and is_summed_with_experts(name) and module.bias is not None:
            partial.append(f"{name}.bias")  # added by the first member, before the sum
        own = dict(_module_cuts(layer, name, module, kind))
        if hasattr(module, DOWN) and "weight" in own:
            is_row = kind is CutKind.ROW
            cut_half, whole_half = (DOWN, UP) if is_row else (UP, DOWN)
            cuts.cut[f"{name}.{cut_half}.weight"] = replace(own["weight"], dim=int(is_row))
            partial.append(f"{name}.{whole_half}.weight")
        for parameter, cut in own.items():
            _check(layer.hugging_face_name(f"{name}.{parameter}"), cut, size, kind)
            cuts.cut[f"{name}.{parameter}"] = cut
    return Cuts(cuts.cut, tuple(partial))


def is_summed_with_experts(name: str) -> bool:
    """Whether a product gives the result of a shared expert, which members sum with that of the others."""
    return name.rpartition(".")[0].endswith(BESIDE_EXPERTS)


def kind_of(layer: StageLayer, name: str, module: nn.Module) -> CutKind:
    """How the own weights of a module of a layer are cut.

    Raises:
        ValueError: there is no rule for it.
    """
    if is_adapter(name) or not any(True for _ in module.parameters(recurse=False)):
        return CutKind.WHOLE  # an adapter is cut with its product
    rules = dict(layer.cuts)
    rule = rules.get(name, rules.get(type(module)))
    if rule is not None:
        return rule
    if not name.startswith("block."):
        return CutKind.WHOLE
    own_name = name.rpartition(".")[2]
    if isinstance(module, _PRODUCTS) and own_name in _BY_NAME:
        return _BY_NAME[own_name]
    if isinstance(module, _NORMS) and not in_region(layer, name):
        return CutKind.WHOLE
    if _norms_heads(layer, name, module):
        return CutKind.PARTIAL
    raise ValueError(
        f"{layer.hugging_face_name(name)}: there is no rule to cut {type(module).__name__} for tensor "
        "parallelism; give its stage tp = 1"
    )


def in_region(layer: StageLayer, name: str) -> bool:
    """Whether activations around a module of that name are partitioned among members."""
    return name.startswith("block.") and any(part in layer.regions for part in name.split(".")[:-1])


def _module_cuts(layer: StageLayer, name: str, module: Any, kind: CutKind) -> Iterator[tuple[str, Cut]]:
    """Yield (parameter name in the module, its cut)."""
    if kind in (CutKind.WHOLE, CutKind.PARTIAL):
        return
    if kind is CutKind.EXPERTS:
        up_dim, down_dim = module.inner_dims
        inner = module.down_proj.shape[down_dim]
        num_halves = module.entering.shape[up_dim] // inner  # gate and up, or up alone
        blocks: tuple[int, ...] = (2 * inner,) if module.alternates else (inner,) * num_halves
        unit = 2 if module.alternates else 1
        yield module.entering_name, Cut(up_dim, blocks, unit)
        yield "down_proj", Cut(down_dim, (inner,))
        if hasattr(module, "gate_up_proj_bias"):
            yield "gate_up_proj_bias", Cut(1, blocks, unit)
        return
    if kind is CutKind.ALL_HEADS:
        yield "weight", Cut(0, (len(module.weight),), _head_width(layer, name))
        return
    if kind is CutKind.HEADS:
        yield from ((name, Cut(0, (len(own),))) for name, own in module.named_parameters(recurse=False))
        return
    out_dim, in_dim = (1, 0) if isinstance(module, Conv1D) else (0, 1)
    width = _head_width(layer, name)
    if kind is CutKind.ROW:
        yield "weight", Cut(in_dim, (module.weight.shape[in_dim],), width)
        return
    num_out = int(module.weight.shape[out_dim])
    blocks = _fused_blocks(layer, name, num_out) if kind is CutKind.FUSED else (num_out,)
    yield "weight", Cut(out_dim, blocks, width)
    if getattr(module, "bias", None) is not None:
        yield "bias", Cut(0, blocks, width)


def _check(name: str, cut: Cut, size: int, kind: CutKind) -> None:
    for block in cut.blocks:
        units = block // cut.unit
        if cut.unit > 1 and units % size and kind is not CutKind.EXPERTS:
            raise ValueError(f"{name}: tensor parallelism splits whole heads, {units} do not go into {size}")
        if units < size:
            raise ValueError(f"{name}: {units} features do not go into {size} tensor-parallel parts")


def _head_width(layer: StageLayer, name: str) -> int:
    """Number of features that must stay together: the width of an attention's heads."""
    owner = layer.get_submodule(name.rpartition(".")[0])
    has_groups = hasattr(owner, "ssm_state_size")  # of heads; the plan has checked that they divide
    return int(getattr(owner, "head_dim", 1)) if in_region(layer, name) and not has_groups else 1


def _norms_heads(layer: StageLayer, name: str, module: nn.Module) -> bool:
    """Whether it is a norm within an attention, shared by all heads."""
    if not isinstance(module, _NORMS):
        return False
    return module.weight.numel() == _head_width(layer, name) > 1


def _fused_blocks(layer: StageLayer, name: str, num_out: int) -> tuple[int, ...]:
    owner: Any = layer.get_submodule(name.rpartition(".")[0])
    if name.endswith(("gate_up_proj", "input_linear")):
        return (num_out // 2, num_out // 2)
    if hasattr(owner, "ssm_state_size"):  # gates, values, keys, queries and steps, or without first and last
        values, keys = owner.intermediate_size, owner.n_groups * owner.ssm_state_size
        mixed = (values, keys, keys)
        return mixed if num_out == sum(mixed) else (values, *mixed, owner.num_heads)
    if hasattr(owner, "key_dim"):  # of all heads; the plan has checked that they divide
        return (owner.key_dim, owner.key_dim, owner.value_dim)
    if name.endswith(("c_attn", "qkv", ".in_proj")):
        groups = int(getattr(owner, "num_key_value_groups", 1))
        keys = num_out // (groups + 2)
        return (groups * keys, keys, keys)
    keys = int(owner.num_key_value_heads) * int(owner.head_dim)
    return (num_out - 2 * keys, keys, keys)
