"""Windows of a plan's layers: consecutive layers that are measured together, and on which microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.models.adapter import MicrobatchData
from workbench.cost.roofline import RowWork
from workbench.cost.signature import signature
from workbench.model.experts import num_experts
from workbench.model.layer import Layer, TokenCount
from workbench.model.model_graph import Module
from workbench.plan.plan import KeyExchange, Microbatch, Plan, Precision
from workbench.plan.routing import routing_of
from workbench.plan.sequence import can_divide
from workbench.plan.stage import Stage
from workbench.plan.token_owners import held_runs
from workbench.plan.work import work_of

MOST_ALIKE = 3  # equal layers per window: enough that weights come from memory, as in a stage

Key = tuple[str, str, int, int, int, bool, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive layers [first, last) of a module, on one microbatch of the plan.

    Where `cp` ranks share the tokens, or `tp` ranks the weights, that many processes run it together.

    Args:
        row: the mean row: tokens and query-key pairs.
        ep: degree of expert parallelism among them.
        sequence_parallel: tensor-parallel ranks divide tokens between products.
        is_recomputed: the overhead of a checkpoint around a layer is measured too.
    """

    module: str
    layers: tuple[int, int]
    microbatch: Microbatch
    row: RowWork
    precision: Precision
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    is_recomputed: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.microbatch.rows)

    @property
    def num_processes(self) -> int:
        """Number of processes that run it together."""
        return self.cp * self.tp

    def ep_of(self, layer: Layer) -> int:
        """Number of ranks that distribute a layer's experts."""
        return self.ep if num_experts(layer) else 1

    def divides(self, layer: Layer) -> bool:
        """Whether ranks divide a layer's tokens between products."""
        return self.sequence_parallel and can_divide(layer)

    def keys(self, plan: Plan) -> tuple[Key, ...]:
        """Identity of each layer's measurement: signature, precision, grid, rows, tokens and pairs."""
        size = (self.num_rows, self.row.tokens_in, self.row.attention_area)
        layers = plan.model.module(self.module).layers[slice(*self.layers)]
        return tuple(
            (
                signature(layer),
                str(self.precision),
                self.tp,
                self.cp,
                self.ep_of(layer),
                self.divides(layer),
                *size,
            )
            for layer in layers
        )


def windows_of(plan: Plan, *, sizes: int) -> tuple[Window, ...]:
    """Windows that cover every distinct layer of every module, on up to `sizes` microbatches.

    A module's layers are taken in order, at most three of one signature; a skipped layer ends a window.
    Cross-attention is skipped on microbatches without context, through which it is the identity, and where
    ranks share tokens. Rows of unequal size count as as many mean rows: tokens and query-key pairs, in which
    the cost model is linear, keep their sums. Keys exchanged by a ring or all-to-all are priced by formulas
    and have no windows. Where ranks divide weights but not tokens, layers are measured both whole and
    divided; where collectives are cut into pieces, formulas give the savings.
    """
    windows: list[Window] = []
    for module in plan.model.modules:
        works = {_mean(plan, m): m for m in plan.microbatches if m.module == module.name}
        spread = _spread(sorted(works, key=_size), sizes)
        gathers = plan.settings.of(module.name).key_exchange is KeyExchange.ALL_GATHER
        for num_rows, row in spread:
            microbatch = works[num_rows, row]
            stage = plan.chain[module.name, microbatch.replica][0]
            if stage.cp > 1 and not gathers:
                continue
            for run in _runs(plan, module, microbatch, row):
                whole = Window(
                    module=module.name,
                    layers=run,
                    microbatch=microbatch,
                    row=row,
                    precision=plan.settings.precision,
                    cp=stage.cp,
                )
                windows.append(whole)
                if stage.tp > 1 and stage.cp == 1 and plan.settings.of(module.name).collective_pieces == 1:
                    windows.append(_divided(whole, plan, stage))
    return tuple(windows)


def _divided(window: Window, plan: Plan, stage: Stage) -> Window:
    """The window with its weights divided among the stage's ranks."""
    sequence_parallel = plan.settings.divides_tokens(stage.module)
    return replace(window, tp=stage.tp, ep=stage.ep, sequence_parallel=sequence_parallel)


def _runs(plan: Plan, module: Module, microbatch: Microbatch, row: RowWork) -> list[tuple[int, int]]:
    """Runs of layers that have work on the microbatch."""
    reads = row.reader_tokens > 0 and plan.chain[module.name, microbatch.replica][0].cp == 1
    names = ["" if layer.reads_context and not reads else signature(layer) for layer in module.layers]
    return runs_of(names)


def runs_of(names: Sequence[str]) -> list[tuple[int, int]]:
    """Longest runs [first, last) of layers whose name fewer than three earlier layers have."""
    kept = [i for i, name in enumerate(names) if name and names[:i].count(name) < MOST_ALIKE]
    starts = [i for i in kept if i - 1 not in kept]
    return [(first, next(i for i in range(first, len(names) + 1) if i not in kept)) for first in starts]


def _size(key: tuple[int, RowWork]) -> tuple[int, ...]:
    """Sort key by size: all tokens, rows, tokens and pairs of a row, and its context."""
    num_rows, row = key
    size = num_rows * row.tokens_in, num_rows, row.tokens_in, row.attention_area
    return *size, row.context_tokens, row.context_area


def _mean(plan: Plan, microbatch: Microbatch) -> tuple[int, RowWork]:
    rows = work_of(plan, microbatch).rows
    mean = RowWork(*(round(sum(values) / len(rows)) for values in zip(*map(_sizes, rows), strict=True)))
    return len(rows), mean


def _sizes(row: RowWork) -> tuple[int, ...]:
    read = row.context_tokens, row.reader_tokens, row.context_area
    return row.tokens_in, row.tokens_out, row.attention_area, *read


def _spread(values: Sequence[tuple[int, RowWork]], count: int) -> list[tuple[int, RowWork]]:
    """Up to `count` of the values: first, last, and evenly spaced ones between."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def tokens_held(plan: Plan, window: Window, process: int) -> int:
    """Number of tokens within the blocks on this process: all, or its share."""
    runs_of_rank = held_runs(routing_of(plan), window.microbatch, TokenCount.IN)
    return sum(run.num_tokens for run in runs_of_rank[process if window.cp > 1 else 0])


def feature_rows(plan: Plan, data: MicrobatchData, name: str) -> int:
    """Number of features of an edge as they arrive: of all tokens, of which a rank may keep some."""
    if name in data.context_images:
        return sum(image.tiles.total for image in data.context_images[name])
    if name not in data.chosen:
        return len(data.placed[name])
    routing = routing_of(plan)
    edge = next(edge for edge in plan.model.edges if edge.name == name)
    source = plan.model.module(edge.source)
    items = [item for target in data.items for item in routing.items(edge.source, target.sample)]
    return sum(routing.tokens(source, item, source.layers[edge.after_layer].emits) for item in items)
