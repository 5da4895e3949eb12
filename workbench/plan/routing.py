"""Who reads which item from whom, and where gradients run: derived from the plan's items, never stored."""

from dataclasses import dataclass, field

from workbench.data.sample import Item, Segment
from workbench.model.frozen import GradientFlow, Needs, gradient_flow
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage

_Segments = dict[str, dict[int, dict[Item, Segment]]]
_SEGMENTS: LruCache[_Segments] = LruCache(16)
_FLOWS: LruCache[GradientFlow] = LruCache(1024)
_Holders = dict[tuple[str, Item], tuple["Holding", ...]]
_HOLDERS: LruCache[_Holders] = LruCache(1_000_000, lambda holders: len(holders) + 1)
_Read = frozenset[tuple[str, int, int]]
_Rows = tuple[tuple[Item, ...], ...]
_READ: LruCache[_Read] = LruCache(1_000_000, lambda read: len(read) + 1)


@dataclass(frozen=True)
class Holding:
    """The microbatch of a producer replica that an item is read from."""

    replica: int
    microbatch: int


@dataclass(slots=True)
class _Tables:
    """Results of look-ups, shared by plans with equal stages and microbatches; filled on use.

    They refer to no plan: a plan in a reference cycle would wait for the garbage collector.
    """

    segments: _Segments | None = None
    holders: _Holders | None = None
    read: _Read | None = None
    flows: dict[frozenset[str], GradientFlow] = field(default_factory=dict)  # by modules present
    present: dict[tuple[str, frozenset[int]], frozenset[str]] = field(default_factory=dict)  # and by samples
    present_in: dict[tuple[str, _Rows], frozenset[str]] = field(default_factory=dict)  # by module and rows
    present_at: dict[tuple[str, int], tuple[frozenset[str], ...]] = field(default_factory=dict)  # by replica
    computes: dict[tuple[frozenset[str], str, tuple[int, int]], Needs] = field(default_factory=dict)
    backwards: dict[int, tuple[bool, ...]] = field(default_factory=dict)  # by stage
    trained: dict[int, tuple[bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routing:
    """Look-ups over one plan; results are cached. Made by `routing_of`."""

    plan: Plan
    _tables: _Tables

    def items(self, module: str, sample: int) -> tuple[Item, ...]:
        """Return a module's items in one sample, in sequence order; the LLM's item is the sample."""
        modality = self.plan.model.module(module).modality
        if modality == TEXT:
            return (Item(sample, 0),)
        return tuple(self._segments[modality].get(sample, {}))

    def tokens(self, module: Module, item: Item, count: TokenCount) -> int:
        """Return the tokens of an item inside its module (IN) or in its output (OUT)."""
        if module.modality == TEXT:
            return self.plan.sample[item.sample].num_tokens
        segment = self._segments[module.modality][item.sample][item]
        return segment.tokens_in if count is TokenCount.IN else segment.tokens_out

    def wanted(self, edge: Edge, microbatch: Microbatch) -> tuple[Item, ...]:
        """Return the items of `edge.source` that a microbatch of `edge.target` needs, in its row order."""
        source, target = self.plan.model.module(edge.source), self.plan.model.module(edge.target)
        if source.modality == target.modality:
            return microbatch.items
        samples = dict.fromkeys(item.sample for item in microbatch.items)
        return tuple(item for sample in samples for item in self.items(edge.source, sample))

    def present(self, microbatch: Microbatch) -> frozenset[str]:
        """Return the modules, at any distance upstream, with items in the microbatch's samples."""
        key, cache = (microbatch.module, microbatch.rows), self._tables.present_in
        if key not in cache:
            samples = frozenset(item.sample for item in microbatch.items)
            cache[key] = self._present(microbatch.module, samples)
        return cache[key]

    def present_in(self, module_replica: tuple[str, int]) -> tuple[frozenset[str], ...]:
        """Return `present` of every microbatch of a module's replica."""
        cache = self._tables.present_at
        if module_replica not in cache:
            cache[module_replica] = tuple(
                map(self.present, self.plan.microbatches_of.get(module_replica, ()))
            )
        return cache[module_replica]

    def flow(self, microbatch: Microbatch) -> GradientFlow:
        """Return where gradients run for this microbatch; modules missing from it carry none."""
        return self.flow_of(self.present(microbatch))

    def flow_of(self, present: frozenset[str]) -> GradientFlow:
        """Return where gradients run for microbatches in which these modules are present."""
        cache, model = self._tables.flows, self.plan.model
        if present not in cache:
            cache[present] = _FLOWS.get_or((Identity(model), present), lambda: gradient_flow(model, present))
        return cache[present]

    def computes(self, stage: Stage, present: frozenset[str]) -> Needs:
        """Return the kinds of gradients that any layer of the stage computes if these modules are present."""
        key, cache = (present, stage.module, stage.layers), self._tables.computes
        if key not in cache:
            needs = self.flow_of(present).needs[stage.module][slice(*stage.layers)]
            cache[key] = Needs(
                any(need.input_grad for need in needs), any(need.weight_grad for need in needs)
            )
        return cache[key]

    def boundary_stage(self, module: str, replica: int, layer: int) -> Stage:
        """Return the stage of a replica that holds a layer; ValueError if none does."""
        for stage in self.plan.chain[module, replica]:
            if stage.layers[0] <= layer < stage.layers[1]:
                return stage
        raise ValueError(f"module {module!r} replica {replica}: no stage holds layer {layer}")

    def reading_stages(self, edge: Edge, replica: int) -> tuple[Stage, ...]:
        """Return the stages of the target's replica with a layer that the edge enters, in layer order."""
        return tuple(s for s in self.plan.chain[edge.target, replica] if edge.entered_in(s.layers))

    def holding(self, edge: Edge, item: Item, consumer: Stage) -> Holding:
        """Return where the consumer reads an item: the copy on its own ranks, else the lowest replica.

        Raises ValueError when no microbatch of the producer holds the item.
        """
        holders = self._holders.get((edge.source, item), ())
        if not holders:
            raise ValueError(
                f"item {tuple(item)} of {edge.source!r} stands in no microbatch, but {edge.target!r} needs it"
            )
        if len(holders) == 1:
            return holders[0]
        for holder in holders:
            producer = self.boundary_stage(edge.source, holder.replica, edge.after_layer)
            if set(producer.flat_ranks) & set(consumer.flat_ranks):
                return holder
        return holders[0]

    def has_backward(self, stage: Stage, microbatch: Microbatch) -> bool:
        """Whether the stage computes any gradient for this microbatch.

        It does if one of its layers needs one and the result is used: the module has the loss, or some
        consumer reads this copy.
        """
        if not self.computes(stage, self.present(microbatch)).any:
            return False
        return self.plan.model.module(stage.module).has_loss or self.is_read(microbatch)

    def backwards(self, stage: Stage) -> tuple[bool, ...]:
        """Return `has_backward` of every microbatch of the stage's replica."""
        cache = self._tables.backwards
        if stage.id not in cache:
            has_loss = self.plan.model.module(stage.module).has_loss
            module_replica = stage.module, stage.replica
            present = self.present_in(module_replica)
            needs_any = {modules: self.computes(stage, modules).any for modules in set(present)}
            pairs = zip(present, self.plan.microbatches_of.get(module_replica, ()), strict=True)
            cache[stage.id] = tuple(
                [
                    needs_any[modules] and (has_loss or self.is_read(microbatch))
                    for modules, microbatch in pairs
                ]
            )
        return cache[stage.id]

    def trained(self, stage: Stage) -> tuple[bool, ...]:
        """Return, per microbatch, whether the stage computes weight gradients for it (W, if split)."""
        cache = self._tables.trained
        if stage.id not in cache:
            present = self.present_in((stage.module, stage.replica))
            needs_weights = {modules: self.computes(stage, modules).weight_grad for modules in set(present)}
            pairs = zip(present, self.backwards(stage), strict=True)
            cache[stage.id] = tuple([is_back and needs_weights[modules] for modules, is_back in pairs])
        return cache[stage.id]

    def is_read(self, microbatch: Microbatch) -> bool:
        """Whether some consumer reads this copy of its items."""
        return (microbatch.module, microbatch.replica, microbatch.index) in self._read

    @property
    def _segments(self) -> _Segments:
        """Modality -> sample -> item -> its segment, in sequence order."""
        tables = self._tables
        if tables.segments is None:
            key = Identity(self.plan.model), Identity(self.plan.batch)
            tables.segments = _SEGMENTS.get_or(key, self._find_segments)
        return tables.segments

    def _find_segments(self) -> _Segments:
        by_modality: _Segments = {m.modality: {} for m in self.plan.model.modules}
        for sample in self.plan.batch:
            for segment in sample.segments:
                by_sample = by_modality.setdefault(segment.modality, {})
                by_sample.setdefault(sample.id, {})[Item(sample.id, segment.k)] = segment
        return by_modality

    @property
    def _holders(self) -> _Holders:
        tables = self._tables
        if tables.holders is None:
            tables.holders = _HOLDERS.get_or(value_key(self.plan.microbatches), self._find_holders)
        return tables.holders

    def _find_holders(self) -> _Holders:
        holders_of: dict[tuple[str, Item], list[Holding]] = {}
        for microbatch in sorted(self.plan.microbatches, key=lambda m: (m.replica, m.index)):
            for item in microbatch.items:
                holding = Holding(microbatch.replica, microbatch.index)
                holders_of.setdefault((microbatch.module, item), []).append(holding)
        return {key: tuple(holders) for key, holders in holders_of.items()}

    @property
    def _read(self) -> _Read:
        tables = self._tables
        if tables.read is None:
            tables.read = self._read_microbatches()
        return tables.read

    def _read_microbatches(self) -> _Read:
        """Find the microbatches that are read; shared between plans if no item has several holders."""
        if any(len(holders) > 1 for holders in self._holders.values()):
            return self._find_read()
        plan = self.plan
        edges = ((edge, replica) for edge in plan.model.edges for replica in plan.replicas(edge.target))
        are_read = tuple([bool(self.reading_stages(edge, replica)) for edge, replica in edges])
        key = Identity(plan.model), Identity(plan.batch), value_key(plan.microbatches), are_read
        return _READ.get_or(key, self._find_read)

    def _find_read(self) -> _Read:
        read: set[tuple[str, int, int]] = set()
        for edge in self.plan.model.edges:
            for replica in self.plan.replicas(edge.target):
                consumers = self.reading_stages(edge, replica)
                for microbatch in self.plan.microbatches_of.get((edge.target, replica), ()):
                    for item in self.wanted(edge, microbatch) if consumers else ():
                        holders = {self.holding(edge, item, consumer) for consumer in consumers}
                        read.update((edge.source, holder.replica, holder.microbatch) for holder in holders)
        return frozenset(read)

    def _present(self, module: str, samples: frozenset[int]) -> frozenset[str]:
        """Return the modules upstream with items in the samples."""
        cache = self._tables.present
        if (module, samples) not in cache:
            modules: set[str] = set()
            for edge in self.plan.model.edges_into(module):
                if any(self.items(edge.source, sample) for sample in samples):
                    modules |= {edge.source} | self._present(edge.source, samples)
            cache[module, samples] = frozenset(modules)
        return cache[module, samples]


def routing_of(plan: Plan) -> Routing:
    """Return the plan's `Routing`; plans with equal stages and microbatches share its tables."""
    return Routing(plan, _tables(plan))


_TABLES: LruCache[_Tables] = LruCache(64)  # of the last plans


@cached_on_instance
def _tables(plan: Plan) -> _Tables:
    key = Identity(plan.model), Identity(plan.batch), value_key(plan.stages), value_key(plan.microbatches)
    return _TABLES.get_or(key, _Tables)
