"""The last layer of an encoder: final norm, token reduction and projection to the LLM's width."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from runtime.models.adapter import Context, CutKind, CutRules, InnerLayer, MicrobatchData
from runtime.models.initialise import Fill, normal
from runtime.models.norm import UnscaledRMSNorm, WideRMSNorm
from runtime.models.patch_grid import blockwise
from runtime.models.tile_rows import TileRows, put_together, without_padding
from workbench.model.families.tiles import NEWLINE
from workbench.model.layer import Shard
from workbench.model.projector import (
    GATED,
    Merge,
    Projector,
    ProjectorStep,
    Steps,
    from_text,
    grid_text,
    shards_of,
)
from workbench.model.transformer import Norm

# Shape suffixes: T = packed tokens, D = hidden width.


@dataclass(frozen=True, slots=True)
class ClassTokens:
    """The number of an item's tokens before and behind its patches; they do not leave the encoder."""

    before: int = 0
    behind: int = 0

    @property
    def num(self) -> int:
        return self.before + self.behind

    def without(self, x_TD: Tensor) -> Tensor:
        """The tokens of an item without them."""
        return x_TD[self.before : len(x_TD) - self.behind]


NO_CLASS_TOKENS = ClassTokens()


class MLPProjector(nn.Module):
    """Linear, GELU, linear: LLaVA 1.5's projector, under its parameter names."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width_in, width_out)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(width_out, width_out)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.linear_2(self.act(self.linear_1(x_TD)))
        return y_TD


class LinearProjector(nn.Module):
    """One linear map."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.linear(x_TD)
        return y_TD


PROJECTORS: Mapping[str, type[nn.Module]] = {"linear": LinearProjector, "mlp": MLPProjector}


def kind_of(projector: str | nn.Module) -> str:
    """What jobs call a projector; ValueError for one that they cannot name."""
    if projector == Projector.MERGER:
        return str(Projector.MERGER)
    for kind, made in PROJECTORS.items():
        if projector == kind or type(projector) is made:
            return kind
    classes = ", ".join(made.__name__ for made in PROJECTORS.values())
    raise ValueError(
        f"projector must be one of {', '.join(PROJECTORS)}, merger, or a {classes}, got {projector!r}"
    )


GridOf = Callable[[int, tuple[int, int] | None], tuple[int, int] | None]
"""(tokens of an item, its grid where the plan names one) -> (rows, columns); None: a run of tokens."""


class SwiGlu(nn.Module):
    """SiLU of the second half of the width, times the first half."""

    def forward(self, x_TD: Tensor) -> Tensor:
        value_TD, gate_TD = x_TD.chunk(2, dim=-1)
        return nn.functional.silu(gate_TD) * value_TD


class StepsProjector(nn.ModuleList):
    """A projector as a sequence of steps; a merge has no module; weights are named by the step's index.

    A call runs the steps after the last merge; `until_merged` are those up to it.
    """

    def __init__(self, steps: Steps, width_in: int, width_out: int) -> None:
        super().__init__()
        self.steps, width = steps, width_in
        for step in steps:
            made, width = _module(step, width, width_out)
            self.append(made)
        self._first = 1 + max((i for i, step in enumerate(steps) if step.merge is not None), default=-1)

    @property
    def until_merged(self) -> list[tuple[ProjectorStep, nn.Module]]:
        return list(zip(self.steps, self, strict=True))[: self._first]

    def forward(self, x_TD: Tensor) -> Tensor:
        for module in list(self)[self._first :]:
            x_TD = module(x_TD)
        return x_TD

    def pieces(self) -> tuple[tuple[int, CutKind], ...]:
        """Index of each matmul that tensor parallelism partitions, and how."""
        shards = enumerate(shards_of(self.steps))
        return tuple(
            (index, _CUTS[shard]) for index, shard in shards if self.steps[index].is_matmul and shard in _CUTS
        )


_CUTS = {Shard.COLUMN: CutKind.COLUMN, Shard.ROW: CutKind.ROW}


class Shares(nn.Module):
    """A softmax, filled up with zeros to `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_TD: Tensor) -> Tensor:
        return nn.functional.pad(x_TD.softmax(dim=-1), (0, self.width - x_TD.shape[-1]))


def _module(step: ProjectorStep, width: int, width_out: int) -> tuple[nn.Module, int]:
    """A step's module, and its output width."""
    if step.merge is not None:
        return nn.Identity(), width if step.how is Merge.MEAN else width * step.merge
    if step.norm is not None:
        return _norm(step, width), width
    if step.softmax is not None:
        return Shares(step.softmax), step.softmax
    if step.act is not None:
        return (SwiGlu(), width // 2) if step.act == GATED else (ACT2FN[step.act], width)
    behind = width_out if step.linear_out else step.linear
    assert behind is not None, "a step is one of them"
    return nn.Linear(width, behind, bias=step.bias), behind


def _norm(step: ProjectorStep, width: int) -> nn.Module:
    match step.norm:
        case Norm.LAYER:
            return nn.LayerNorm(width, eps=step.eps)
        case Norm.UNSHIFTED:
            return nn.LayerNorm(width, eps=step.eps, bias=False)
        case Norm.UNSCALED:
            return UnscaledRMSNorm(step.eps)
    return WideRMSNorm(width, step.eps, step.offset)


def merged(x_TD: Tensor, step: ProjectorStep, grid: tuple[int, int] | None) -> Tensor:
    """[T / merge, D or merge x D] tokens, each from a square of an image's patches, or a run of tokens."""
    assert step.merge is not None, "asked of merges"
    x_TMD = x_TD if grid is None else blockwise(x_TD.unflatten(0, grid), isqrt(step.merge))
    x_TMD = x_TMD.unflatten(0, (-1, step.merge))
    if step.how is Merge.MEAN:
        return x_TMD.mean(dim=1)
    return (x_TMD if step.how is Merge.CONCAT else x_TMD.transpose(1, 2)).flatten(1)


def merged_places(steps: Steps, num_tokens: int, grid: tuple[int, int] | None) -> Tensor:
    """[output tokens, merged tokens] indices of an item's tokens that the steps merge into each."""
    places = torch.arange(num_tokens)[:, None]
    for step in steps:
        if step.merge is not None:
            places = merged(places, replace(step, how=Merge.CONCAT), grid)
            side = isqrt(step.merge)
            grid = None if grid is None else (grid[0] // side, grid[1] // side)
    return places


class ProjectorLayer(InnerLayer):
    """Layer N+1 of an encoder.

    An item's tokens are reduced from `tokens_in` to `tokens_out` before the projection: the class token, if
    there is one, is dropped; then, where tokens_out divides the rest, each run of consecutive tokens is
    averaged.

    Args:
        projector: its kind, or the module.
        widths: of the encoder and its consumer.
        std: standard deviation of initial matrices.
        norm: the encoder's final norm, or None where its features are taken without one.
        norm_name: its name in a checkpoint.
        class_tokens: of each item.
        rows: how features of tiles are put together; None: an item's tokens stay in order.
        padded: tokens that become one, where items are padded: outputs behind `tokens_out` are padding, and
            their tokens are dropped; None: items are not padded.
    """

    cuts: CutRules = (("projector.linear_1", CutKind.COLUMN), ("projector.linear_2", CutKind.ROW))

    def __init__(
        self,
        projector: str | nn.Module | None,
        widths: tuple[int, int],
        std: float,
        norm: nn.Module | None = None,
        norm_name: str = "",
        *,
        class_tokens: ClassTokens = NO_CLASS_TOKENS,
        rows: TileRows | None = None,
        padded: int | None = None,
    ) -> None:
        super().__init__({"norm": norm_name, "projector": "projector", NEWLINE: NEWLINE}, std)
        if not isinstance(projector, nn.Module):
            if projector is None or projector not in PROJECTORS:
                raise ValueError(f"projector must be one of {', '.join(PROJECTORS)}, got {projector!r}")
            projector = PROJECTORS[projector](*widths)
        self.norm, self.projector = norm, projector
        self.class_tokens, self.rows, self.padded = class_tokens, rows, padded
        self.image_newline = None if rows is None else nn.Parameter(torch.empty(widths[1]))

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        y_TD: Tensor = self.projector(self._reduced(x_TD if self.norm is None else self.norm(x_TD), context))
        if self.rows is None or self.image_newline is None:
            return y_TD
        return put_together(y_TD, context.data, self.image_newline, self.rows)

    def fill(self, name: str) -> Fill:
        if name == NEWLINE and self.image_newline is not None:
            return normal(len(self.image_newline) ** -0.5)
        return super().fill(name)

    def _reduced(self, x_TD: Tensor, context: Context) -> Tensor:
        """Reduce the tokens on this rank."""
        pooling = context.data.pooling
        if self.padded is not None:
            return self._reduce(*_without_item_padding(x_TD, context.data, self.padded))
        if self.rows is not None:
            return without_padding(x_TD, context.data, self.class_tokens.without, self.rows.along)
        if pooling is None:
            return self._reduce(x_TD, context.data)
        return pooling.own(self._reduce(pooling.whole(x_TD), context.data))

    def _reduce(self, x_TD: Tensor, data: MicrobatchData) -> Tensor:
        if data.tokens_in == data.tokens_out:
            if self.class_tokens.num:
                raise ValueError(f"item {data.items[0]}: tokens_out must leave out the class token")
            return x_TD
        reduced = []
        sizes = zip(x_TD.split(list(data.tokens_in)), data.items, data.tokens_out, strict=True)
        for item_TD, item, tokens_out in sizes:
            kept_TD = self.class_tokens.without(item_TD)
            if len(kept_TD) % tokens_out:
                raise ValueError(
                    f"item {tuple(item)}: {len(kept_TD)} tokens do not shrink evenly to {tokens_out}"
                )
            is_whole = len(kept_TD) == tokens_out
            reduced.append(kept_TD if is_whole else kept_TD.unflatten(0, (tokens_out, -1)).mean(dim=1))
        return torch.cat(reduced)


def _without_item_padding(x_TD: Tensor, data: MicrobatchData, merged: int) -> tuple[Tensor, MicrobatchData]:
    """The first tokens of every item, as many as become its outputs."""
    lengths = tuple(merged * num for num in data.tokens_out)
    for item, tokens_in, length in zip(data.items, data.tokens_in, lengths, strict=True):
        if length > tokens_in:
            raise ValueError(
                f"item {tuple(item)}: {merged} tokens become one, want at most {tokens_in // merged} behind "
                f"the encoder, got {length // merged}"
            )
    kept = zip(x_TD.split(list(data.tokens_in)), lengths, strict=True)
    return torch.cat([item_TD[:length] for item_TD, length in kept]), replace(data, tokens_in=lengths)


class StepsProjectorLayer(ProjectorLayer):
    """A layer whose projector is a sequence of steps, which reduce items after class tokens are dropped.

    Args:
        steps: of the projector.
        grid_of: the grid of an item's patches.
        others: as of a `ProjectorLayer`.
    """

    def __init__(
        self, steps: Steps, widths: tuple[int, int], std: float, grid_of: GridOf, *norm: Any, **others: Any
    ) -> None:
        made = StepsProjector(steps, *widths)
        super().__init__(made, widths, std, *norm, **others)
        self.grid_of, self.until_merged = grid_of, made.until_merged
        self.cuts = tuple((f"projector.{index}", cut) for index, cut in made.pieces())

    def _reduce(self, x_TD: Tensor, data: MicrobatchData) -> Tensor:
        """Reduce items one by one, up to the last merge; without a merge, tokens are independent."""
        if not (self.until_merged or self.class_tokens.num) and data.tokens_in == data.tokens_out:
            return x_TD
        grids = data.grids or (None,) * len(data.items)
        items = []
        for item_TD, item, grid, tokens_out in zip(
            x_TD.split(list(data.tokens_in)), data.items, grids, data.tokens_out, strict=True
        ):
            y_TD = self._steps(self.class_tokens.without(item_TD), grid)
            if len(y_TD) != tokens_out:
                raise ValueError(
                    f"item {tuple(item)}: its projector makes {len(y_TD)} tokens of {len(item_TD)}, the plan "
                    f"says {tokens_out}"
                )
            items.append(y_TD)
        return torch.cat(items)

    def _steps(self, x_TD: Tensor, grid: tuple[int, int] | None) -> Tensor:
        lies = self.grid_of(len(x_TD), grid)
        for step, module in self.until_merged:
            if step.merge is None:
                x_TD = module(x_TD)
                continue
            side = isqrt(step.merge)
            if len(x_TD) % step.merge or (lies is not None and (lies[0] % side or lies[1] % side)):
                raise ValueError(f"{len(x_TD)} tokens{grid_text(lies)} do not merge {step.merge} to one")
            x_TD = merged(x_TD, step, lies)
            lies = None if lies is None else (lies[0] // side, lies[1] // side)
        return x_TD


class StepsMerger(StepsProjectorLayer):
    """The same behind a tower that has groups of tokens in an order by windows, which it restores."""

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        y_GD = super().run(x_TD, context)
        return y_GD if context.order is None else y_GD.index_select(0, context.order.argsort())


def steps_or_none(kind: str | None) -> Steps | None:
    """The steps of a projector that is given by steps; None for named ones."""
    parsed = None if kind is None else from_text(kind)
    return None if parsed is None or isinstance(parsed, Projector) else parsed


Rotate = Callable[[Tensor, MicrobatchData], Tensor]
"""([T, D] features after the final norm, the microbatch) -> the same, rotated."""


class PooledProjectorLayer(ProjectorLayer):
    """A layer that averages pairs of tokens before the norm, as Qwen2-Audio's; an odd last one is dropped.

    Attributes:
        time_rotary: rotates features between norm and projector; None: nothing does.
    """

    time_rotary: Rotate | None = None

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        data = context.data
        for item, tokens_in, tokens_out in zip(data.items, data.tokens_in, data.tokens_out, strict=True):
            if tokens_in // 2 != tokens_out:
                raise ValueError(
                    f"item {tuple(item)}: two tokens become one, want {tokens_in // 2} behind the encoder, "
                    f"got {tokens_out}"
                )
        pooled_TD = self._reduced(x_TD, context)
        normed_TD = pooled_TD if self.norm is None else self.norm(pooled_TD)
        y_TD: Tensor = self.projector(
            normed_TD if self.time_rotary is None else self.time_rotary(normed_TD, data)
        )
        return y_TD

    def _reduce(self, x_TD: Tensor, data: MicrobatchData) -> Tensor:
        sizes = zip(x_TD.split(list(data.tokens_in)), data.tokens_out, strict=True)
        paired_TD = torch.cat([item_TD[: 2 * tokens_out] for item_TD, tokens_out in sizes])
        return paired_TD.unflatten(0, (-1, 2)).mean(dim=1)
