"""Builds a plan out of answers: stages and microbatches in, programs out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise

from workbench.collector import collector_paused
from workbench.data.sample import Item, Sample
from workbench.model.layer import LayerKind
from workbench.model.model_graph import TEXT
from workbench.plan.alike import alike_replicas, first_of_all, with_copied
from workbench.plan.check import check
from workbench.plan.frame import Frame, frame_of
from workbench.plan.gradient_groups import gradient_groups, reduction_order
from workbench.plan.instance_cache import set_cached
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Microbatch, Plan, Program, Stage
from workbench.plan.routing import Routing, routing_of
from workbench.schedule.action import STEP, Action
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.parts import Group, Programs
from workbench.schedule.pass_graph import one_unit
from workbench.schedule.programs import Prepared
from workbench.schedule.reductions import with_reductions
from workbench.schedule.sharded import with_rounds

MOST_ACTIONS = 500_000  # of all orders that are cached
Piece = tuple[Item, ...]  # items of one sample that stay together
_GROUPS: LruCache[dict[Group, tuple[int, ...]]] = LruCache(64)  # of the last stages
_PROBLEM: LruCache[Frame] = LruCache(4096)  # of a frame: what a schedule is made for
_PREPARED: LruCache[Prepared] = LruCache(MOST_ACTIONS, lambda prepared: prepared.num_passes + 1)
_PROGRAMS: LruCache[tuple[Program, ...]] = LruCache(
    MOST_ACTIONS, lambda programs: sum(len(program.actions) for program in programs) + 1
)


@collector_paused()
def with_programs(
    draft: Plan,
    schedule: Schedule | None = None,
    duration: Callable[[Action], float] = one_unit,
) -> Plan:
    """The plan with programs for its stages and microbatches, checked.

    Without a schedule, graph-aware 1F1B: stages on the same ranks run in lockstep, in forward
    order. Gradients are summed behind the stage's last pass, STEP ends every program. The LLM and what
    reads it are the inner stages of schedules that want to know them.

    Args:
        schedule: see `programs_of`.
        duration: time of a pass in any one unit, for the kinds that choose between orders by it.

    Raises:
        ValueError: what `check` refuses, stages whose ranks overlap without being equal, or a
            `run_ahead` where no encoder is frozen.
    """
    plan = _programmed(draft, schedule or Schedule(), duration)
    set_cached(plan, shard_units, shard_units(draft))  # programs are no matter of these
    set_cached(plan, gradient_groups, gradient_groups(draft))
    set_cached(plan, reduction_order, reduction_order(draft))
    check(plan)
    return plan


def _programmed(draft: Plan, schedule: Schedule, duration: Callable[[Action], float]) -> Plan:
    """With programs of one replica, and the same under their own names of all that equal it."""
    part = first_of_all(draft)
    if part is not draft and duration is one_unit and not schedule.kind.spec.shares_ranks_in_part:
        with suppress(ValueError):  # told by the stages of all replicas
            programs = _closed(draft, part, _passes(part, schedule, duration))
            plan = with_copied(draft, _of_all(draft, programs))
            set_cached(plan, first_of_all, replace(part, programs=programs))
            return plan
    return replace(draft, programs=_closed(draft, draft, _passes(draft, schedule, duration)))


def _of_all(draft: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Programs of the first replica, copied for the others that equal it."""
    ((first, *others),) = alike_replicas(draft)
    groups = tuple(_rank_groups(draft).values())

    def derive() -> tuple[Program, ...]:
        found = {program.ranks: program for program in programs}
        for other in others:
            rank_of = dict(zip(first.ranks, other.ranks, strict=True))
            stage_of: dict[int | None, int | None] = dict(zip(first.stages, other.stages, strict=True))
            stage_of[None] = None
            for program in programs:
                ranks = tuple(sorted(rank_of[rank] for rank in program.ranks))
                actions = tuple([Action(stage_of[a[0]], a[1], a[2]) for a in program.actions])
                found[ranks] = Program(ranks=ranks, actions=actions)
        return tuple(found[ranks] for ranks in groups)

    places = tuple((each.ranks, each.stages) for each in (first, *others))
    return _PROGRAMS.get_or((Identity(programs), places, groups), derive)


def _passes(draft: Plan, schedule: Schedule, duration: Callable[[Action], float]) -> Programs:
    """Of every group of stages on the same ranks; plans that look alike to a schedule share them."""
    if not schedule.kind.spec.shares_ranks_in_part:
        _check_equal_ranks(draft)
    problem = _PROBLEM.get_or(frame_of(draft), lambda: _problem(draft))
    prepared = _PREPARED.get_or((problem, schedule), lambda: _prepared(problem, schedule))
    return prepared.usual if duration is one_unit else prepared.programs(duration)


def _problem(draft: Plan) -> Frame:
    chains = tuple(tuple(stage.id for stage in chain) for chain in draft.chain.values())
    groups = tuple(_rank_groups(draft))
    return Frame((schedule_nodes(draft), groups, chains, _inner(draft), _frozen_sources(draft)))


def _prepared(problem: Frame, schedule: Schedule) -> Prepared:
    nodes, groups, chains, inner, frozen_sources = problem.parts
    return Prepared(nodes, groups, schedule, chains, inner=inner, frozen_sources=frozen_sources)


def _closed(draft: Plan, part: Plan, passes: Programs) -> tuple[Program, ...]:
    """Programs of a part's ranks: with the rounds of weights that the draft shards, its sums, and STEP."""
    held = part.stage
    reduced = tuple(stage for stage in reduction_order(draft) if stage in held)
    in_part = (
        (tuple(s for s in unit.stages if s in held), bool(unit.trained)) for unit in shard_units(draft)
    )
    rounds = tuple((stages, is_trained) for stages, is_trained in in_part if stages)

    ranks_of = _rank_groups(part)

    def derive() -> tuple[Program, ...]:
        orders = passes
        if rounds:
            trained = [stage for stages, is_trained in rounds if is_trained for stage in stages]
            orders = with_rounds(orders, [stages for stages, _ in rounds], trained)
        orders = with_reductions(orders, reduced)
        return tuple(
            Program(ranks=ranks, actions=(*orders[group], STEP)) for group, ranks in ranks_of.items()
        )

    return _PROGRAMS.get_or((Identity(passes), tuple(ranks_of.items()), rounds, reduced), derive)


def schedule_nodes(plan: Plan) -> tuple[ScheduleNode, ...]:
    """What the scheduler needs to know of every stage: microbatches, backwards, consumers."""
    routing = routing_of(plan)
    consumers = _consumers(routing)
    nodes = []
    for stage in plan.stages:
        backward = routing.backwards(stage)
        nodes.append(
            ScheduleNode(
                stage=stage.id,
                num_microbatches=len(backward),
                backward=backward,
                consumers=tuple(consumers.get(stage.id, ())),
                weights=routing.trained(stage),
            )
        )
    return tuple(nodes)


def _consumers(routing: Routing) -> dict[int, list[Consumer]]:
    plan = routing.plan
    found: dict[int, list[Consumer]] = {}
    for (module, replica), line in plan.chain.items():
        indices = range(len(plan.microbatches_of.get((module, replica), ())))
        needs = tuple((index,) for index in indices)
        for producer, consumer in pairwise(line):
            found.setdefault(producer.id, []).append(Consumer(consumer.id, needs))
    for edge in plan.model.edges:
        readers = [s for r in plan.replicas(edge.target) for s in routing.reading_stages(edge, r)]
        for consumer in readers:
            reads: dict[int, list[tuple[int, ...]]] = {}
            producers = {
                source: routing.boundary_stage(edge.source, source, edge.after_layer).id
                for source in plan.replicas(edge.source)
            }
            targets = plan.microbatches_of.get((edge.target, consumer.replica), ())
            for position, target in enumerate(targets):
                for item in routing.wanted(edge, target):
                    holding = routing.holding(edge, item, consumer)
                    needs_of = reads.setdefault(producers[holding.replica], [()] * len(targets))
                    if holding.microbatch not in needs_of[position]:
                        needs_of[position] += (holding.microbatch,)
            for producer_id, needs_list in reads.items():
                found.setdefault(producer_id, []).append(Consumer(consumer.id, tuple(needs_list)))
    return found


def _frozen_sources(plan: Plan) -> tuple[int, ...]:
    """Stages of modules that read no other and train nothing but a projector."""
    fed = {edge.target for edge in plan.model.edges}
    frozen = {
        module.name
        for module in plan.model.modules
        if module.modality != TEXT
        and module.name not in fed
        and not any(layer.trainable for layer in module.layers if layer.kind is not LayerKind.PROJECTOR)
    }
    return tuple(stage.id for stage in plan.stages if stage.module in frozen)


def _inner(plan: Plan) -> tuple[int, ...]:
    """Stages of the LLM and of all modules behind it."""
    inner = {module.name for module in plan.model.modules if module.modality == TEXT}
    for _ in plan.model.modules:
        inner |= {edge.target for edge in plan.model.edges if edge.source in inner}
    return tuple(stage.id for stage in plan.stages if stage.module in inner)


def _rank_groups(plan: Plan) -> dict[Group, tuple[int, ...]]:
    """Stages that some ranks hold, in forward order (modules in the model's order, then layers) -> ranks."""
    return _GROUPS.get_or((Identity(plan.model), value_key(plan.stages)), lambda: _rank_groups_of(plan))


def _rank_groups_of(plan: Plan) -> dict[Group, tuple[int, ...]]:
    position = {module.name: index for index, module in enumerate(plan.model.modules)}
    in_order = sorted(plan.stages, key=lambda stage: (position[stage.module], stage.layers, stage.replica))
    place = {stage.id: index for index, stage in enumerate(in_order)}
    held: dict[tuple[int, ...], list[int]] = {}
    grids = dict.fromkeys([stage.flat_ranks for stage in plan.stages])
    for rank in dict.fromkeys(chain.from_iterable(map(sorted, grids))):
        held.setdefault(tuple([stage.id for stage in plan.stages_on[rank]]), []).append(rank)
    ranks_of: dict[Group, list[int]] = {}
    for stages, ranks in held.items():
        ranks_of.setdefault(tuple(sorted(stages, key=place.__getitem__)), []).extend(ranks)
    return {group: tuple(sorted(ranks)) for group, ranks in ranks_of.items()}


def _check_equal_ranks(plan: Plan) -> None:
    if sum(map(len, _rank_groups(plan))) == len(plan.stages):
        return  # each stands in one group
    owner: dict[int, Stage] = {}
    for stage in plan.stages:
        for rank in sorted(stage.flat_ranks):
            other = owner.setdefault(rank, stage)
            if sorted(other.flat_ranks) != sorted(stage.flat_ranks):
                takers = ", ".join(kind for kind in ScheduleKind if kind.spec.shares_ranks_in_part)
                raise ValueError(
                    f"stages {other.id} and {stage.id} share rank {rank} but not all ranks: "
                    f"{other.flat_ranks} and {stage.flat_ranks}; schedule {takers} takes them"
                )


def batched_microbatches(
    draft: Plan, *, samples_per_microbatch: int, replicas: Sequence[int]
) -> tuple[Microbatch, ...]:
    """The same samples everywhere: consecutive samples form microbatches, assigned to replicas in turn.

    Every module gets the items of those samples; each item is a row of its own. A module
    none of whose items stand in a microbatch's samples skips it.

    Raises ValueError when the batch does not divide.
    """
    _check_divides(draft, samples_per_microbatch, len(replicas))
    chunks = [
        draft.batch[start : start + samples_per_microbatch]
        for start in range(0, len(draft.batch), samples_per_microbatch)
    ]
    return chunked_microbatches(
        draft, {replica: chunks[index :: len(replicas)] for index, replica in enumerate(replicas)}
    )


def chunked_microbatches(
    draft: Plan, chunks: Mapping[int, Sequence[Sequence[Sample]]]
) -> tuple[Microbatch, ...]:
    """The same samples everywhere: each chunk of a replica's samples is a microbatch of every module.

    Every module gets the items of those samples; each item is a row of its own. A module none of
    whose items stand in a chunk skips it.
    """
    routing = routing_of(draft)
    return tuple(
        microbatch
        for module in draft.model.modules
        for replica, of_replica in chunks.items()
        for microbatch in _of_replica(
            module.name,
            replica,
            [[routing.items(module.name, sample.id) for sample in chunk] for chunk in of_replica],
        )
    )


def shared_microbatches(
    draft: Plan, *, samples_per_microbatch: int, dp: Mapping[str, int], rounds: int | None = 1
) -> tuple[Microbatch, ...]:
    """One global batch, split among the replicas of every module by its own degree.

    The LLM decides: a round is one microbatch of each of its replicas. Another module's replicas
    cut so many rounds, or as few more as give each of them a sample, into consecutive intervals, each a
    microbatch: fan-in where it has more replicas than the LLM, fan-out where it has fewer. The samples
    of several rounds stand in the order of the LLM's replicas, so that each interval feeds as few of
    them as can be. Where that does not divide, some intervals have a sample more, and the replicas take
    turns to get them. With equal degrees and one round it is `batched_microbatches`.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    section 3 (batch intervals).
    Differs: degrees need not divide each other, and a module may have more replicas than a round has
    samples. Where it has more than the batch, intervals are of items (images, clips) and not of samples, as
    that paper's Table A3 has encoders of 32 replicas for 4 samples.

    Args:
        draft: its stages and microbatches are not looked at.
        samples_per_microbatch: of the LLM.
        dp: module -> replicas 0..n-1.
        rounds: that a microbatch of another module than the LLM spans; None: all.

    Raises:
        ValueError: a batch that does not divide by the LLM's round, or gives a replica no sample and no item.
    """
    llm = draft.model.llm.name
    _check_divides(draft, samples_per_microbatch, dp[llm])
    routing, per_round = routing_of(draft), samples_per_microbatch * dp[llm]
    found: list[Microbatch] = []
    for module in draft.model.modules:
        replicas, of_llm = dp[module.name], module.name == llm
        pieces = _pieces(routing, module.name, replicas)
        window = _window(len(draft.batch) // per_round, per_round, replicas, 1 if of_llm else rounds)
        intervals = _intervals(pieces, (window, dp[llm], samples_per_microbatch), replicas)
        for replica in range(replicas):
            found += _of_replica(module.name, replica, intervals[replica::replicas])
    return tuple(found)


def _pieces(routing: Routing, module: str, replicas: int) -> list[list[Piece]]:
    """By sample, what of it goes to one replica: all its items, or each apart where samples are too few."""
    batch = routing.plan.batch
    items = [routing.items(module, sample.id) for sample in batch]
    if replicas <= len(batch):
        return [[each] for each in items]
    num_items = sum(map(len, items))
    if replicas > num_items:
        raise ValueError(
            f"module {module!r}: a batch of {len(batch)} samples with {num_items} items has none for some of "
            f"{replicas} replicas; nearest: dp {max(len(batch), num_items)}"
        )
    return [[(item,) for item in each] for each in items]


def _window(num_rounds: int, per_round: int, replicas: int, rounds: int | None) -> int:
    """Rounds that a module cuts together."""
    return num_rounds if rounds is None else max(rounds, -(-replicas // per_round))


def _intervals(
    batch: Sequence[Sequence[Piece]], shape: tuple[int, int, int], replicas: int
) -> list[Sequence[Piece]]:
    """Consecutive pieces of a window for replica 0, 1, ..., 0, 1, ... in turn; an interval may be empty.

    Args:
        batch: by sample, see `_pieces`.
        shape: rounds of a window, replicas of the LLM, samples of its microbatches.
    """
    found: list[Sequence[Piece]] = []
    rounds, readers, size = shape
    window = rounds * readers * size
    favoured = 0  # the replica that gets a piece more, first
    for first in range(0, len(batch), window):
        chunks = [batch[at : at + size] for at in range(first, min(first + window, len(batch)), size)]
        ordered = [
            piece
            for reader in range(readers)
            for chunk in chunks[reader::readers]
            for sample in chunk
            for piece in sample
        ]
        share, rest = divmod(len(ordered), replicas)
        start = 0
        for replica in range(replicas):
            end = start + share + ((replica - favoured) % replicas < rest)
            found.append(ordered[start:end])
            start = end
        favoured = (favoured + rest) % replicas
    return found


def _of_replica(module: str, replica: int, chunks: Sequence[Sequence[Piece]]) -> Iterator[Microbatch]:
    """A microbatch per chunk that has items of the module; each item is a row of its own."""
    index = 0
    for chunk in chunks:
        rows = tuple((item,) for piece in chunk for item in piece)
        if rows:
            yield Microbatch(module=module, replica=replica, index=index, rows=rows)
            index += 1


def _check_divides(draft: Plan, samples_per_microbatch: int, replicas: int) -> None:
    unit, num_samples = samples_per_microbatch * replicas, len(draft.batch)
    if samples_per_microbatch < 1 or num_samples % unit:
        below = num_samples - num_samples % unit if unit > 0 else 0
        nearest = f"; nearest: {f'{below} or ' if below else ''}{below + unit} samples" if unit > 0 else ""
        raise ValueError(
            f"batch of {num_samples} samples: want a multiple of microbatch x replicas, "
            f"got {samples_per_microbatch} x {replicas}{nearest}"
        )
