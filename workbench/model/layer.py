"""A layer: the smallest thing a stage boundary can cut around, described by its operators."""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import ClassVar, get_args

from workbench.data.sample import WHERE_SET
from workbench.model.indexer import Indexer
from workbench.model.lora import DOWN, UP, Lora
from workbench.model.reach import Reach

LARGEST_SIZE = 10**9  # of a dim, a table or a count; far above any model's


class TokenCount(StrEnum):
    """Which of an item's two token counts an operator works on.

    An encoder item enters its blocks with `IN` tokens (patches, frames) and leaves its
    module with `OUT` tokens (after merging, pooling or dropping a class token). Where a layer reads
    another module's tokens by cross-attention, `CONTEXT` are those tokens and `READERS` the tokens of
    the items that have any: it passes the others by.
    """

    IN = "in"
    OUT = "out"
    CONTEXT = "context"
    READERS = "readers"


class Shard(StrEnum):
    """How tensor parallelism cuts a weight of shape [out, in]."""

    REPLICATED = "replicated"
    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named weight. `shape` is that of the whole, uncut tensor."""

    name: str
    shape: tuple[int, ...]
    shard: Shard = Shard.REPLICATED

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Matrix product `y[T, out] = x[T, in] W^T (+ b)`. Convolutions are expressed as matrix products.

    Args:
        name: name that is unique in the layer.
        in_features: width of x.
        out_features: width of y.
        bias: whether there is a bias.
        shard: how tensor parallelism splits the weight.
        tokens: token count that determines T.
        tokens_scale: rows of x per counted token (2.0 for Whisper's first convolution, which runs before the
            stride-2 one; 0.25 if four patches are merged).
        enters: whether tensor-parallel ranks enter partitioned computation with x, though the weight is whole
            on each: gradients of x and of the weight are then parts, which ranks add up.
        lora: its adapter, which is trained while the product's own weights are frozen; None: it has none.
        load_cv: of a router: how unequal the shares of rows are that its experts get, see
            `workbench.model.expert_load`.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    shard: Shard = Shard.REPLICATED
    tokens: TokenCount = TokenCount.IN
    tokens_scale: float = 1.0
    enters: bool = field(default=False, metadata={WHERE_SET: True})
    lora: Lora | None = field(default=None, metadata={WHERE_SET: True})
    load_cv: float = field(default=0.0, metadata={WHERE_SET: True})

    def parameters(self) -> tuple[Parameter, ...]:
        weight = Parameter(f"{self.name}.weight", (self.out_features, self.in_features), self.shard)
        bias_shard = Shard.COLUMN if self.shard is Shard.COLUMN else Shard.REPLICATED
        biases = [Parameter(f"{self.name}.bias", (self.out_features,), bias_shard)] * self.bias
        return (weight, *biases, *[p for product in self.adapter for p in product.parameters()])

    @property
    def adapter(self) -> tuple["Matmul", ...]:
        """The products with A and B of its adapter: A is cut with its rows, B with its columns."""
        if self.lora is None:
            return ()
        own, rank = replace(self, bias=False, enters=False, lora=None), self.lora.rank
        down, up = (each if self.shard is each else Shard.REPLICATED for each in (Shard.ROW, Shard.COLUMN))
        return (
            replace(own, name=f"{self.name}.{DOWN}", out_features=rank, shard=down),
            replace(own, name=f"{self.name}.{UP}", in_features=rank, shard=up),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores and weighted sum of an attention. Projections are separate matrix products.

    Args:
        name: name that is unique in the layer.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head: of its query, key and value.
        causal: whether the mask is causal.
        tokens: token count that determines the number of queries.
        tokens_scale: queries per counted token, and keys where `num_keys` is None.
        num_keys: keys per query if the number is fixed (cross-attention to a prompt of fixed length, a level
            of a fixed-size UNet); None: the attention area of the row.
        keys: "context": keys come from another module, item by item.
        window: sliding window: number of tokens back that a query attends to. Useful FLOP count only pairs
            inside it; so do times, for kernels that skip the others.
        chunk: tokens per chunk of a sample; a query attends only within its chunk (Llama 4). Counted as a
            window.
        is_capped: whether scores are soft-capped (Gemma 2); not counted as work.
        value_dim: width of a head's value where it differs from that of query and key.
        has_sinks: whether the softmax's denominator has a learned number for each head (gpt-oss); not counted
            as work.
        top_k: most keys that a query attends to, of those it sees: the ones with the highest scores.
        indexer: gives these scores; None with `top_k`: those of an earlier layer.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    tokens: TokenCount = TokenCount.IN
    tokens_scale: float = 1.0
    num_keys: int | None = None
    keys: TokenCount | None = field(default=None, metadata={WHERE_SET: True})
    window: int | None = field(default=None, metadata={WHERE_SET: True})
    chunk: int | None = field(default=None, metadata={WHERE_SET: True})
    is_capped: bool = field(default=False, metadata={WHERE_SET: True})
    value_dim: int | None = field(default=None, metadata={WHERE_SET: True})
    has_sinks: bool = field(default=False, metadata={WHERE_SET: True})
    top_k: int | None = field(default=None, metadata={WHERE_SET: True})
    indexer: Indexer | None = field(default=None, metadata={WHERE_SET: True})

    @property
    def mean_dim(self) -> float:
        """Mean width of a head's key and value: 4 times that are the FLOP of a pair, scores and sum."""
        return self.head_dim if self.value_dim is None else (self.head_dim + self.value_dim) / 2

    @property
    def reach(self) -> Reach:
        """How far its queries see; chosen keys are as many as those of a window."""
        return Reach(self.window if self.top_k is None else self.top_k, self.chunk)

    def parameters(self) -> tuple[Parameter, ...]:
        sinks = [Parameter(f"{self.name}.sinks", (self.num_heads,), Shard.COLUMN)] * self.has_sinks
        weights = () if self.indexer is None else self.indexer.weights(self.name)
        return (*sinks, *(Parameter(name, shape) for name, shape in weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """A memory-bound operator (norm, activation, residual, rotary) over [T, width].

    Args:
        name: name that is unique in the layer.
        width: width of a row.
        num_passes: tensors of that shape read or written in the forward.
        weights: (name, numel) pairs of its parameters, e.g. a norm's scale and shift.
        shard: how tensor parallelism splits the width.
        tokens: token count that determines T.
        tokens_scale: rows of the tensor per counted token.
        is_capped: whether its input is soft-capped first (logits of Gemma 2); not counted as work.
        cuts_weights: whether its parameters are split with the width (a convolution of single channels).
    """

    name: str
    width: int
    num_passes: int
    weights: tuple[tuple[str, int], ...] = ()
    shard: Shard = Shard.REPLICATED
    tokens: TokenCount = TokenCount.IN
    tokens_scale: float = 1.0
    is_capped: bool = field(default=False, metadata={WHERE_SET: True})
    cuts_weights: bool = field(default=False, metadata={WHERE_SET: True})

    def parameters(self) -> tuple[Parameter, ...]:
        shard = self.shard if self.cuts_weights else Shard.REPLICATED
        return tuple(Parameter(f"{self.name}.{name}", (numel,), shard) for name, numel in self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A table of vectors, read by index (token or position embedding).

    Args:
        name: name that is unique in the layer.
        num_rows: number of vectors.
        width: width of a vector.
        shard: how tensor parallelism splits the table.
        tokens: token count that determines the number of lookups.
    """

    name: str
    num_rows: int
    width: int
    shard: Shard = Shard.REPLICATED
    tokens: TokenCount = TokenCount.IN

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(f"{self.name}.weight", (self.num_rows, self.width), self.shard),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A state of every head that goes from token to token, behind a short convolution.

    It is of [key_dim, value_dim]. Projections are separate matmuls. For its work see `workbench.cost`.

    Args:
        name: name that is unique in the layer.
        num_heads: heads of values.
        num_key_heads: heads of queries and keys, each shared by equally many heads of values.
        key_dim: width of a head's query and key.
        value_dim: width of a head's value.
        kernel: tokens that the convolution of queries, keys and values sees, its own among them.
        tokens: token count that determines the number of steps.
        tokens_scale: steps per counted token.
    """

    title: ClassVar[str]

    name: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tokens: TokenCount = TokenCount.IN
    tokens_scale: float = 1.0

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads, and of the output."""
        return self.num_heads * self.value_dim

    @property
    def width(self) -> int:
        """Width of queries, keys and values together, which the convolution runs over."""
        return 2 * self.key_width + self.value_width

    def parameters(self) -> tuple[Parameter, ...]:
        convolution = Parameter(f"{self.name}.conv.weight", (self.width, self.kernel), Shard.COLUMN)
        names = (f"{self.name}.decay", f"{self.name}.decay_bias")
        return (convolution, *(Parameter(name, (self.num_heads,), Shard.COLUMN) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(Recurrence):
    """Gated delta rule of a head's state S: S <- a S + b k (v - a S^T k)^T, output S^T q.

    With a decay a and a step b of every token; S is zero before a sample's first one. Source: Yang et al.
    2024, "Gated Delta Networks", section 3.1.
    """

    title: ClassVar[str] = "linear attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateScan(Recurrence):
    """Mamba-2's rule of a head's state S: S <- a S + b k v^T, output S^T q + d v.

    With a decay a and a step b of every token, and d of the head; S is zero before a sample's first token.
    Source: Dao and Gu 2024, "Transformers are SSMs", section 7; its x, B and C are values, keys and queries.

    Args:
        chunk: tokens whose outputs are matrix products.
        bias: whether the convolution has a bias.
    """

    title: ClassVar[str] = "a state-space scan"

    chunk: int = 128
    bias: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        bias = (Parameter(f"{self.name}.conv.bias", (self.width,), Shard.COLUMN),) if self.bias else ()
        skip = Parameter(f"{self.name}.skip", (self.num_heads,), Shard.COLUMN)
        return (*Recurrence.parameters(self), *bias, skip)


Operator = Matmul | Attention | DeltaRule | StateScan | Pointwise | Lookup
_SIZES = {  # operator -> names of its numeric fields
    kind: tuple(f.name for f in fields(kind) if f.type in (int, float, int | None))
    for kind in get_args(Operator)
}
_SIZES_OF = {kind: attrgetter(*names) for kind, names in _SIZES.items()}


class LayerKind(StrEnum):
    """What the layer is to an adapter: where it stands in its module."""

    EMBED = "embed"
    BLOCK = "block"
    PROJECTOR = "projector"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)  # no slots: what is used most is cached on the instance
class Layer:
    """One layer of a module.

    Args:
        name: name that is unique in the module, e.g. "block.3".
        kind: role of the layer in the module.
        operators: operators in execution order.
        out_width: hidden width of the output.
        emits: token count of the output.
        trainable: false if its own weights are frozen; those of adapters are trained.
        tied: (parameter of this layer, shared name) pairs: weights of one module with the same shared name
            are one parameter, e.g. (("lm_head.weight", "embed_tokens.weight"),).
        stacked: features concatenated in the output, each for another layer of the module that reads it
            (DeepStack).
    """

    name: str
    kind: LayerKind
    operators: tuple[Operator, ...]
    out_width: int
    emits: TokenCount = TokenCount.IN
    trainable: bool = True
    tied: tuple[tuple[str, str], ...] = ()
    stacked: int = field(default=1, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if self.out_width < 1:
            raise ValueError(f"layer {self.name!r}: out_width must be >= 1, got {self.out_width}")
        if self.stacked < 1 or self.out_width % self.stacked:
            raise ValueError(
                f"layer {self.name!r}: want stacked features that divide out_width {self.out_width}, "
                f"got {self.stacked}; nearest: 1"
            )
        for operator in self.operators:
            for index, value in enumerate(_SIZES_OF[type(operator)](operator)):
                if value is not None and not 0 <= value <= LARGEST_SIZE:
                    name = _SIZES[type(operator)][index]
                    raise ValueError(
                        f"layer {self.name!r}, operator {operator.name!r}: {name} must be "
                        f"0 to {LARGEST_SIZE:,}, got {value}"
                    )

    @property
    def feature_width(self) -> int:
        """Width of one of the features that are stacked in its output."""
        return self.out_width // self.stacked

    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's weights; tied ones under their shared name."""
        return self._parameters

    @cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        shared = dict(self.tied)
        own = (parameter for operator in self.operators for parameter in operator.parameters())
        named = [Parameter(shared.get(p.name) or f"{self.name}.{p.name}", p.shape, p.shard) for p in own]
        return tuple(named)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters())

    @cached_property
    def has_adapters(self) -> bool:
        """Whether products of the layer have adapters; its other weights are then frozen."""
        return any(isinstance(operator, Matmul) and operator.lora is not None for operator in self.operators)

    @cached_property
    def has_indexer(self) -> bool:
        """Whether an attention of the layer has one, whose weights are frozen."""
        return any(isinstance(operator, Attention) and operator.indexer for operator in self.operators)

    @cached_property
    def first_with_weights(self) -> int:
        """Index of the first operator with weights; the number of operators where none has any."""
        indices = (index for index, operator in enumerate(self.operators) if operator.parameters())
        return next(indices, len(self.operators))

    @cached_property
    def reads_context(self) -> bool:
        """Whether the layer attends to another module's tokens, which are not in its own sequence."""
        return any(isinstance(op, Attention) and op.keys is TokenCount.CONTEXT for op in self.operators)
