"""What calls of a layer take at least, by their size: of the ranks, and of those that wait for them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.collectives import Collective
from workbench.cost.execution import Execution, SavedInput
from workbench.cost.hardware import Link
from workbench.cost.kernel_times import ELEMENT_BYTES
from workbench.cost.layer_time import LayerTime
from workbench.cost.least_products import RANGES, ranges
from workbench.cost.least_time import LeastTimes
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses, kernels_of
from workbench.cost.roofline import Grid, Work, gemm_of, key_value_bytes, placed_messages
from workbench.model.experts import num_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, Matmul, Operator, TokenCount

PRICED = 16  # items of a call up to which it is priced itself


Calls = Floats
"""[kinds, 2] area and way of kinds of calls.

Area: ranks times seconds of all passes over one item. Way: seconds from the start of the forward to its end,
and through the backward, for which others wait.
"""


class _Launches(NamedTuple):
    """What kernels take beside their own time, and their launches at least: see `Execution.pass_s`."""

    gaps_s: float
    host_s: float

    @classmethod
    def of(cls, run: Execution, num_kernels: int, num_ranks: int) -> "_Launches":
        gaps_s = num_kernels * (run.kernel_gap_s or 0.0)
        host_s = run.pass_s(-gaps_s, num_kernels, 0, num_ranks)  # of a device that takes nothing
        return cls(gaps_s, host_s)

    def seconds(self, device_s: Floats) -> Floats:
        """With kernels that take so long."""
        return np.maximum(device_s + self.gaps_s, self.host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCalls:
    """Kinds of calls of a module's layers, one of which every call is of, and takes no less than.

    On one rank for each part of the tensors, up to `PRICED` items: what the cost model says of the call
    itself. With more items, or tokens shared by context-parallel ranks: by ranges of items a rank, the
    least of `LeastTimes` in the range, no less than what the host takes to launch all kernels but those of
    attention, and with what ranks send each other that nothing hides: the all-reduces of tensor-parallel
    ranks, and of keys what outlasts the attention.

    Why it holds: a rank that has the tokens of u items takes no less than the least rate of all calls with
    as many makes of them, and ranks that share tokens unevenly wait for the one with most, which has no less
    than its share. Of a range the fewest items count for the way, the most for what a call takes once.

    Args:
        machines: the device as a plan may have it run the module's layers.
        precision: of activations and weights.
        one: the work of one item.
        num_items: of the batch.
        grids: tensor-parallel degrees, with what may join so many ranks.
        num_ranks: that a call may be on at most.
        most_bytes_per_s: of keys that a rank gets of others while it gives as many of its own.
        plain: of calls on whole rows; None: all share tokens.
        cutting: of calls that may share them; None: none does.
        sums_s: what sums over tensor-parallel ranks take, as far as it is known; the device's.
    """

    machines: Sequence[CostModel]
    precision: str
    one: Work
    num_items: int
    grids: Sequence[tuple[int, Link | None]]
    num_ranks: int
    most_bytes_per_s: float
    plain: LeastTimes | None
    cutting: LeastTimes | None
    sums_s: dict[tuple[int, int, Link], float]

    def of(self, layer: Layer, needs: Needs) -> Calls:
        """Of one layer. Complexity: O((`PRICED` + log(items x ranks)) x degrees) prices of a layer."""
        found: list[Calls] = []
        if self.plain is not None:
            found.append(np.array(list(self._priced(self.plain.factor, layer, needs))))
            found += self._ranged(self.plain, layer, needs, ranges(PRICED + 1, self.num_items))
        if self.cutting is not None:
            found += self._ranged(self.cutting, layer, needs, ranges(1 / self.num_ranks, self.num_items))
        return np.concatenate(found)

    def at_best(self, layer: Layer, needs: Needs) -> Calls:
        """One call that takes no more than any, by area nor on the way."""
        times = [each.of(layer, self.one, needs) for each in (self.plain, self.cutting) if each is not None]
        way_s = min(each.way_s for each in times) / self.num_ranks
        return np.array([[min(each.all_s for each in times), way_s]])

    def among_others(self, layer: Layer, needs: Needs, tokens: Floats) -> Calls:
        """Of one layer, in calls that may have items of other sizes, of whose attention nothing is known.

        Args:
            tokens: [ranges + 1] of a rank in a call, the same for all items: they share what products take.
        """
        if not all(_is_by_rows(operator) for operator in layer.operators):
            return self.at_best(layer, needs)
        found: list[Calls] = []
        for least in (each for each in (self.plain, self.cutting) if each is not None):
            attention_s = least.of_attention(layer, self.one, needs).way_s
            parts = tokens / self.one.tokens(TokenCount.IN)
            found += self._ranged(least, layer, needs, parts, others_s=attention_s)
        return np.concatenate(found)

    def _priced(self, factor: float, layer: Layer, needs: Needs) -> Iterator[tuple[float, float]]:
        for num in range(1, min(PRICED, self.num_items) + 1):
            work = Work(self.one.rows * num)
            for tp, link in self.grids:
                for machine in self.machines if tp > 1 else self.machines[:1]:
                    time = machine.layer_time(layer, work, tp=tp, cp=1, precision=self.precision, link=link)
                    way_s, all_s = _least_passes(time, needs)
                    yield factor * tp * all_s / num, factor * way_s

    def _ranged(
        self, least: LeastTimes, layer: Layer, needs: Needs, parts: Floats, others_s: float | None = None
    ) -> Iterator[Calls]:
        """Of calls that have between two neighbouring numbers of items on a rank.

        Args:
            parts: [ranges + 1] ascending.
            others_s: what the item takes on the way that others may not; None: they are like it.
        """
        exposed_s, smallest = (
            0.0,
            min(row.tokens_in for row in self.one.rows) / self.one.tokens(TokenCount.IN),
        )
        if least is not self.plain and others_s is None:
            exposed_s = self._exposed_s(least, layer, needs)
        for tp, link in self.grids:
            times_s = least.in_calls(layer, self.one, needs, tp, parts)
            if times_s is None:
                yield self.at_best(layer, needs)
                return
            there, everything = self._launched(layer, needs, tp)
            once_s, sent = self._added_s(layer, needs, tp), self._summed(layer, needs, tp)
            few, many, (way_s, all_s) = parts[:-1], parts[1:], times_s
            summed_s = self._summed_s(few, sent, tp, link) if link is not None else 0.0
            areas_s = tp / many * everything.seconds(many / tp * (all_s + exposed_s) + summed_s + once_s)
            ways_s = there.seconds(few / tp * (way_s + exposed_s - (others_s or 0.0)) + summed_s)
            whole = smallest if least is self.plain else 0.0  # of which a call has all tokens
            yield least.factor * np.stack((areas_s, ways_s), axis=1)[many >= whole]

    def _launched(self, layer: Layer, needs: Needs, tp: int) -> tuple["_Launches", "_Launches"]:
        """Of the kernels of a call but those of attention: on the way, and all."""
        run = self.machines[0].execution
        kernels = [each for each in kernels_of(layer) if not isinstance(each, Attention)]
        there = _Launches.of(run, sum(map(run.num_kernels, kernels)), tp)
        is_whole = (
            needs.input_grad and needs.weight_grad and any(isinstance(each, Matmul) for each in kernels)
        )
        if not is_whole:  # gradients have a share of the launches of all
            return there, there
        back = _Launches.of(run, sum(map(run.num_backward_kernels, kernels)), tp)
        return there, _Launches(there.gaps_s + back.gaps_s, there.host_s + back.host_s)

    def _added_s(self, layer: Layer, needs: Needs, tp: int) -> float:
        """Of a call, however many items it has: to add gradients of weights to those of other calls."""
        machine, products = self.machines[0], [each for each in layer.operators if isinstance(each, Matmul)]
        if not needs.weight_grad or num_experts(layer):
            return 0.0
        passes = OperatorPasses(machine, Grid(tp), self.precision)
        moved = (passes.main_gradient_bytes(gemm_of(each, self.one, Grid(tp))) for each in products)
        return sum(map(machine.moved_s, moved))

    def _exposed_s(self, least: LeastTimes, layer: Layer, needs: Needs) -> float:
        """Ranks times seconds an item by which keys on their way between two ranks outlast its attention.

        Whichever way they go, each pass waits for as many as a rank has of its own.
        """
        attentions = [each for each in layer.operators if isinstance(each, Attention)]
        size = ELEMENT_BYTES[self.precision]
        moved = sum(key_value_bytes(each, self.one, Grid(), size) for each in attentions)
        rate = self.most_bytes_per_s * max(1.0, self.machines[0].execution.collective_rate)
        moved_s = (1 + needs.input_grad) * moved / rate
        return max(0.0, moved_s - least.of_attention(layer, self.one, needs).way_s)

    def _summed(self, layer: Layer, needs: Needs, tp: int) -> list[float]:
        """Bytes an item of the sums over tensor-parallel ranks that nothing hides."""
        run = self.machines[0].execution
        if max(run.overlap_pieces, run.sum_pieces) > 1:
            return []
        messages = placed_messages(layer, self.one, Grid(tp), ELEMENT_BYTES[self.precision])
        is_whole = all(each.execution.saved_input is SavedInput.WHOLE for each in self.machines)
        back = messages.backward if needs.input_grad and is_whole else ()
        return [num_bytes for _, num_bytes in (*messages.forward, *back)]

    def _summed_s(self, items: Floats, sent: Sequence[float], tp: int, link: Link) -> Floats:
        """[ranges] of so many items a rank, every sum in one piece or in halves."""
        total = np.zeros(len(items))
        for num_bytes, num in Counter(sent).items():
            octaves = np.floor(RANGES * np.log2(items * num_bytes)).astype(int).tolist()
            total += num * np.array([self._sum_s(octave, tp, link) for octave in octaves])
        return total

    def _sum_s(self, octave: int, tp: int, link: Link) -> float:
        """Of so many bytes, by their logarithm."""
        key = octave, tp, link
        if key not in self.sums_s:
            collectives, num_bytes = self.machines[0].collectives, 2.0 ** (octave / RANGES)
            whole_s, *halves_s = (
                collectives.seconds(kind, num_bytes, tp, link)
                for kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
            )
            self.sums_s[key] = min(whole_s, sum(halves_s)) / self.machines[0].execution.collective_rate
        return self.sums_s[key]


def undominated(calls: Calls) -> Calls:
    """Those than which no other takes less by area and on the way; the least by area first."""
    calls = calls[np.lexsort((calls[:, 1], calls[:, 0]))]
    before = np.minimum.accumulate(np.concatenate(([math.inf], calls[:-1, 1])))
    return calls[calls[:, 1] < before]


def _is_by_rows(operator: Operator) -> bool:
    """Whether it works on each of the tokens that enter, once."""
    return operator.tokens is TokenCount.IN and getattr(operator, "tokens_scale", 1.0) == 1.0


def _least_passes(time: LayerTime, needs: Needs) -> tuple[float, float]:
    """Seconds on the way, and of all passes, whichever of them are split or keep nothing."""
    forward_s = min(time.forward_s, time.forward_without_graph_s())
    through_s, split_s = time.through_s(needs), time.split_through_s(needs)
    way_s = forward_s + min(through_s, split_s)
    return way_s, forward_s + min(through_s + time.weights_s(needs), split_s + time.split_weights_s(needs))
