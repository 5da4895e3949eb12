"""Lower bounds on calls of a layer by their size: on the ranks' seconds, and on the critical path's."""

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
from workbench.cost.least_time import LeastTimes, bare
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses, kernels_of
from workbench.cost.roofline import Grid, Work, gemm_of, key_value_bytes, placed_messages
from workbench.float_sum import float_sum
from workbench.model.experts import num_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, Matmul, Operator, TokenCount

PRICED = 16  # items up to which a call is priced exactly


Calls = Floats
"""[kinds, 2] area and path of kinds of calls.

Area: ranks times seconds of all passes over one item. Path: seconds of the forward and through the backward,
which others wait for.
"""


class _Launches(NamedTuple):
    """Seconds of gaps between kernels, and a lower bound on their launches: see `Execution.pass_s`."""

    gaps_s: float
    host_s: float

    @classmethod
    def of(cls, run: Execution, num_kernels: int, num_ranks: int) -> "_Launches":
        gaps_s = num_kernels * (run.kernel_gap_s or 0.0)
        host_s = run.pass_s(-gaps_s, num_kernels, 0, num_ranks)  # of a device that takes no time
        return cls(gaps_s, host_s)

    def seconds(self, device_s: Floats) -> Floats:
        """Seconds of a pass whose kernels take `device_s`."""
        return np.maximum(device_s + self.gaps_s, self.host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCalls:
    """Kinds of calls of a module's layers with lower bounds; every call belongs to one kind.

    Without context parallelism, calls of up to `PRICED` items have the cost model's own price. Others are
    bounded by ranges of items a rank: by `LeastTimes` in the range, by the host's launches of all kernels
    but attention's, and by exposed communication: all-reduces of tensor-parallel ranks, and exchanges of
    keys that outlast the attention.

    Why it holds: a rank with the tokens of u items takes at least the minimum over all calls with as many
    tokens, and ranks that share tokens unevenly wait for the one with most, which has at least the mean. In
    a range the fewest items count for the path, the most for what a call takes once.

    Args:
        machines: cost models of the device, for each way a plan may run the module's layers.
        precision: of activations and weights.
        one: the work of one item.
        num_items: items of the batch.
        grids: tensor-parallel degrees, each with the link that may join the ranks.
        num_ranks: most ranks of a call.
        most_bytes_per_s: highest rate at which a rank receives keys while it sends its own.
        plain: bounds for calls on whole rows; None: all calls share tokens.
        cutting: bounds for calls that may share tokens; None: none does.
        sums_s: cache of the seconds of sums over tensor-parallel ranks, shared on a device.
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
        """Bounds for one layer.

        Complexity: O((`PRICED` + log(items x ranks)) x degrees) prices of a layer.
        """
        calls: list[Calls] = []
        if self.plain is not None:
            calls.append(np.array(list(self._priced(self.plain.factor, layer, needs))))
            calls += self._ranged(self.plain, layer, needs, ranges(PRICED + 1, self.num_items))
        if self.cutting is not None:
            calls += self._ranged(self.cutting, layer, needs, ranges(1 / self.num_ranks, self.num_items))
        return np.concatenate(calls)

    def at_best(self, layer: Layer, needs: Needs) -> Calls:
        """One kind of call whose area and path are lower bounds for all calls."""
        times = [
            least.of(layer, self.one, needs) for least in (self.plain, self.cutting) if least is not None
        ]
        path_s = min(least.way_s for least in times) / self.num_ranks
        return np.array([[min(least.all_s for least in times), path_s]])

    def among_others(self, layer: Layer, needs: Needs, tokens: Floats) -> Calls:
        """Bounds for one layer in calls with items of other sizes, whose attention is unknown.

        Args:
            tokens: [ranges + 1] tokens of a rank in a call, the same for all items, which share products.
        """
        if not all(_is_by_rows(operator) for operator in layer.operators):
            return self.at_best(layer, needs)
        calls: list[Calls] = []
        for least in (each for each in (self.plain, self.cutting) if each is not None):
            attention_s = least.of_attention(layer, self.one, needs).way_s
            parts = tokens / self.one.tokens(TokenCount.IN)
            calls += self._ranged(least, layer, needs, parts, others_s=attention_s)
        return np.concatenate(calls)

    def _priced(self, factor: float, layer: Layer, needs: Needs) -> Iterator[tuple[float, float]]:
        for num in range(1, min(PRICED, self.num_items) + 1):
            work = Work(self.one.rows * num)
            for tp, link in self.grids:
                for machine in self.machines if tp > 1 else self.machines[:1]:
                    time = machine.layer_time(layer, work, tp=tp, cp=1, precision=self.precision, link=link)
                    path_s, all_s = _least_passes(time, needs)
                    yield factor * tp * all_s / num, factor * path_s

    def _ranged(
        self, least: LeastTimes, layer: Layer, needs: Needs, parts: Floats, others_s: float | None = None
    ) -> Iterator[Calls]:
        """Yield bounds for calls with between two neighbouring numbers of items on a rank.

        Args:
            parts: [ranges + 1] items of a rank, ascending.
            others_s: the part of the item's path that other items may not have; None: they are alike.
        """
        layer, needs = bare(layer, needs)
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
            on_path, all_passes = self._launched(layer, needs, tp)
            once_s, sent = self._added_s(layer, needs, tp), self._summed(layer, needs, tp)
            fewest, most, (path_s, all_s) = parts[:-1], parts[1:], times_s
            summed_s = self._summed_s(fewest, sent, tp, link) if link is not None else 0.0
            areas_s = tp / most * all_passes.seconds(most / tp * (all_s + exposed_s) + summed_s + once_s)
            paths_s = on_path.seconds(fewest / tp * (path_s + exposed_s - (others_s or 0.0)) + summed_s)
            whole = smallest if least is self.plain else 0.0  # a call has all tokens of an item
            yield least.factor * np.stack((areas_s, paths_s), axis=1)[most >= whole]

    def _launched(self, layer: Layer, needs: Needs, tp: int) -> tuple["_Launches", "_Launches"]:
        """Launches of a call's kernels without attention's: on the path, and in all."""
        run = self.machines[0].execution
        kernels = [kernel for kernel in kernels_of(layer) if not isinstance(kernel, Attention)]
        on_path = _Launches.of(run, sum(map(run.num_kernels, kernels)), tp)
        is_whole = (
            needs.input_grad and needs.weight_grad and any(isinstance(kernel, Matmul) for kernel in kernels)
        )
        if not is_whole:  # gradients have a share of all launches
            return on_path, on_path
        backward = _Launches.of(run, sum(map(run.num_backward_kernels, kernels)), tp)
        return on_path, _Launches(on_path.gaps_s + backward.gaps_s, on_path.host_s + backward.host_s)

    def _added_s(self, layer: Layer, needs: Needs, tp: int) -> float:
        """Seconds of a call of any size to add its weight gradients to those of other calls."""
        machine, products = self.machines[0], [each for each in layer.operators if isinstance(each, Matmul)]
        if not needs.weight_grad or num_experts(layer):
            return 0.0
        passes = OperatorPasses(machine, Grid(tp), self.precision)
        moved = (passes.main_gradient_bytes(gemm_of(each, self.one, Grid(tp))) for each in products)
        return float_sum(map(machine.moved_s, moved))

    def _exposed_s(self, least: LeastTimes, layer: Layer, needs: Needs) -> float:
        """Ranks times seconds an item by which the exchange of keys between two ranks outlasts its attention.

        However keys are exchanged, each pass waits for as many as a rank has itself.
        """
        attentions = [each for each in layer.operators if isinstance(each, Attention)]
        size = ELEMENT_BYTES[self.precision]
        moved = float_sum(key_value_bytes(each, self.one, Grid(), size) for each in attentions)
        rate = self.most_bytes_per_s * max(1.0, self.machines[0].execution.collective_rate)
        moved_s = (1 + needs.input_grad) * moved / rate
        return max(0.0, moved_s - least.of_attention(layer, self.one, needs).way_s)

    def _summed(self, layer: Layer, needs: Needs, tp: int) -> list[float]:
        """Bytes an item of the exposed sums over tensor-parallel ranks."""
        run = self.machines[0].execution
        if max(run.overlap_pieces, run.sum_pieces) > 1:
            return []
        messages = placed_messages(layer, self.one, Grid(tp), ELEMENT_BYTES[self.precision])
        is_whole = all(each.execution.saved_input is SavedInput.WHOLE for each in self.machines)
        backward = messages.backward if needs.input_grad and is_whole else ()
        return [num_bytes for _, num_bytes in (*messages.forward, *backward)]

    def _summed_s(self, items: Floats, sent: Sequence[float], tp: int, link: Link) -> Floats:
        """[ranges] seconds of the sums of so many items a rank, each as an all-reduce or as two halves."""
        total = np.zeros(len(items))
        for num_bytes, num in Counter(sent).items():
            octaves = np.floor(RANGES * np.log2(items * num_bytes)).astype(int).tolist()
            total += num * np.array([self._sum_s(octave, tp, link) for octave in octaves])
        return total

    def _sum_s(self, octave: int, tp: int, link: Link) -> float:
        """Seconds of a sum, by the logarithm of its bytes."""
        key = octave, tp, link
        if key not in self.sums_s:
            collectives, num_bytes = self.machines[0].collectives, 2.0 ** (octave / RANGES)
            whole_s, *halves_s = (
                collectives.seconds(kind, num_bytes, tp, link)
                for kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
            )
            self.sums_s[key] = min(whole_s, float_sum(halves_s)) / self.machines[0].execution.collective_rate
        return self.sums_s[key]


def undominated(calls: Calls) -> Calls:
    """The Pareto front of calls by area and path, ascending by area."""
    calls = calls[np.lexsort((calls[:, 1], calls[:, 0]))]
    before = np.minimum.accumulate(np.concatenate(([math.inf], calls[:-1, 1])))
    return calls[calls[:, 1] < before]


def _is_by_rows(operator: Operator) -> bool:
    """Whether it works once on each token that enters."""
    return operator.tokens is TokenCount.IN and getattr(operator, "tokens_scale", 1.0) == 1.0


def _least_passes(time: LayerTime, needs: Needs) -> tuple[float, float]:
    """Lower bounds on the path's seconds and on all passes', whether they are split or keep nothing."""
    forward_s = min(time.forward_s, time.forward_without_graph_s())
    through_s, split_s = time.through_s(needs), time.split_through_s(needs)
    path_s = forward_s + min(through_s, split_s)
    return path_s, forward_s + min(through_s + time.weights_s(needs), split_s + time.split_weights_s(needs))
