"""Times of ring attention and of all-to-all attention."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.roofline import RowWork, Work, wide_sum_bytes
from workbench.float_sum import float_sum
from workbench.masks.bitfield import concatenate
from workbench.masks.tiles import area
from workbench.model.layer import Attention, Layer, LayerKind, TokenCount
from workbench.model.reach import Reach
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import KeyExchange, Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import owned_tokens, row_shards
from workbench.plan.work import row_kinds, row_mask, within
from workbench.timing.attention import AttentionCall, AttentionModel, AttentionTime, identity_of
from workbench.timing.grid_links import grid_links, neighbour_link


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Tokens of every rank, and query-key pairs [rank of queries][rank of keys]."""

    tokens: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]


_BLOCKS: LruCache[_Blocks] = LruCache(16_384)
_TIMES: LruCache[AttentionTime] = LruCache(16_384)


def with_key_exchange(inner: AttentionModel | None, plan: Plan, cost: CostModel) -> AttentionModel | None:
    """Return the model of attention times, extended to modules with ring or all-to-all attention."""
    kinds = {plan.settings.of(stage.module).key_exchange for stage in plan.stages if stage.cp > 1}
    return inner if kinds <= {KeyExchange.ALL_GATHER} else ExchangedAttention(plan, cost, inner)


class ExchangedAttention:
    """An `AttentionModel` of ring and all-to-all attention; `inner` prices everything else.

    Ring: as many steps as ranks, each as long as its slowest rank's block of query-key pairs or
    the concurrent transfer of the next block; gradients travel after each step of a backward.
    All-to-all: all tokens of a part of the heads, and four collectives in each pass: of queries, keys, values
    and outputs.

    Differs: steps are in lockstep; real ranks wait for their slow neighbour alone.
    """

    def __init__(self, plan: Plan, cost: CostModel, inner: AttentionModel | None) -> None:
        self._plan, self._cost, self._inner = plan, cost, inner
        self._routing = routing_of(plan)
        self._block_cache: dict[tuple[object, ...], _Blocks] = {}
        self._apart: ExchangedAttention | None = None

    @property
    def identity(self) -> Hashable | None:
        """See `identity_of`; the cost model is the one that the whole plan is priced with."""
        inner = identity_of(self._inner)
        return None if inner is None else ("exchanged", inner)

    def __call__(self, call: AttentionCall) -> AttentionTime | None:
        if call.plan is not self._plan:
            return self._of_replicas_apart(call.plan)(call)
        kind = call.plan.settings.of(call.stage.module).key_exchange
        if call.stage.cp == 1 or kind is KeyExchange.ALL_GATHER:
            return None if self._inner is None else self._inner(call)
        if call.operator.num_keys is not None or call.operator.tokens is not TokenCount.IN:
            return None
        cost = self._cost_of(call)
        blocks = self._blocks(call.microbatch, call.reach(cost))
        seconds_of = self._ring if kind is KeyExchange.RING else self._all_to_all
        links = (
            grid_links(call.plan.cluster, call.stage).context,
            neighbour_link(call.plan.cluster, call.stage),
        )
        machine = Identity(cost), links
        sizes = call.stage.tp, call.plan.settings.precision
        key = Identity(blocks), kind, call.operator, machine, sizes
        return _TIMES.get_or(key, lambda: seconds_of(call, blocks))

    def _of_replicas_apart(self, plan: Plan) -> "ExchangedAttention":
        """Return the model of the plan whose replicas are those that are joint in this one's."""
        if self._apart is None or self._apart._plan is not plan:
            self._apart = ExchangedAttention(plan, self._cost, self._inner)
        return self._apart

    def _ring(self, call: AttentionCall, blocks: _Blocks) -> AttentionTime:
        num_ranks, most_tokens = len(blocks.tokens), max(blocks.tokens)
        elements = 2.0 * most_tokens * _local(call, call.operator.num_kv_heads) * call.operator.head_dim
        move_s = self._moved_s(call, elements * self._element_bytes)
        sums_s = self._moved_s(call, elements * wide_sum_bytes(self._element_bytes))
        forward_s = backward_s = 0.0
        for step in range(num_ranks):
            each_s = [
                self._compute_s(call, call.operator, tokens, blocks.pairs[r][(r - step) % num_ranks])
                for r, tokens in enumerate(blocks.tokens)
            ]
            hidden_s = move_s if step + 1 < num_ranks else 0.0
            forward_s += max(hidden_s, *(forward for forward, _ in each_s))
            backward_s += max(hidden_s, *(backward for _, backward in each_s)) + sums_s
        return _time(forward_s, backward_s, "ring attention: steps of the slowest rank, blocks over one link")

    def _all_to_all(self, call: AttentionCall, blocks: _Blocks) -> AttentionTime:
        operator, num_ranks = call.operator, len(blocks.tokens)
        part = replace(
            operator,
            num_heads=operator.num_heads // num_ranks,
            num_kv_heads=operator.num_kv_heads // num_ranks,
        )
        pairs = sum(map(sum, blocks.pairs))
        forward_s, backward_s = self._compute_s(call, part, sum(blocks.tokens), pairs)
        element_bytes = self._element_bytes * operator.head_dim * max(blocks.tokens)
        moved_s = 2 * float_sum(
            self._exchanged_s(call, _local(call, heads) * element_bytes)
            for heads in (operator.num_heads, operator.num_kv_heads)
        )
        why = "all-to-all attention: whole rows of some heads"
        return _time(forward_s + moved_s, backward_s + moved_s, why)

    def _cost_of(self, call: AttentionCall) -> CostModel:
        return self._cost.on(call.plan.cluster.device_of(call.stage.flat_ranks))

    def _exchanged_s(self, call: AttentionCall, num_bytes: float) -> float:
        """Return the seconds of an all-to-all of that many bytes per rank."""
        link = grid_links(call.plan.cluster, call.stage).context
        assert link is not None, "context-parallel ranks have a link"
        cost = self._cost_of(call)
        seconds = cost.collectives.seconds(Collective.ALL_TO_ALL, num_bytes, call.stage.cp, link)
        return seconds / cost.execution.collective_rate

    def _blocks(self, microbatch: Microbatch, reach: Reach) -> _Blocks:
        """Return the blocks of a microbatch; equal samples with equal owners share one object."""
        name = (microbatch.module, microbatch.replica, microbatch.index, reach)
        if name not in self._block_cache:
            plan = self._plan
            kinds = row_kinds(plan, microbatch)
            owners = tuple(
                (shard.block_tokens, shard.owners) for shard in row_shards(self._routing, microbatch)
            )
            num_ranks = plan.chain[microbatch.module, microbatch.replica][0].cp
            key = (
                Identity(plan.model),
                Identity(plan.batch),
                microbatch.module,
                kinds,
                owners,
                num_ranks,
                reach,
            )
            self._block_cache[name] = _BLOCKS.get_or(key, lambda: self._count_pairs(microbatch, reach))
        return self._block_cache[name]

    def _count_pairs(self, microbatch: Microbatch, reach: Reach) -> _Blocks:
        module = self._plan.model.module(microbatch.module)
        mask = concatenate([row_mask(self._plan, module, row) for row in microbatch.rows])
        limited, owned = within(mask, reach), owned_tokens(self._routing, microbatch)
        keys = [mask.take(indices) for indices in owned]
        return _Blocks(
            tokens=tuple(len(field) for field in keys),
            pairs=tuple(tuple(area(limited.take(indices), field) for field in keys) for indices in owned),
        )

    def _compute_s(
        self, call: AttentionCall, operator: Attention, num_tokens: int, pairs: int
    ) -> tuple[float, float]:
        """Return the seconds of a forward and a backward of the operator alone on one rank."""
        if not pairs:
            return 0.0, 0.0
        alone = Layer(name=operator.name, kind=LayerKind.BLOCK, operators=(operator,), out_width=1)
        work = Work((RowWork(num_tokens, num_tokens, pairs),))
        precision = call.plan.settings.precision
        cost = self._cost_of(call)
        time = cost.layer_time(alone, work, tp=call.stage.tp, cp=1, precision=precision)
        return time.forward_s, time.input_grad_s

    @property
    def _element_bytes(self) -> int:
        return self._plan.settings.precision.num_bytes

    def _moved_s(self, call: AttentionCall, num_bytes: float) -> float:
        link = neighbour_link(call.plan.cluster, call.stage)
        cost = self._cost_of(call)
        return (link.latency_s + num_bytes / link.bytes_per_s) / cost.execution.collective_rate


def _local(call: AttentionCall, heads: int) -> float:
    return heads / call.stage.tp


def _time(forward_s: float, backward_s: float, why: str) -> AttentionTime:
    return AttentionTime(forward_s=forward_s, backward_s=backward_s, unmeasured=frozenset({why}))
