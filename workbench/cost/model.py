"""The cost model: seconds of one layer on one machine, of its forward and each gradient."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.cost.collectives import Collective, Collectives
from workbench.cost.execution import (
    ActivationCut,
    Execution,
    GradientSum,
    SavedInput,
)
from workbench.cost.expert_parallel import on_rank
from workbench.cost.hardware import Link
from workbench.cost.kernel_times import ELEMENT_BYTES, KernelTimes
from workbench.cost.layer_time import LayerTime, unmeasured_of
from workbench.cost.least_products import LeastProducts
from workbench.cost.measured import MeasuredLayer, from_measured, in_one_piece
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.operator_sums import Links, OperatorSums
from workbench.cost.products import BFLOAT16_BYTES, ProductFormat, is_narrowed
from workbench.cost.profile import Profile
from workbench.cost.roofline import (
    Grid,
    RowWork,
    Work,
)
from workbench.cost.signature import Signatures
from workbench.model.expert_load import with_load_cv
from workbench.model.experts import num_experts
from workbench.model.layer import Layer, TokenCount
from workbench.model.trained import without_adapters

__all__ = ["CostModel", "LayerTime", "RowWork", "Work", "unmeasured_of"]


class _ExpertParallel(NamedTuple):
    """The degree of expert parallelism, and its ranks' link; None: the tensor-parallel ranks' link."""

    ep: int = 1
    link: Link | None = None


class CostModel(KernelTimes):
    """Times of layers on the machine of one profile.

    A layer that the profile measured whole is interpolated from its rows; any other is the sum of its
    operators, each read from the tables of matmuls, attention and memory-bound kernels. An execution changes
    the sums of operators, but not the times of layers measured whole.

    Args:
        profile: the machine.
        execution: how layers run; None: the default.
        beside: models of other kinds of devices by name, for clusters of several kinds.
    """

    def __init__(
        self,
        profile: Profile,
        execution: Execution | None = None,
        beside: Mapping[str, "CostModel"] | None = None,
    ) -> None:
        super().__init__(profile, execution)
        self.beside = dict(beside or {})
        self.collectives = Collectives(profile)
        self._layers = {
            (
                table.signature,
                table.precision,
                Grid(table.tp, table.cp, table.ep),
                table.sequence_parallel,
            ): MeasuredLayer(table)
            for table in profile.layers
        }
        self._known: dict[tuple[object, ...], LayerTime] = {}
        self._operators: dict[tuple[Grid, str], OperatorPasses] = {}
        self._signatures = Signatures()
        self._experts = _ExpertParallel()
        self._variants: dict[object, CostModel] = {}
        self._least_products: dict[str, LeastProducts] = {}

    def on(self, device: str) -> "CostModel":
        """The model of a kind of device; this one where `beside` has none of that name."""
        return self.beside.get(device, self)

    def executed(self, execution: Execution) -> "CostModel":
        """The same machine under another execution; tables are shared."""
        other = self._copied()
        other.execution = execution.on(self.profile)
        other.beside = {device: model.executed(execution) for device, model in self.beside.items()}
        return other

    def with_expert_parallel(self, ep: int, link: Link | None = None) -> "CostModel":
        """The same machine with experts distributed over `ep` ranks of a grid; times are the busiest rank's.

        `link` joins these ranks; None: the link of tensor-parallel ones.
        """
        experts = _ExpertParallel(ep, link)
        if ep == 1 or experts == self._experts:
            return self
        if experts not in self._variants:
            other = self._variants[experts] = self._copied()
            other._experts = experts
        return self._variants[experts]

    def dividing_tokens(self, saved_input: SavedInput | None = None) -> "CostModel":
        """The same machine where tensor-parallel ranks split tokens between products.

        `saved_input`: what these keep of gathered tokens; None: as in the execution.
        """
        fields = {} if saved_input is None else {"saved_input": saved_input}
        return self._varied(activations=ActivationCut.SEQUENCE, **fields)

    def summing_in(self, num_pieces: int) -> "CostModel":
        """The same machine where tensor-parallel ranks add up a product in `num_pieces` pieces."""
        return self if num_pieces == 1 else self._varied(sum_pieces=num_pieces)

    def writing_gradients(self) -> "CostModel":
        """The same machine whose products write weight gradients in the weights' format, unless its
        execution says what they do."""
        return self if self.execution.gradient_sum is not None else self._varied(gradient_sum=GradientSum.OWN)

    def multiplying_in(self, products: ProductFormat) -> "CostModel":
        """The same machine with products of blocks in that format."""
        return self if products is self.execution.products else self._varied(products=products)

    def _varied(self, **fields: Any) -> "CostModel":
        """The same machine with some fields of its execution replaced; made once."""
        key = tuple(fields.items())
        if key not in self._variants:
            other = self._variants[key] = self.executed(replace(self.execution, **fields))
            other.beside = {device: model._varied(**fields) for device, model in self.beside.items()}
        return self._variants[key]

    def _copied(self) -> "CostModel":
        other = copy(self)
        other._known, other._operators, other._variants, other._products = {}, {}, {}, {}
        other._least_products = {}
        for name in ("ends_at_windows", "clock_share", "product_share"):  # of the execution
            vars(other).pop(name, None)
        return other

    def least_products(self, precision: str) -> LeastProducts:
        """Lower bounds on products; made once, so that its results are shared."""
        if precision not in self._least_products:
            self._least_products[precision] = LeastProducts(self, precision)
        return self._least_products[precision]

    def layer_time(
        self,
        layer: Layer,
        work: Work,
        *,
        tp: int,
        cp: int,
        precision: str,
        link: Link | None = None,
        context_link: Link | None = None,
    ) -> LayerTime:
        """Time of one call of the layer on each rank of a tp x cp grid.

        Args:
            layer: any layer; its name and trainability do not matter.
            work: the packed rows.
            tp, cp: degrees of tensor and context parallelism, with even shares.
            precision: "bfloat16", "float32" or "float64".
            link: the link of tensor-parallel ranks; None: the profile's intra-node link.
            context_link: the link of context-parallel ranks; None: the same.

        Raises:
            ValueError: unknown precision, or a grid that was not measured and has no link.

        Complexity: O(operators x table points), once per distinct argument.
        """
        if tp == cp == self._experts.ep == 1:  # nothing runs over them
            link = context_link = None
        work = self.computed(work)
        name = self._signatures.of(layer)
        key = (name, work, tp, cp, str(precision), link, context_link)
        if key not in self._known:
            if str(precision) not in ELEMENT_BYTES:
                raise ValueError(f"precision {precision!r}: want one of {', '.join(ELEMENT_BYTES)}")
            grid = Grid(tp, cp, self._experts.ep if num_experts(layer) else 1)
            bare = without_adapters(layer)
            measured = self._whole(bare, str(precision), grid)
            if layer.reads_context and not work.tokens(TokenCount.READERS):  # passes everything through
                self._known[key] = LayerTime(0.0, 0.0, 0.0)
            elif measured is not None:
                time = in_one_piece(from_measured(bare, measured, work), self.execution)
                if layer.has_adapters:
                    links = self._links(grid, link, context_link)
                    time = self._sums(work, grid, str(precision), links).with_adapters(time, layer)
                self._known[key] = time
            else:
                links = self._links(grid, link, context_link)
                self._known[key] = self._composed(layer, bare, work, grid, str(precision), links)
        return self._known[key]

    def measured_on(self, layer: Layer, precision: str) -> list[tuple[Grid, MeasuredLayer]]:
        """Measurements of the whole layer, without its adapters, with their grids."""
        bare = without_adapters(layer)
        if self._is_narrowed(layer, precision):
            return []
        return [
            (grid, measured)
            for (name, table_precision, grid, _), measured in self._layers.items()
            if table_precision == precision and name == self._measured_as(bare, grid)
        ]

    def _composed(
        self, layer: Layer, bare: Layer, work: Work, grid: Grid, precision: str, links: Links
    ) -> LayerTime:
        """The sum of its operators, or scaled from a measured whole layer, on this grid or on one rank.

        `bare`: the layer without adapters, as it is measured.
        """
        whole = self._whole(bare, precision, Grid(1, 1))
        here = self._whole(bare, precision, grid._replace(ep=1))
        sums = self._sums(work, grid, precision, links)
        if here is None and whole is None:
            return sums.layer(on_rank(layer, work, grid))
        if here is not None:
            time = sums.with_experts(in_one_piece(from_measured(bare, here, work), self.execution), bare)
        else:
            assert whole is not None, "it was measured on this grid or on one rank"
            time = sums.scaled(from_measured(bare, whole, work), bare)
        return sums.with_adapters(time, layer) if layer.has_adapters else time

    def _sums(self, work: Work, grid: Grid, precision: str, links: Links) -> OperatorSums:
        operators = self._operators.get((grid, precision))
        if operators is None:
            operators = self._operators[grid, precision] = OperatorPasses(self, grid, precision)
        return OperatorSums(self, self.collectives, operators, work, grid, precision, links)

    def _whole(self, layer: Layer, precision: str, grid: Grid) -> MeasuredLayer | None:
        """The measurement of the whole layer on a grid, with tokens divided as in this execution; or None."""
        if self._is_narrowed(layer, precision):
            return None
        divides = grid.tp > 1 and self.execution.activations is ActivationCut.SEQUENCE
        return self._layers.get((self._measured_as(layer, grid), precision, grid, divides))

    def _measured_as(self, layer: Layer, grid: Grid) -> str:
        """The signature under which it is measured: with routing by chance, which decides nothing at ep 1."""
        return self._signatures.of(layer if grid.ep > 1 else with_load_cv(layer, 0.0))

    def _is_narrowed(self, layer: Layer, precision: str) -> bool:
        """Whether the layer has products in a narrow format, with which no layer was measured whole."""
        if self.execution.products is ProductFormat.SAME or ELEMENT_BYTES[precision] > BFLOAT16_BYTES:
            return False
        return any(is_narrowed(layer, each) for each in layer.operators)

    def _links(self, grid: Grid, link: Link | None, context_link: Link | None) -> Links:
        if grid != Grid(1, 1) and link is None:
            link = self.profile.machine_link("intra").link
        return Links(link, context_link or link, self._experts.link or link)

    def between_ranks_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Seconds of a collective over gradients or updated weights."""
        return self.collectives.seconds(kind, num_bytes, num_ranks, link) / self.execution.reduction_rate
