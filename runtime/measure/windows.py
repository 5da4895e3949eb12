"""Windows of a plan's layers: which neighbours are measured together, over which microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.models.adapter import MicrobatchData
from workbench.cost.roofline import RowWork
from workbench.cost.signature import signature
from workbench.model.experts import num_experts
from workbench.model.layer import Layer, TokenCount
from workbench.model.model_graph import Module
from workbench.plan.plan import KeyExchange, Microbatch, Plan, Precision, Stage
from workbench.plan.routing import routing_of
from workbench.plan.sequence import can_divide
from workbench.plan.token_owners import held_runs
from workbench.plan.work import work_of

MOST_ALIKE = 3  # equal layers of one window: enough for weights to come from memory as in a stage

Key = tuple[str, str, int, int, int, bool, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Neighbouring layers [first, last) of a module over one microbatch of the plan.

    Where `cp` ranks share the tokens, or `tp` ranks the weights, as many processes run it together.

    Args:
        row: the mean row: tokens and query-key pairs.
        ep: of the ranks distribute experts.
        sequence_parallel: tensor-parallel ranks divide tokens between products.
        is_recomputed: what a checkpoint around a layer adds is wanted too.
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
        """That meet inside its layers."""
        return self.cp * self.tp

    def ep_of(self, layer: Layer) -> int:
        """Ranks that distribute a layer's experts."""
        return self.ep if num_experts(layer) else 1

    def divides(self, layer: Layer) -> bool:
        """Whether ranks divide a layer's tokens between products."""
        return self.sequence_parallel and can_divide(layer)

    def keys(self, plan: Plan) -> tuple[Key, ...]:
        """What tells each layer from others: signature, precision, grid, rows, tokens and pairs."""
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
    """Windows that hold every distinct layer of every module, over up to `sizes` microbatches.

    A module's layers are taken in order, at most three of one signature; a layer left out ends
    a window. Cross-attention is left out of microbatches without anything to read, which it lets pass,
    and where ranks share tokens.
    Rows of unequal size count as so many mean rows: tokens and query-key pairs, which the cost model
    is linear in, keep their sums. Keys that go round a ring or from all to all are priced by formulas
    and have no windows. Where ranks divide weights, and not tokens too, layers are measured whole and
    then so divided; where they do so piece by piece, formulas say what that saves.
    """
    found: list[Window] = []
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
                alone = Window(
                    module=module.name,
                    layers=run,
                    microbatch=microbatch,
                    row=row,
                    precision=plan.settings.precision,
                    cp=stage.cp,
                )
                found.append(alone)
                if stage.tp > 1 and stage.cp == 1 and plan.settings.of(module.name).collective_pieces == 1:
                    found.append(_divided(alone, plan, stage))
    return tuple(found)


def _divided(window: Window, plan: Plan, stage: Stage) -> Window:
    """The window with its weights on the stage's ranks."""
    sequence_parallel = plan.settings.divides_tokens(stage.module)
    return replace(window, tp=stage.tp, ep=stage.ep, sequence_parallel=sequence_parallel)


def _runs(plan: Plan, module: Module, microbatch: Microbatch, row: RowWork) -> list[tuple[int, int]]:
    """Runs of layers that do something over the microbatch."""
    reads = row.reader_tokens > 0 and plan.chain[module.name, microbatch.replica][0].cp == 1
    names = ["" if layer.reads_context and not reads else signature(layer) for layer in module.layers]
    return runs_of(names)


def runs_of(names: Sequence[str]) -> list[tuple[int, int]]:
    """Longest runs [first, last) of layers with a name that fewer than three before have."""
    kept = [i for i, name in enumerate(names) if name and names[:i].count(name) < MOST_ALIKE]
    starts = [i for i in kept if i - 1 not in kept]
    return [(first, next(i for i in range(first, len(names) + 1) if i not in kept)) for first in starts]


def _size(key: tuple[int, RowWork]) -> tuple[int, ...]:
    """Small to large: all tokens, rows, tokens and pairs of a row, what it reads of others."""
    num_rows, row = key
    own = num_rows * row.tokens_in, num_rows, row.tokens_in, row.attention_area
    return *own, row.context_tokens, row.context_area


def _mean(plan: Plan, microbatch: Microbatch) -> tuple[int, RowWork]:
    rows = work_of(plan, microbatch).rows
    mean = RowWork(*(round(sum(values) / len(rows)) for values in zip(*map(_sizes, rows), strict=True)))
    return len(rows), mean


def _sizes(row: RowWork) -> tuple[int, ...]:
    read = row.context_tokens, row.reader_tokens, row.context_area
    return row.tokens_in, row.tokens_out, row.attention_area, *read


def _spread(values: Sequence[tuple[int, RowWork]], count: int) -> list[tuple[int, RowWork]]:
    """Up to `count` of the values: first, last, and evenly between."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def tokens_held(plan: Plan, window: Window, process: int) -> int:
    """Tokens inside the blocks that this process holds: all, or its share."""
    held = held_runs(routing_of(plan), window.microbatch, TokenCount.IN)
    return sum(run.num_tokens for run in held[process if window.cp > 1 else 0])


def feature_rows(plan: Plan, data: MicrobatchData, name: str) -> int:
    """Features of an edge as they arrive: of all tokens, of which a rank may keep some."""
    if name in data.brought:
        return sum(image.tiles.total for image in data.brought[name])
    if name not in data.chosen:
        return len(data.placed[name])
    routing = routing_of(plan)
    edge = next(edge for edge in plan.model.edges if edge.name == name)
    source = plan.model.module(edge.source)
    items = [item for target in data.items for item in routing.items(edge.source, target.sample)]
    return sum(routing.tokens(source, item, source.layers[edge.after_layer].emits) for item in items)
