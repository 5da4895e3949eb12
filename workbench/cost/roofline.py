"""The work of operators: matmul shapes, FLOP, bytes and messages, by tokens, attention area, tp and cp."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from workbench.cost.indexer import indexer_flop
from workbench.cost.recurrence import recurrence_flop
from workbench.float_sum import float_sum
from workbench.model.experts import JOIN, LATENT_UP, SHARED, is_of_expert
from workbench.model.layer import (
    Attention,
    Layer,
    Lookup,
    Matmul,
    Operator,
    Recurrence,
    Shard,
    TokenCount,
)
from workbench.model.reach import ANY, Reach
from workbench.model.trained import adapter_of
from workbench.model.transformer import is_cross_attention, norms_all_heads


@dataclass(frozen=True, slots=True)
class RowWork:
    """One packed row: its token counts and the query-key pairs of its attention.

    Pairs are counted at the IN count of an encoder; the LLM's IN and OUT counts are equal.

    Args:
        context_tokens: tokens of other modules that cross-attention layers read.
        reader_tokens: tokens of the row's items that have such context.
        context_area: query-key pairs between the two, item by item.
        reached: (reach, attention pairs within it), for each reach that hides any pairs.
    """

    tokens_in: int
    tokens_out: int
    attention_area: int
    context_tokens: int = 0
    reader_tokens: int = 0
    context_area: int = 0
    reached: tuple[tuple[Reach, int], ...] = ()

    def __post_init__(self) -> None:
        if min(self.tokens_in, self.tokens_out) < 1 or self.attention_area < 0:
            raise ValueError(f"row: want >= 1 token and area >= 0, got {self}")

    def pairs(self, reach: Reach) -> int:
        """Query-key pairs within a reach."""
        return next((pairs for known, pairs in self.reached if known == reach), self.attention_area)


class WorkSums(NamedTuple):
    """Sums over rows, and the longest row: everything that operators need of a work."""

    tokens_in: int
    tokens_out: int
    context_tokens: int
    reader_tokens: int
    attention_area: int
    context_area: int
    longest: int
    reached: tuple[tuple[Reach, int], ...]


@dataclass(frozen=True)
class Work:
    """The input sizes of one call of a layer.

    No `slots`: sums over rows and the hash, which every operator of every layer needs, are cached.

    Args:
        rows: of one rank.
        experts_load: tokens of the ranks that distribute experts with this one, in the mean, over its own.
    """

    rows: tuple[RowWork, ...]
    experts_load: float = 1.0

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("work: want at least one row, got none")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Work"], tuple[tuple[RowWork, ...], float]]:
        return Work, (self.rows, self.experts_load)

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.experts_load))

    @cached_property
    def sums(self) -> WorkSums:
        rows = self.rows
        return WorkSums(
            sum([row.tokens_in for row in rows]),
            sum([row.tokens_out for row in rows]),
            sum([row.context_tokens for row in rows]),
            sum([row.reader_tokens for row in rows]),
            sum([row.attention_area for row in rows]),
            sum([row.context_area for row in rows]),
            max([row.tokens_in for row in rows]),
            _reached(rows),
        )

    @property
    def whole(self) -> "Work":
        """The same work with all pairs of the masks, whatever reaches hide."""
        return self._whole if self.sums.reached else self

    @cached_property
    def _whole(self) -> "Work":
        return Work(tuple(replace(row, reached=()) for row in self.rows), self.experts_load)

    def reach(self, operator: Attention) -> Reach:
        """The operator's reach where it hides any of these pairs, else `ANY`."""
        return operator.reach if operator.reach in dict(self.sums.reached) else ANY

    def tokens(self, count: TokenCount) -> int:
        match count:
            case TokenCount.IN:
                return self.sums.tokens_in
            case TokenCount.OUT:
                return self.sums.tokens_out
            case TokenCount.CONTEXT:
                return self.sums.context_tokens
            case TokenCount.READERS:
                return self.sums.reader_tokens

    @property
    def attention_area(self) -> int:
        return self.sums.attention_area

    @property
    def context_area(self) -> int:
        return self.sums.context_area


def _reached(rows: tuple[RowWork, ...]) -> tuple[tuple[Reach, int], ...]:
    reaches = dict.fromkeys([reach for row in rows for reach, _ in row.reached])
    return tuple([(reach, sum([row.pairs(reach) for row in rows])) for reach in reaches])


class Grid(NamedTuple):
    """Degrees of tensor and context parallelism; `ep` of its ranks distribute experts."""

    tp: int = 1
    cp: int = 1
    ep: int = 1


class Gemm(NamedTuple):
    """y[m, n] = x[m, k] w[k, n] on one rank."""

    m: float
    n: float
    k: float

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def input_grad(self) -> "Gemm":
        """dx[m, k] = dy[m, n] w^T[n, k]."""
        return Gemm(self.m, self.k, self.n)

    @property
    def weight_grad(self) -> "Gemm":
        """dw[n, k] = dy^T[n, m] x[m, k]."""
        return Gemm(self.n, self.k, self.m)

    @property
    def transposed(self) -> "Gemm":
        """y^T[n, m] = w^T[n, k] x^T[k, m]: the same multiplications, with rows and columns exchanged."""
        return Gemm(self.n, self.m, self.k)

    def num_bytes(self, element_bytes: int) -> float:
        """Both operands and the product, each once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * element_bytes


def operator_tokens(operator: Operator, work: Work, grid: Grid) -> float:
    """Rows of the operator's tensors on one rank, with tokens divided evenly by context parallelism.

    Tokens of another module that cross-attention reads are whole on every rank.
    """
    scale = 1.0 if isinstance(operator, Lookup) else operator.tokens_scale
    shares = 1 if operator.tokens is TokenCount.CONTEXT else grid.cp
    return work.tokens(operator.tokens) * scale / shares


def gemm_of(operator: Matmul, work: Work, grid: Grid) -> Gemm:
    """The product that one rank computes."""
    n = operator.out_features / (grid.tp if operator.shard is Shard.COLUMN else 1)
    k = operator.in_features / (grid.tp if operator.shard is Shard.ROW else 1)
    return Gemm(operator_tokens(operator, work, grid), n, k)


def attention_pairs(operator: Attention, work: Work, grid: Grid) -> float:
    """Query-key pairs of one head on one rank."""
    if operator.keys is TokenCount.CONTEXT:
        return work.context_area / grid.cp
    if operator.num_keys is None:
        area = dict(work.sums.reached).get(operator.reach, work.attention_area)
        return area * operator.tokens_scale**2 / grid.cp
    return operator_tokens(operator, work, grid) * operator.num_keys


def attention_flop(operator: Attention, work: Work, grid: Grid) -> float:
    """Scores and weighted sum: 4 x head width x pairs x heads; heads over tp, pairs over cp.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", appendix A, with pairs for s^2.
    """
    return 4.0 * operator.mean_dim * attention_pairs(operator, work, grid) * operator.num_heads / grid.tp


# FlashAttention-2 (Dao 2023), section 3.1.2: five products against two of the forward; the
# scores are computed again inside the kernel, so all of it is the input gradient's.
ATTENTION_BACKWARD_FLOP = 2.5


def forward_flop(operator: Operator, work: Work, grid: Grid) -> float:
    """Forward FLOP of a matmul, attention or recurrence; 0 for other operators, which count by bytes."""
    if isinstance(operator, Matmul):
        return gemm_of(operator, work, grid).flop
    if isinstance(operator, Attention):
        return attention_flop(operator, work, grid)
    if isinstance(operator, Recurrence):
        return recurrence_flop(operator, operator_tokens(operator, work, grid), grid.tp).forward
    return 0.0


def index_flop(operator: Operator, work: Work, grid: Grid) -> float:
    """FLOP of an attention's indexer, whole on every tensor-parallel rank; 0 for other operators."""
    if not isinstance(operator, Attention) or operator.indexer is None:
        return 0.0
    tokens, pairs = operator_tokens(operator, work, grid), work.attention_area / grid.cp
    return indexer_flop(operator.indexer, tokens, pairs)


def layer_flop(layer: Layer, work: Work, grid: Grid = Grid()) -> float:  # noqa: B008  (immutable)
    """Forward FLOP of one layer on one rank."""
    return float_sum(
        forward_flop(each, work, grid) + index_flop(each, work, grid)
        for operator in layer.operators
        for each in (operator, *adapter_of(operator))
    )


class PlacedMessages(NamedTuple):
    """Bytes of the all-reduces of tensor parallelism on one rank, one entry a collective.

    Each with the index of its operator: a forward one follows it, a backward one precedes it.
    """

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]


def placed_messages(layer: Layer, work: Work, grid: Grid, element_bytes: int) -> PlacedMessages:
    """All-reduces inside one layer, as Megatron places them (Shoeybi et al. 2019, section 3).

    A column-cut operator opens a sharded region: its input gradient is all-reduced. A
    row-cut matmul (or a cut table) closes one: its output is all-reduced. A transformer
    block has two of each; a column-cut head that ends its layer has only the backward one.
    All experts together form one region, which every token enters and leaves once. A norm over all heads
    adds up one float32 a token, and its gradient.
    """
    if grid.tp == 1:
        return PlacedMessages((), ())
    forward: list[tuple[int, float]] = []
    backward: list[tuple[int, float]] = []
    sharded, end = False, _end_of_experts(layer)
    for index, operator in enumerate(layer.operators):
        rows = operator_tokens(operator, work, grid)
        if index == end:
            forward.append((index, rows * layer.out_width * element_bytes))
            sharded = False
        squares = [(index, rows * wide_sum_bytes(element_bytes))] * norms_all_heads(operator)
        forward += squares
        backward += squares
        if not _borders_region(operator):
            continue
        if isinstance(operator, Matmul) and (is_of_expert(operator) or operator.name.startswith(SHARED)):
            if not sharded:
                rows = work.tokens(operator.tokens) / grid.cp
                backward.append((index, rows * operator.in_features * element_bytes))
            sharded = True
        elif isinstance(operator, Lookup):
            forward.append((index, rows * operator.width * element_bytes))
        elif isinstance(operator, Matmul) and operator.shard is Shard.ROW:
            forward.append((index, rows * operator.out_features * element_bytes))
            sharded = False
        elif isinstance(operator, Matmul) and (not sharded or _reads_first(layer, index)):
            backward.append((index, rows * operator.in_features * element_bytes))
            sharded = True
    return PlacedMessages(tuple(forward), tuple(backward))


def _end_of_experts(layer: Layer) -> int | None:
    """The index of the operator that gives the results of all experts, back in the stream's width."""
    ends = (i for i, operator in enumerate(layer.operators) if operator.name in (JOIN, LATENT_UP))
    return max(ends, default=None)


def _borders_region(operator: Operator) -> bool:
    """Whether a region that tensor-parallel ranks cut may begin or end with the operator."""
    if isinstance(operator, Attention | Recurrence):
        return False
    return operator.shard is not Shard.REPLICATED or (isinstance(operator, Matmul) and operator.enters)


def _reads_first(layer: Layer, index: int) -> bool:
    """Whether the operator is the first to read the other module's tokens, whose gradient is summed too."""
    reads = [isinstance(op, Matmul) and op.tokens is TokenCount.CONTEXT for op in layer.operators]
    return reads[index] and not any(reads[:index])


def key_value_bytes(operator: Attention, work: Work, grid: Grid, element_bytes: int) -> float:
    """Bytes of keys and values of all context-parallel ranks, as one rank gathers them.

    Of a prompt each row has its own. 0 for keys from another module's tokens, which every rank has.
    """
    if operator.keys is not None:
        return 0.0
    tokens = work.tokens(operator.tokens) * operator.tokens_scale
    if operator.num_keys is not None and is_cross_attention(operator):
        tokens = operator.num_keys * len(work.rows)
    return 2.0 * tokens * operator.num_kv_heads * operator.mean_dim * element_bytes / grid.tp


def wide_sum_bytes(element_bytes: int) -> int:
    """Bytes of an element of sums among ranks: float32, or as wide as the tensors."""
    return max(4, element_bytes)
