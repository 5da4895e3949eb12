"""Projectors: the steps that map an encoder's output to the width of its consumer."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from workbench.frozen_json import FrozenJson, parse_json
from workbench.model.layer import Layer, LayerKind, Matmul, Operator, Pointwise, Shard, TokenCount
from workbench.model.transformer import UNSCALED_NORM, Norm, norm

GATED = "swiglu"  # an activation that halves the width: SiLU of one half times the other
GATED_PARTS = 2
POOL, SHUFFLE = "pool", "shuffle"  # operators that merge neighbouring tokens


class Projector(StrEnum):
    """Projectors that have a name; all have biases.

    LINEAR: one matmul. MLP: matmul to the consumer's width, GELU, square matmul.
    MERGER: the encoder's own (Qwen2-VL): norm, `merge` neighbouring tokens side by side,
    square matmul, GELU, matmul.
    """

    LINEAR = "linear"
    MLP = "mlp"
    MERGER = "merger"


class Merge(StrEnum):
    """How neighbouring tokens become one.

    MEAN: of them. CONCAT: side by side, token after token. INTERLEAVE: side by side, channel after channel.
    """

    MEAN = "mean"
    CONCAT = "concat"
    INTERLEAVE = "interleave"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorStep:
    """One step of a projector: exactly one of `norm`, `merge`, `linear`, `linear_out`, `act` and `softmax`.

    Args:
        norm: kind of a norm over the token's width.
        eps: of the norm.
        offset: added to the norm's weights: 1 in Gemma's.
        merge: neighbouring tokens that become one: a square of an image's patches, a run of a clip's.
        how: they do.
        linear: width that a matmul gives.
        linear_out: a matmul to the width of the consumer.
        bias: whether the matmul has one.
        act: an activation's name; "swiglu" halves the width.
        softmax: width behind a softmax, whose shares are filled up with zeros.
    """

    norm: Norm | None = None
    eps: float = 1e-5
    offset: float = 0.0
    merge: int | None = None
    how: Merge = Merge.CONCAT
    linear: int | None = None
    linear_out: bool = False
    bias: bool = True
    act: str | None = None
    softmax: int | None = None

    def __post_init__(self) -> None:
        options = (self.norm, self.merge, self.linear, self.linear_out or None, self.act, self.softmax)
        if sum(each is not None for each in options) != 1:
            raise ValueError(
                "a projector's step wants exactly one of norm, merge, linear, linear_out, act and softmax"
            )
        for name, value in (("merge", self.merge), ("linear", self.linear), ("softmax", self.softmax)):
            if value is not None and value < 1:
                raise ValueError(f"a projector's {name} must be >= 1, got {value}; nearest: 1")

    @property
    def is_matmul(self) -> bool:
        return self.linear is not None or self.linear_out

    @property
    def bends(self) -> bool:
        """Whether it is an activation or a softmax."""
        return self.act is not None or self.softmax is not None


Steps = tuple[ProjectorStep, ...]
ProjectorKind = Projector | Steps

_OUT = ProjectorStep(linear_out=True)
_GELU = ProjectorStep(act="gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The last layer of an encoder: its final norm, then its projector.

    Args:
        kind: which projector.
        in_width: width of the encoder.
        out_width: width of the consumer.
        norm: the encoder's final norm, None where it has none.
        merge: tokens that become one: for MERGER side by side, for the other names their mean.
    """

    kind: ProjectorKind
    in_width: int
    out_width: int
    norm: Norm | None
    merge: int = 1


def steps_of(projection: Projection) -> Steps:
    """The projector's steps, in order."""
    p = projection
    if not isinstance(p.kind, Projector):
        return p.kind
    mean = (ProjectorStep(merge=p.merge, how=Merge.MEAN),) if p.merge > 1 else ()
    square = ProjectorStep(linear=p.merge * p.in_width)
    return {
        Projector.LINEAR: (*mean, _OUT),
        Projector.MLP: (*mean, ProjectorStep(linear=p.out_width), _GELU, _OUT),
        Projector.MERGER: (ProjectorStep(merge=p.merge), square, _GELU, _OUT),
    }[p.kind]


def projector_layer(projection: Projection) -> Layer:
    """Final norm and projector as a layer; it emits the OUT count, which enters the consumer's sequence.

    Two matmuls around an activation are cut over tensor-parallel ranks by columns, then by rows; every
    other is whole on each rank.

    Raises:
        ValueError: steps that do not end at the consumer's width.
    """
    p, steps = projection, steps_of(projection)
    operators: list[Operator] = [] if p.norm is None else [norm("final_norm", p.in_width, p.norm)]
    lays_own_patches = p.kind is Projector.MERGER  # so merging moves no data
    width, rows = p.in_width, merged_by(steps)  # of a token, and number of tokens still to be merged
    shards = shards_of(steps)
    for index, step in enumerate(steps):
        if step.merge is None:
            operator = _operator(step, _name(steps, index), width, p.out_width, shards[index])
            operators.append(replace(operator, tokens=TokenCount.OUT, tokens_scale=float(rows)))
            width = _width_behind(step, width, p.out_width)
            continue
        if not lays_own_patches:
            operators.append(_merging(step, width, rows))
        rows //= step.merge
        width *= 1 if step.how is Merge.MEAN else step.merge
    if width != p.out_width:
        raise ValueError(
            f"projector: want steps that end {p.out_width} wide, as its consumer is, got {width}"
        )
    return Layer(
        name="projector",
        kind=LayerKind.PROJECTOR,
        operators=tuple(operators),
        out_width=p.out_width,
        emits=TokenCount.OUT,
    )


def merged_by(steps: Steps) -> int:
    """The number of tokens that the steps merge into one."""
    return prod(step.merge for step in steps if step.merge is not None)


def grid_text(grid: tuple[int, int] | None) -> str:
    """How an error says in which grid the tokens of an image lie."""
    return "" if grid is None else f" in {grid[0]} rows of {grid[1]}"


def shown(kind: ProjectorKind) -> str:
    """The projector for error messages: its name, or its number of steps."""
    return repr(kind.value) if isinstance(kind, Projector) else f"{len(kind)} steps"


def to_text(kind: ProjectorKind) -> str:
    """A name, or steps as one line of JSON; equal projectors, equal text."""
    return kind.value if isinstance(kind, Projector) else json.dumps(_JSON.encode(kind), sort_keys=True)


def from_text(text: str) -> ProjectorKind:
    """The inverse of `to_text`; ValueError for other text."""
    if text in tuple(Projector):
        return Projector(text)
    steps = _JSON.decode(Steps, parse_json(text, "projector"), "projector")
    assert isinstance(steps, tuple)
    return steps


def _operator(step: ProjectorStep, name: str, width: int, out_width: int, shard: Shard) -> Pointwise | Matmul:
    if step.norm is not None:
        return norm(UNSCALED_NORM if step.norm is Norm.UNSCALED else name, width, step.norm)
    behind = _width_behind(step, width, out_width)
    if step.softmax is not None:
        if behind < width:
            raise ValueError(f"a projector's softmax must be as wide as its tokens, {width}, got {behind}")
        return Pointwise(name=name, width=behind, num_passes=2)
    if step.act is not None:
        passes = 1 + GATED_PARTS if step.act == GATED else 2
        return Pointwise(name=name, width=behind, num_passes=passes, shard=shard)
    return Matmul(name=name, in_features=width, out_features=behind, bias=step.bias, shard=shard)


def _merging(step: ProjectorStep, width: int, rows: int) -> Pointwise:
    """The merging operator: a mean reads its tokens, a concatenation also writes them."""
    name, passes = (POOL, 1) if step.how is Merge.MEAN else (SHUFFLE, 2)
    return Pointwise(
        name=name, width=width, num_passes=passes, tokens=TokenCount.OUT, tokens_scale=float(rows)
    )


def _width_behind(step: ProjectorStep, width: int, out_width: int) -> int:
    if step.act == GATED:
        return width // GATED_PARTS
    return out_width if step.linear_out else step.linear or step.softmax or width


def _name(steps: Steps, index: int) -> str:
    """projector.0, projector.gelu, projector.2: counted as in a torch Sequential; alone: projector."""
    working = [index_of_step for index_of_step, step in enumerate(steps) if step.is_matmul or step.bends]
    step = steps[index]
    if step.norm is not None:
        return f"projector.norm_{sum(each.norm is not None for each in steps[:index])}"
    if step.softmax is not None:
        return "projector.softmax"
    if step.act is not None:
        return f"projector.{'gelu' if step.act.startswith('gelu') else step.act}"
    return "projector" if len(working) == 1 else f"projector.{working.index(index)}"


def shards_of(steps: Steps) -> tuple[Shard, ...]:
    """How tensor parallelism cuts each step: two matmuls around an activation by columns, then rows.

    A matmul belongs to one such pair, the first.
    """
    shards = [Shard.REPLICATED] * len(steps)
    for index in range(len(steps) - 2):
        if shards[index] is Shard.REPLICATED and _is_pair(steps[index : index + 3]):
            shards[index : index + 3] = (Shard.COLUMN, Shard.COLUMN, Shard.ROW)
    return tuple(shards)


def _is_pair(steps: Steps) -> bool:
    """Whether three steps are matmul, elementwise activation, matmul."""
    first, act, second = steps
    return first.is_matmul and act.act not in (None, GATED) and second.is_matmul


_JSON = FrozenJson()
