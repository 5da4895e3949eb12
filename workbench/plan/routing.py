"""Who needs what from whom, and where gradients run: derived from the plan's items, never stored."""

from dataclasses import dataclass, field

from workbench.data.sample import Item, Segment
from workbench.model.frozen import GradientFlow, Needs, gradient_flow
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import Microbatch, Plan, Stage

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
    """What was looked up of plans with equal stages and microbatches; filled on use.

    They name no plan: one in a cycle would wait for the garbage collector, with all that is derived of it.
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
    """Look-ups over one plan. All are kept: ask `routing_of` for it."""

    plan: Plan
    _tables: _Tables

    def items(self, module: str, sample: int) -> tuple[Item, ...]:
        """Items of a module in one sample, in sequence order; the LLM's item is the sample."""
        modality = self.plan.model.module(module).modality
        if modality == TEXT:
            return (Item(sample, 0),)
        return tuple(self._segments[modality].get(sample, {}))

    def tokens(self, module: Module, item: Item, count: TokenCount) -> int:
        """Tokens of an item inside its module (IN) or behind it (OUT)."""
        if module.modality == TEXT:
            return self.plan.sample[item.sample].num_tokens
        segment = self._segments[module.modality][item.sample][item]
        return segment.tokens_in if count is TokenCount.IN else segment.tokens_out

    def wanted(self, edge: Edge, microbatch: Microbatch) -> tuple[Item, ...]:
        """Items of `edge.source` that a microbatch of `edge.target` needs, in its row order."""
        source, target = self.plan.model.module(edge.source), self.plan.model.module(edge.target)
        if source.modality == target.modality:
            return microbatch.items
        samples = dict.fromkeys(item.sample for item in microbatch.items)
        return tuple(item for sample in samples for item in self.items(edge.source, sample))

    def present(self, microbatch: Microbatch) -> frozenset[str]:
        """Modules, at any distance upstream, that have items in the microbatch's samples."""
        key, known = (microbatch.module, microbatch.rows), self._tables.present_in
        if key not in known:
            samples = frozenset(item.sample for item in microbatch.items)
            known[key] = self._present(microbatch.module, samples)
        return known[key]

    def present_in(self, place: tuple[str, int]) -> tuple[frozenset[str], ...]:
        """`present` of every microbatch of a module's replica."""
        known = self._tables.present_at
        if place not in known:
            known[place] = tuple(map(self.present, self.plan.microbatches_of.get(place, ())))
        return known[place]

    def flow(self, microbatch: Microbatch) -> GradientFlow:
        """Where gradients run for this microbatch: modules missing from it carry none."""
        return self.flow_of(self.present(microbatch))

    def flow_of(self, present: frozenset[str]) -> GradientFlow:
        """Where gradients run for microbatches in which these modules are present."""
        known, model = self._tables.flows, self.plan.model
        if present not in known:
            known[present] = _FLOWS.get_or((Identity(model), present), lambda: gradient_flow(model, present))
        return known[present]

    def computes(self, stage: Stage, present: frozenset[str]) -> Needs:
        """Which kinds of gradients any layer of the stage computes where these modules are present."""
        key, known = (present, stage.module, stage.layers), self._tables.computes
        if key not in known:
            needs = self.flow_of(present).needs[stage.module][slice(*stage.layers)]
            known[key] = Needs(
                any(need.input_grad for need in needs), any(need.weight_grad for need in needs)
            )
        return known[key]

    def boundary_stage(self, module: str, replica: int, layer: int) -> Stage:
        """The stage of that replica that holds that layer."""
        for stage in self.plan.chain[module, replica]:
            if stage.layers[0] <= layer < stage.layers[1]:
                return stage
        raise ValueError(f"module {module!r} replica {replica}: no stage holds layer {layer}")

    def reading_stages(self, edge: Edge, replica: int) -> tuple[Stage, ...]:
        """The stages of the target's replica with a layer that the edge enters, in layer order."""
        return tuple(s for s in self.plan.chain[edge.target, replica] if edge.entered_in(s.layers))

    def holding(self, edge: Edge, item: Item, consumer: Stage) -> Holding:
        """Where the consumer reads an item: the copy on its own ranks, else the lowest replica.

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

        It does when a layer of it needs one and the result is used: the module has the
        loss, or some consumer reads this very copy.
        """
        if not self.computes(stage, self.present(microbatch)).any:
            return False
        return self.plan.model.module(stage.module).has_loss or self.is_read(microbatch)

    def backwards(self, stage: Stage) -> tuple[bool, ...]:
        """`has_backward` of every microbatch of the stage's replica."""
        known = self._tables.backwards
        if stage.id not in known:
            has_loss, place = self.plan.model.module(stage.module).has_loss, (stage.module, stage.replica)
            present = self.present_in(place)
            does = {modules: self.computes(stage, modules).any for modules in set(present)}
            each = zip(present, self.plan.microbatches_of.get(place, ()), strict=True)
            known[stage.id] = tuple(
                [does[modules] and (has_loss or self.is_read(microbatch)) for modules, microbatch in each]
            )
        return known[stage.id]

    def trained(self, stage: Stage) -> tuple[bool, ...]:
        """Of every microbatch, whether the stage computes weight gradients for it: W, where it is split."""
        known = self._tables.trained
        if stage.id not in known:
            present = self.present_in((stage.module, stage.replica))
            trains = {modules: self.computes(stage, modules).weight_grad for modules in set(present)}
            each = zip(present, self.backwards(stage), strict=True)
            known[stage.id] = tuple([is_back and trains[modules] for modules, is_back in each])
        return known[stage.id]

    def is_read(self, microbatch: Microbatch) -> bool:
        """Whether some consumer reads this very copy."""
        return (microbatch.module, microbatch.replica, microbatch.index) in self._read

    @property
    def _segments(self) -> _Segments:
        """Modality -> sample -> item -> its segment, in sequence order."""
        tables = self._tables
        if tables.segments is None:
            key = Identity(self.plan.model), Identity(self.plan.batch)
            tables.segments = _SEGMENTS.get_or(key, self._by_modality)
        return tables.segments

    def _by_modality(self) -> _Segments:
        found: _Segments = {m.modality: {} for m in self.plan.model.modules}
        for sample in self.plan.batch:
            for segment in sample.segments:
                of_modality = found.setdefault(segment.modality, {})
                of_modality.setdefault(sample.id, {})[Item(sample.id, segment.k)] = segment
        return found

    @property
    def _holders(self) -> _Holders:
        tables = self._tables
        if tables.holders is None:
            tables.holders = _HOLDERS.get_or(value_key(self.plan.microbatches), self._find_holders)
        return tables.holders

    def _find_holders(self) -> _Holders:
        found: dict[tuple[str, Item], list[Holding]] = {}
        for microbatch in sorted(self.plan.microbatches, key=lambda m: (m.replica, m.index)):
            for item in microbatch.items:
                holding = Holding(microbatch.replica, microbatch.index)
                found.setdefault((microbatch.module, item), []).append(holding)
        return {key: tuple(holders) for key, holders in found.items()}

    @property
    def _read(self) -> _Read:
        tables = self._tables
        if tables.read is None:
            tables.read = self._read_copies()
        return tables.read

    def _read_copies(self) -> _Read:
        """Who reads what follows from the microbatches, but where several hold an item."""
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
                        held = {self.holding(edge, item, consumer) for consumer in consumers}
                        read.update((edge.source, holder.replica, holder.microbatch) for holder in held)
        return frozenset(read)

    def _present(self, module: str, samples: frozenset[int]) -> frozenset[str]:
        """Modules upstream with items in the samples."""
        known = self._tables.present
        if (module, samples) not in known:
            found: set[str] = set()
            for edge in self.plan.model.edges_into(module):
                if any(self.items(edge.source, sample) for sample in samples):
                    found |= {edge.source} | self._present(edge.source, samples)
            known[module, samples] = frozenset(found)
        return known[module, samples]


def routing_of(plan: Plan) -> Routing:
    """The plan's `Routing`; all of equal stages and microbatches share their tables."""
    return Routing(plan, _tables(plan))


_TABLES: LruCache[_Tables] = LruCache(64)  # of the last plans


@cached_on_instance
def _tables(plan: Plan) -> _Tables:
    key = Identity(plan.model), Identity(plan.batch), value_key(plan.stages), value_key(plan.microbatches)
    return _TABLES.get_or(key, _Tables)
