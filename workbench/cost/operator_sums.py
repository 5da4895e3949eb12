"""Estimates a layer that was not measured as it runs, as the sum of its operators and collectives."""

from dataclasses import replace
from typing import NamedTuple

from workbench.cost.collectives import Collective, Collectives
from workbench.cost.execution import (
    ActivationCut,
    KeyTravel,
    TokenCopies,
    TokenTravel,
)
from workbench.cost.expert_parallel import ExpertExchange, copies_share, exchanges_of, in_turn_share, on_rank
from workbench.cost.group_link import GroupLink
from workbench.cost.hardware import Link
from workbench.cost.kernel_times import ELEMENT_BYTES, KernelTimes
from workbench.cost.layer_time import LayerTime
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.overlap import Machine, Pair, Pairs, added_kernels, exposed_s, pairs_of, pieces_of
from workbench.cost.overlapped_collectives import left_s, lost_s
from workbench.cost.profile import Direction
from workbench.cost.roofline import (
    Grid,
    Work,
    key_value_bytes,
    layer_flop,
    wide_sum_bytes,
)
from workbench.cost.sustained import in_direction
from workbench.float_sum import float_sum
from workbench.model.layer import Attention, Layer


class Links(NamedTuple):
    """The links between ranks of a grid along each axis; None where the axis has one rank."""

    tensor: Link | None
    context: Link | None
    experts: Link | None


class OperatorSums:
    """Adds up a layer's operators and collectives, with the reasons why the sum may be off."""

    def __init__(
        self,
        cost: KernelTimes,
        collectives: Collectives,
        operators: OperatorPasses,
        work: Work,
        grid: Grid,
        precision: str,
        links: Links,
    ) -> None:
        self._cost, self._collectives, self._links = cost, collectives, links
        self._work, self._grid, self._precision = work, grid, precision
        self._bytes = ELEMENT_BYTES[precision]
        self.unmeasured: set[str] = set()
        self._operators = operators

    def layer(self, layer: Layer) -> LayerTime:
        """The time of a layer as a rank of the grid runs it."""
        kernels, operators = self._operators.prepared(layer), self._operators.of_layer(layer, self._work)
        pairs = self._pairs(layer)
        forward_comm, backward_comm = self._communication(layer, pairs)
        inside = zip(operators, kernels.is_interior, strict=True)
        interior = float_sum([passes.input_grad_s for passes, is_inside in inside if is_inside])
        interior += float_sum([seconds for index, seconds in backward_comm if index > kernels.first])
        time = LayerTime(
            float_sum([passes.forward_s for passes in operators]) + forward_comm,
            float_sum([passes.input_grad_s for passes in operators])
            + float_sum([seconds for _, seconds in backward_comm]),
            float_sum([passes.weight_grad_s for passes in operators]),
            frozenset(self.unmeasured).union(*[passes.unmeasured for passes in operators]),
            interior,
        )
        return self._launched(time, layer, pairs)

    def with_experts(self, time: LayerTime, layer: Layer) -> LayerTime:
        """The time with experts distributed, from a measurement on the grid with ep = 1."""
        grid = self._grid
        split = on_rank(layer, self._work, grid)
        share = layer_flop(split, self._work, grid) / layer_flop(layer, self._work, grid._replace(ep=1))
        scaled = f"ep{grid.ep} scaled from ep1"
        return self._shared(time, share, *self._exchanges_s(split), scaled)

    def scaled(self, time: LayerTime, layer: Layer) -> LayerTime:
        """The time on the grid from a measurement on one rank: scaled by FLOP, plus the collectives."""
        grid = self._grid
        split = on_rank(layer, self._work, grid)
        whole = layer_flop(layer, self._work)
        share = layer_flop(split, self._work, grid) / whole if whole else 1.0 / grid.cp
        scaled = f"tp{grid.tp} x cp{grid.cp} scaled from one rank"
        return self._shared(time, share, *self._communication(split, self._pairs(split)), scaled)

    def with_adapters(self, time: LayerTime, layer: Layer) -> LayerTime:
        """The time of a layer with adapters, from a measurement of the layer without them."""
        kernels = [each for each in self._operators.prepared(layer).kernels if each.is_trained]
        passes = [self._operators.of_kernel(each, self._work) for each in kernels]
        run, tp = self._cost.execution, self._grid.tp
        num_forward = sum(run.num_kernels(each.operator) for each in kernels)
        num_backward = sum(run.num_backward_kernels(each.operator) for each in kernels)
        forward_s = run.pass_s(float_sum(each.forward_s for each in passes), num_forward, 0, tp)
        through_s = float_sum(each.input_grad_s for each in passes)
        weights_s = float_sum(each.weight_grad_s for each in passes)
        stretch = run.pass_s(through_s + weights_s, num_backward, 0, tp) / (through_s + weights_s)
        return LayerTime(
            time.forward_s + forward_s,
            time.input_grad_s + stretch * through_s,
            stretch * weights_s,
            time.unmeasured.union({"adapters: added to the layer's time"}, *[p.unmeasured for p in passes]),
            time.interior_grad_s + stretch * through_s,
            None if time.forward_only_s is None else time.forward_only_s + forward_s,
            checkpoint=time.checkpoint,
        )

    def _shared(
        self, time: LayerTime, share: float, forward_s: float, backward: list[tuple[int, float]], scaled: str
    ) -> LayerTime:
        """A share of a time, plus the collectives of its forward and backward."""
        backward_s = float_sum(seconds for _, seconds in backward)
        return LayerTime(
            time.forward_s * share + forward_s,
            time.input_grad_s * share + backward_s,
            time.weight_grad_s * share,
            time.unmeasured | self.unmeasured | {scaled},
            time.interior_grad_s * share + backward_s,
        )

    def _launched(self, time: LayerTime, layer: Layer, pairs: Pairs) -> LayerTime:
        """The time with gaps between kernels, at least that of the host's launches.

        Gaps and a slow host stretch I and W by the same factor.
        """
        run, grid = self._cost.execution, self._grid
        kernels = self._operators.prepared(layer)
        forward, backward = pairs.forward, [pair for _, pair in pairs.backward]
        more = added_kernels(forward, run) + kernels.num_casts.forward
        forward_s = run.pass_s(time.forward_s, kernels.num_forward, len(forward), grid.tp, more)
        device_s = time.input_grad_s + time.weight_grad_s
        more = added_kernels(backward, run) + kernels.num_casts.backward
        backward_s = run.pass_s(device_s, kernels.num_backward, len(backward), grid.tp, more)
        if kernels.waits:
            forward_s, backward_s = forward_s + run.host_wait_s, backward_s + run.host_wait_s
        if device_s in (0.0, backward_s):
            return replace(time, forward_s=forward_s)
        return replace(
            time,
            forward_s=forward_s,
            input_grad_s=time.input_grad_s * (backward_s / device_s),
            weight_grad_s=time.weight_grad_s * (backward_s / device_s),
            interior_grad_s=time.interior_grad_s * (backward_s / device_s),
        )

    def _communication(self, layer: Layer, pairs: Pairs) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of collectives: of the forward, and (operator, seconds) of the backward."""
        grid, links = self._grid, self._links
        if links.tensor is None or links.context is None:
            return 0.0, []
        forward_s = float_sum(
            self._exposed_s(pair, links.tensor, Direction.FORWARD) for pair in pairs.forward
        )
        backward = [
            (index, self._exposed_s(pair, links.tensor, Direction.INPUT_GRAD))
            for index, pair in pairs.backward
        ]
        for index, operator in enumerate(layer.operators):
            if grid.cp > 1 and isinstance(operator, Attention):
                there_s, back_s = self._keys_s(operator, links.context)
                forward_s += there_s
                backward.append((index, back_s))
        there_s, back = self._exchanges_s(layer)
        return forward_s + there_s, backward + back

    def _exchanges_s(self, split: Layer) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of the exchanges around distributed experts, as `_communication`."""
        divided = self._cost.execution.activations is ActivationCut.SEQUENCE
        exchanges = exchanges_of(split, self._work, self._grid, self._bytes, divided=divided)
        backward = [(index, self._exchange_s(exchange)) for index, exchange in exchanges.backward]
        forward_s = float_sum(map(self._exchange_s, exchanges.forward))
        if self._cost.execution.tokens is TokenTravel.AHEAD or not backward:
            return forward_s, backward
        return self._alternating(split, forward_s, backward)

    def _alternating(
        self, split: Layer, exchange_s: float, back: list[tuple[int, float]]
    ) -> tuple[float, list[tuple[int, float]]]:
        """Seconds that exchanges add where two microbatches alternate.

        One exchanges while the other computes as much as this layer does, and is slowed down.
        """
        passes = self._operators.of_layer(split, self._work)
        self.unmeasured.update(*(operator_passes.unmeasured for operator_passes in passes))
        forward_s = float_sum(operator_passes.forward_s for operator_passes in passes)
        backward_s = float_sum(
            operator_passes.input_grad_s + operator_passes.weight_grad_s for operator_passes in passes
        )
        back_s = float_sum(seconds for _, seconds in back)
        share = left_s(back_s, backward_s) / back_s
        return left_s(exchange_s, forward_s), [(index, share * seconds) for index, seconds in back]

    def _exchange_s(self, exchange: ExpertExchange) -> float:
        link = self._links.experts if exchange.kind is Collective.ALL_TO_ALL else self._links.tensor
        assert link is not None, "a grid of several ranks has links"
        if exchange.kind is Collective.ALL_TO_ALL:
            if self._cost.execution.copies is not TokenCopies.NEIGHBOURS:
                self.unmeasured.add("experts: tokens choose them at random")
            if exchange.num_chosen and self._cost.execution.copies is not TokenCopies.EACH:
                return self._deduplicated_s(exchange, link)
        seconds = self._collective_s(exchange.kind, exchange.num_bytes, exchange.num_ranks, link)
        return seconds + self._sorted_s(exchange)

    def _sorted_s(self, rows: ExpertExchange) -> float:
        """Seconds to sort received rows from sender order to expert order, or the reverse.

        Source: Megatron-Core, `sort_chunks_by_idxs` of `MoEAlltoAllTokenDispatcher`.
        """
        has_several = rows.num_experts > rows.num_ranks
        return self._cost.moved_s(2 * rows.num_bytes) if has_several else 0.0

    def _deduplicated_s(self, rows: ExpertExchange, link: Link) -> float:
        """Seconds of tokens that are sent once to a node and then once to each rank in it."""
        is_in_turn = self._cost.execution.copies is TokenCopies.NEIGHBOURS
        share = in_turn_share if is_in_turn else copies_share

        def shared_bytes(num_places: int) -> float:
            return rows.num_bytes * share(num_places, rows.num_experts, rows.num_chosen)

        inside_bytes = shared_bytes(rows.num_ranks)
        if not isinstance(link, GroupLink):
            return self._collective_s(rows.kind, inside_bytes, rows.num_ranks, link)
        between_s = self._collective_s(rows.kind, shared_bytes(link.num_nodes), rows.num_ranks, link)
        return between_s + self._collective_s(rows.kind, inside_bytes, link.members, link.near)

    def _pairs(self, layer: Layer) -> Pairs:
        """Tensor-parallel collectives with their products; halves of all-reduces if ranks divide tokens."""
        run = self._cost.execution
        return pairs_of(layer, self._work, self._grid, self._bytes, run.activations, run.saved_input)

    def _exposed_s(self, pair: Pair, link: Link, direction: Direction) -> float:
        cost, precision, run = self._cost, self._precision, self._cost.execution
        is_apart = run.overlap_pieces > 1  # on copy engines that slow no product
        machine = Machine(  # `in_direction` is an involution: products of pairs are turned already
            product_s=lambda gemm: cost.product_s(in_direction(gemm, direction), direction, precision)[0],
            weights_s=lambda gemm: cost.product_s(gemm, Direction.WEIGHT_GRAD, precision)[0],
            collective_s=lambda kind, num_bytes: self._collective_s(kind, num_bytes, self._grid.tp, link),
            copied_s=lambda elements: self._cost.moved_s(2 * elements * self._bytes),
            lost_s=(lambda there_s, here_s: 0.0) if is_apart else lost_s,
        )
        return exposed_s(pair, pieces_of(pair, run), machine)

    def _keys_s(self, operator: Attention, link: Link) -> tuple[float, float]:
        """Exposed seconds of exchanging keys and their gradients in an attention's forward and backward.

        A rank keeps only its own keys, so a backward fetches the others' again.
        """
        grid, is_ahead = self._grid, self._cost.execution.keys is KeyTravel.AHEAD
        gathered = key_value_bytes(operator, self._work, grid, self._bytes)
        if not gathered:
            return 0.0, 0.0
        sum_bytes = wide_sum_bytes(self._bytes) if is_ahead else self._bytes
        summed = key_value_bytes(operator, self._work, grid, sum_bytes)
        if is_ahead or not isinstance(link, GroupLink):
            there_s = self._collective_s(Collective.ALL_GATHER, gathered, grid.cp, link)
            back_s = self._collective_s(Collective.REDUCE_SCATTER, summed, grid.cp, link)
        else:
            there_s, back_s = self._passed_on_s(gathered, link), self._passed_on_s(summed, link)
        if is_ahead:
            return there_s, there_s + back_s
        passes = self._operators.of(operator, self._work)
        self.unmeasured |= passes.unmeasured
        behind = (grid.cp - 1) / grid.cp  # the first block of keys is a rank's own
        return (
            max(0.0, there_s - behind * passes.forward_s),
            max(0.0, there_s + back_s - behind * passes.input_grad_s),
        )

    def _passed_on_s(self, num_bytes: float, link: GroupLink) -> float:
        """Seconds of passing all ranks' blocks around a ring over nodes: each step waits for the ranks that
        send out of a node, one of the group over one card, where a collective would use all its cards.
        """
        self.unmeasured.add("collectives inside a layer: ring formula")
        block_s = link.latency_s + num_bytes / self._grid.cp / link.neighbour_bytes_per_s
        return (self._grid.cp - 1) * block_s / self._cost.execution.collective_rate

    def _collective_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        if basis := self._collectives.basis(kind, num_ranks, link):
            self.unmeasured.add(f"collectives inside a layer: {basis}")
        return (
            self._collectives.seconds(kind, num_bytes, num_ranks, link) / self._cost.execution.collective_rate
        )
