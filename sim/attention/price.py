"""Attention times for `price`: masks, token shards and a kernel, simulated at a profile's rates.

Timings of a unit follow from the profile: its attention table, memory bandwidth and link. The simulation
itself is in `sim.attention.policies`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import ceil, log2

import numpy as np

from sim.attention.gpu import COMPUTE_UNITS
from sim.attention.pieces import UnitTiming
from sim.attention.policies import Gpu, Kernel, Launches, Wires, launches_of, simulate_attention
from workbench.arrays import Floats, Ints
from workbench.cost.collectives import Collective
from workbench.cost.hardware import Link
from workbench.cost.kernel_times import ELEMENT_BYTES, length_of
from workbench.cost.model import CostModel
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Grid,
    RowWork,
    Work,
    attention_flop,
    operator_tokens,
    wide_sum_bytes,
)
from workbench.masks.bitfield import Bitfield, concatenate
from workbench.masks.tiles import PARTIAL, Tiles, classify
from workbench.model.layer import Attention, TokenCount
from workbench.model.reach import ANY, Reach
from workbench.plan.gathered_heads import heads_per_gather
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import owned_tokens, row_shards
from workbench.plan.work import even_work_of, row_kind, row_mask, within
from workbench.timing.attention import AttentionCall, AttentionTime
from workbench.timing.grid_links import grid_links

PARTIAL_BYTES = 4  # a partial result is stored in float32
LONG = 16384  # tokens from which on the profile's attention rate is that of a full GPU
LONG_ROW = Work((RowWork(LONG, LONG, LONG * (LONG + 1) // 2),))
TILE = (128, 128)
LENGTHS = 64  # steps per octave to which lengths of rows are rounded
MOST_TILES = 20_000_000  # in the cache
_RankTiles = tuple[tuple[Tiles, ...], tuple[int, ...]]  # tiles and number of tokens of every rank
_TILES: LruCache[_RankTiles] = LruCache(MOST_TILES, lambda of: sum(len(tiles.columns) for tiles in of[0]) + 1)
_TIMES: LruCache[AttentionTime] = LruCache(65_536)
_ANCHORED: LruCache[tuple[Gpu, Gpu]] = LruCache(4096)


def weights(tiles: Tiles, partial_tile: float = 1.0) -> Floats:
    """[nnz] work of each tile in full tiles; a partial one, whose mask is tested, takes `partial_tile`."""
    if partial_tile < 1:
        raise ValueError(f"a partial tile takes at least as long as a full one, got {partial_tile}")
    return np.where(tiles.kinds == PARTIAL, partial_tile, 1.0).astype(np.float64)


def row_tiles(tiles: Tiles, *, num_slots: int = 1, partial_tile: float = 1.0) -> Floats:
    """[rows, slots] work of every query block, per slot: `num_slots` equal ranges of key blocks."""
    if num_slots < 1:
        raise ValueError(f"slots of key positions: want >= 1, got {num_slots}")
    row = _rows(tiles)
    slot = tiles.columns.astype(np.int64) * num_slots // max(1, tiles.num_col_blocks)
    work = _sums(row * num_slots + slot, weights(tiles, partial_tile), tiles.num_row_blocks * num_slots)
    return work.reshape(tiles.num_row_blocks, num_slots)


def column_tiles(tiles: Tiles) -> Floats:
    """[key blocks] work of the gradients of each block of keys and values."""
    return _sums(tiles.columns.astype(np.int64), weights(tiles), tiles.num_col_blocks)


def _sums(index: Ints, weight: Floats, length: int) -> Floats:
    return np.bincount(index, weight, minlength=length).astype(np.float64)


def _rows(tiles: Tiles) -> Ints:
    return np.repeat(np.arange(tiles.num_row_blocks), np.diff(tiles.row_offsets))


def attention_of(plan: Plan, cost: CostModel) -> "SimulatedAttention | None":
    """The attention model for `price`: simulated attention where context-parallel ranks share tokens.

    Stages on devices whose number of compute units is unknown are priced by whole-kernel rates or measured
    layers; so are stages without context parallelism. None where that holds for all stages.
    """
    shared = (_machine(plan, stage, cost).profile.device for stage in plan.stages if stage.cp > 1)
    return SimulatedAttention(cost) if any(d in COMPUTE_UNITS for d in shared) else None


def _machine(plan: Plan, stage: Stage, cost: CostModel) -> CostModel:
    return cost.on(plan.cluster.device_of(stage.flat_ranks))


class SimulatedAttention:
    """An `AttentionModel` for `price` that simulates attention tile by tile.

    Covers self-attention among the tokens that enter a module's blocks, under the mask of its rows, where
    context-parallel ranks share them; returns None for everything else (a single rank, cross-attention,
    attention on fewer tokens). Forwards are split by blocks of queries; backwards by blocks of keys, with a
    reduce-scatter of float32 gradients.

    Args:
        cost: rates, bandwidth and links.
        kernel: order, split and streams of the launches.
        num_units: compute units of a GPU; None: from `COMPUTE_UNITS` by the stage's device.
    """

    def __init__(
        self, cost: CostModel, *, kernel: Kernel | None = None, num_units: int | None = None
    ) -> None:
        self._cost, self._kernel, self._num_units = cost, kernel or Kernel(), num_units
        self._routing: Routing | None = None
        self._tiles: dict[tuple[object, ...], _RankTiles] = {}

    @property
    def identity(self) -> Hashable:
        """Everything that times depend on besides the call, see `identity_of`."""
        return Identity(self._cost), self._kernel, self._num_units

    def __call__(self, call: AttentionCall) -> AttentionTime | None:
        operator, stage, microbatch = call.operator, call.stage, call.microbatch
        whole = operator.tokens is TokenCount.IN and operator.tokens_scale == 1.0
        if stage.cp == 1 or operator.num_keys is not None or not whole:
            return None
        cost = _machine(call.plan, stage, self._cost)
        num_units = self._num_units or COMPUTE_UNITS.get(cost.profile.device)
        if num_units is None:
            return None
        if self._routing is None or call.plan is not self._routing.plan:  # the cache is of one plan
            self._routing, self._tiles = routing_of(call.plan), {}
        link = grid_links(call.plan.cluster, stage).context
        shape = (operator.num_heads, operator.num_kv_heads, operator.head_dim)
        reach = call.reach(cost)
        name = (microbatch.module, microbatch.replica, microbatch.index, reach)
        if name not in self._tiles:
            self._tiles[name] = _rank_tiles(self._routing, microbatch, reach)
        tiles = self._tiles[name]
        machine = Identity(cost), self._kernel, num_units
        key = Identity(tiles), stage.tp, stage.cp, shape, link, call.plan.settings.precision, machine
        return _TIMES.get_or(key, lambda: self._time(call, tiles, link, cost, num_units))

    def _time(
        self, call: AttentionCall, rank_tiles: _RankTiles, link: Link | None, cost: CostModel, num_units: int
    ) -> AttentionTime:
        tiles, tokens = rank_tiles
        operator, stage, precision = call.operator, call.stage, str(call.plan.settings.precision)
        num_heads, num_kv_heads = operator.num_heads // stage.tp, operator.num_kv_heads // stage.tp
        per_launch = heads_per_gather(num_heads, num_kv_heads, max(tokens))
        launches = launches_of(operator, tp=stage.tp, kv_heads_per_launch=per_launch)
        work = cost.computed(even_work_of(call.plan, call.microbatch))
        gpus = anchored_gpus(cost, operator, work, tp=stage.tp, precision=precision, num_units=num_units)
        wires = wires_of(cost, operator, launches, tokens, precision=precision, link=link)
        rows = [row_tiles(one) for one in tiles]
        columns = [column_tiles(one) for one in tiles]
        forward = simulate_attention(rows, launches, gpus[0], Wires(gather_s=wires.gather_s), self._kernel)
        backward = simulate_attention(columns, launches, gpus[1], wires, self._kernel)
        reasons = {"attention simulated: tiles at the rate of causal rows", "backward of attention"}
        return AttentionTime(
            forward_s=forward.makespan_s, backward_s=backward.makespan_s, unmeasured=frozenset(reasons)
        )


def _rank_tiles(routing: Routing, microbatch: Microbatch, reach: Reach) -> _RankTiles:
    """Tiles of a microbatch, cached: one object for microbatches of equal samples and owners."""
    plan = routing.plan
    kinds = tuple(row_kind(plan, row) for row in microbatch.rows)
    owners = tuple((shard.block_tokens, shard.owners) for shard in row_shards(routing, microbatch))
    num_ranks = plan.chain[microbatch.module, microbatch.replica][0].cp
    key = Identity(plan.model), Identity(plan.batch), microbatch.module, kinds, owners, num_ranks, reach
    return _TILES.get_or(key, lambda: _tiles_of(routing, microbatch, reach))


def _tiles_of(routing: Routing, microbatch: Microbatch, reach: Reach) -> _RankTiles:
    owned = owned_tokens(routing, microbatch)
    module = routing.plan.model.module(microbatch.module)
    keys = concatenate([row_mask(routing.plan, module, row) for row in microbatch.rows])
    return rank_tiles(keys, owned, reach), tuple(len(tokens) for tokens in owned)


def rank_tiles(keys: Bitfield, owned: Sequence[Ints], reach: Reach = ANY) -> tuple[Tiles, ...]:
    """The tiles of each rank's queries, in ascending packed order, against all keys within a reach."""
    queries = within(keys, reach)
    return tuple(classify(queries.take(tokens), keys, *TILE) for tokens in owned)


def anchored_gpus(
    cost: CostModel, operator: Attention, work: Work, *, tp: int, precision: str, num_units: int
) -> tuple[Gpu, Gpu]:
    """GPUs of a forward and a backward, scaled so that causal rows take the time in the profile's table.

    The causal rows have a length at which the mean query sees as many keys as in the work, and together as
    many queries as the work. `gpu_of` has the rate of a long launch, and short ones lose more than the wait
    for the last block; so all timings of a unit are scaled until whole rows on one rank take the table's
    time. Prices by the table, for one rank, and simulated ones, for several, then agree.

    Differs: no tile is faster than in the table's fastest launch, so that a bound on all attention holds for
    tiles as well; rows too short to keep all units busy cost more for it.

    Args:
        work: of the whole microbatch, on all ranks that share it, with the query-key pairs that are computed.

    Complexity: O(N log N) for a launch of N blocks; cached for rows of nearly equal length.
    """
    causal, grid = _causal(operator), Grid(tp=tp)
    keys = length_of(replace(operator, causal=True), work, grid)
    mean = max(1.0, keys - 1)  # the mean query of a causal row sees half of the row, and itself
    length = round(2.0 ** (round(log2(mean) * LENGTHS) / LENGTHS))
    num_rows = max(1, round(operator_tokens(causal, work, grid) / length))
    whole = Work((RowWork(length, length, length * (length + 1) // 2),) * num_rows)
    shape = operator.num_heads, operator.num_kv_heads, operator.head_dim
    key = Identity(cost), shape, tp, precision, num_units, length, num_rows
    return _ANCHORED.get_or(key, lambda: _anchored(cost, causal, whole, grid, precision, num_units))


def _anchored(
    cost: CostModel, causal: Attention, work: Work, grid: Grid, precision: str, num_units: int
) -> tuple[Gpu, Gpu]:
    """As `anchored_gpus`, for a work of equal causal rows."""
    length, num_rows = work.rows[0].tokens_in, len(work.rows)
    table_s, _ = cost.attention_s(causal, work, grid, precision)
    backward = ATTENTION_BACKWARD_FLOP / cost.attention_backward_rate(causal, work, grid)
    most, most_backward = cost.most_attention_flop_per_s(causal, precision)
    local = launches_of(causal, tp=grid.tp, kv_heads_per_launch=causal.num_kv_heads // grid.tp)
    launch = replace(local, heads=local.heads * num_rows)
    rows = np.arange(1.0, ceil(length / TILE[0]) + 1)
    forward = gpu_of(cost, causal, precision=precision, num_units=num_units)
    least_s = num_units * _tile_flop(causal) / most
    return (
        _taking(table_s, forward, rows, launch, least_s),
        _taking(
            table_s * backward,
            backward_gpu(cost, causal, forward),
            rows[::-1],
            launch,
            least_s * ATTENTION_BACKWARD_FLOP / most_backward,
        ),
    )


def _taking(seconds: float, gpu: Gpu, rows: Floats, launch: Launches, least_tile_s: float) -> Gpu:
    """The GPU scaled so that a launch of these rows takes `seconds`, and a tile at least `least_tile_s`."""
    now_s = simulate_attention([rows], launch, gpu, Wires(), Kernel()).makespan_s
    scale = max(seconds / now_s, least_tile_s / gpu.timing.tile_s)
    return replace(gpu, timing=gpu.timing.scaled(scale))


def gpu_of(
    cost: CostModel,
    operator: Attention,
    *,
    precision: str,
    num_units: int,
) -> Gpu:
    """A GPU that reaches the profile's attention rate when all of its units are busy, in a forward.

    A tile's time is its FLOP over the unit's share of the rate of a long causal launch. At the unit's share
    of the memory bandwidth, a block also loads its queries and stores its output, a piece of a split row
    writes its partial float32 result, and merging reads it back. Dependent kernels start the profile's
    shortest kernel apart.
    """
    causal = _causal(operator)
    seconds, _ = cost.attention_s(causal, LONG_ROW, Grid(), precision)
    rate = attention_flop(causal, LONG_ROW, Grid()) / seconds / num_units
    unit_bytes_per_s = cost.profile.memory_bytes_per_s / num_units
    row_bytes = TILE[0] * operator.head_dim
    partial_s = TILE[0] * (operator.head_dim + 1) * PARTIAL_BYTES / unit_bytes_per_s
    return Gpu(
        num_units=num_units,
        timing=UnitTiming(
            tile_s=_tile_flop(operator) / rate,
            block_s=2 * row_bytes * ELEMENT_BYTES[precision] / unit_bytes_per_s,
            partial_s=partial_s,
            merge_s=partial_s,
            launch_s=cost.profile.kernel_floor_s,
        ),
    )


def _tile_flop(operator: Attention) -> float:
    """FLOP of a full tile of one head, forward: two products."""
    return 4.0 * operator.head_dim * TILE[0] * TILE[1]


def _causal(operator: Attention) -> Attention:
    """The same heads under a causal mask, with which a machine's tables are measured."""
    return Attention(
        name=operator.name,
        num_heads=operator.num_heads,
        num_kv_heads=operator.num_kv_heads,
        head_dim=operator.head_dim,
        causal=True,
    )


def backward_gpu(cost: CostModel, operator: Attention, forward: Gpu) -> Gpu:
    """The GPU in a backward: five products instead of two, at the backward's rate of a long causal launch."""
    timing = forward.timing
    rate = cost.attention_backward_rate(_causal(operator), LONG_ROW, Grid())
    backward = replace(
        timing,
        tile_s=timing.tile_s * ATTENTION_BACKWARD_FLOP / rate,
        block_s=2 * timing.block_s,  # keys and values in, two gradients out
        partial_s=2 * timing.partial_s,
        merge_s=2 * timing.merge_s,
    )
    return replace(forward, timing=backward)


def wires_of(
    cost: CostModel,
    operator: Attention,
    launches: Launches,
    tokens_by_rank: Sequence[int],
    *,
    precision: str,
    link: Link | None,
) -> Wires:
    """Times to gather the keys and values of one launch and to reduce-scatter their float32 gradients.

    Ranks' shares are padded to the longest.

    Raises:
        ValueError: several ranks without a link.
    """
    num_ranks = len(tokens_by_rank)
    if num_ranks == 1:
        return Wires()
    if link is None:
        raise ValueError(f"gather over {num_ranks} ranks: want a link, got none")
    elements = 2.0 * max(tokens_by_rank) * num_ranks * launches.kv_heads * operator.head_dim
    size = ELEMENT_BYTES[precision]

    def seconds(kind: Collective, num_bytes: float) -> float:
        return cost.collectives.seconds(kind, num_bytes, num_ranks, link) / cost.execution.collective_rate

    return Wires(
        gather_s=seconds(Collective.ALL_GATHER, elements * size),
        scatter_s=seconds(Collective.REDUCE_SCATTER, elements * wide_sum_bytes(size)),
    )
