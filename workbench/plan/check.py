"""Refuses plans that break a rule, before anything runs them."""

from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress

from workbench.data.sample import Item
from workbench.masks.patterns import check_masks
from workbench.model.layer import Attention
from workbench.plan.alike import alike_replicas, first_of_all
from workbench.plan.expert_groups import check_experts
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import gradient_groups, reduction_order
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.optimizer_shards import check_instances
from workbench.plan.parameter_shards import check_rounds, is_sharded, shard_units
from workbench.plan.plan import Plan, Stage, TokenShard
from workbench.plan.routing import Routing, routing_of
from workbench.plan.token_owners import row_tokens
from workbench.schedule.action import COMPUTE, REDUCTIONS, ROUND, STEP, Action, Pass, reduction_of

_SOUND_ROUNDS: LruCache[None] = LruCache(1024)
_FITTING_LAYERS: LruCache[None] = LruCache(16_384)
_SOUND_STAGES: LruCache[None] = LruCache(1024)
_SOUND_ITEMS: LruCache[None] = LruCache(1024)
_SOUND_ORDERS: LruCache[None] = LruCache(1024)


@cached_on_instance
def check(plan: Plan) -> None:
    """Raise ValueError naming the first broken rule; return when the plan is sound.

    Rules: stages cover the layers of every replica once, on ranks that exist; every item
    stands once in every module that needs it (encoders may hold copies in several
    replicas, the LLM may not); every stage does every pass of every microbatch once, in
    order; ranks of a stage agree; token shards cover their rows exactly once; optimizer instances
    divide the ranks that hold the same weights; sharded weights are whole for every pass and
    gathered alike by all who share them.
    """
    model, stages = Identity(plan.model), value_key(plan.stages)
    _SOUND_STAGES.get_or((model, Identity(plan.cluster), stages), lambda: _check_layout(plan))
    replicas = tuple(plan.replicas(module.name) for module in plan.model.modules)
    held = model, Identity(plan.batch), value_key(plan.microbatches), replicas
    _SOUND_ITEMS.get_or(held, lambda: _check_data(plan))
    order = frame_of(first_of_all(plan)), reduction_order(plan)
    _SOUND_ORDERS.get_or(order, lambda: _check_orders(plan))
    check_instances(plan, gradient_groups(plan))
    if units := shard_units(plan):
        rounds = Identity(units), stages, value_key(plan.programs)
        _SOUND_ROUNDS.get_or(rounds, lambda: check_rounds(plan, units, _twins(plan)))


def _twins(plan: Plan) -> dict[int, int]:
    """Stage of a replica that equals an earlier one -> the stage at its place there."""
    pairs = [(first, other) for first, *others in alike_replicas(plan) for other in others]
    return {b: a for first, other in pairs for a, b in zip(first.stages, other.stages, strict=True)}


def _check_layout(plan: Plan) -> None:
    _check_stages(plan)
    _check_replicas(plan)


def _check_data(plan: Plan) -> None:
    _check_microbatches(plan)
    check_masks(plan.batch)
    _check_items(routing_of(plan))


def _check_orders(plan: Plan) -> None:
    """Of equal components the first breaks the rules that all break, told by the stages of all."""
    part, reduced = first_of_all(plan), frozenset(reduction_order(plan))
    if part is not plan:
        with suppress(ValueError):
            _check_programs(routing_of(part), reduced)
            _check_token_shards(routing_of(part))
            return
    _check_programs(routing_of(plan), reduced)
    _check_token_shards(routing_of(plan))


def _check_stages(plan: Plan) -> None:
    repeated = [stage_id for stage_id, times in Counter(s.id for s in plan.stages).items() if times > 1]
    if repeated:
        raise ValueError(f"stage ids must be unique, {repeated[0]} is used twice")
    num_ranks = plan.cluster.num_ranks
    fitting: set[tuple[object, ...]] = set()
    for stage in plan.stages:
        layers = plan.model.module(stage.module).layers
        first, last = stage.layers
        if not 0 <= first < last <= len(layers):
            raise ValueError(
                f"stage {stage.id}: layers [{first}, {last}) are not a non-empty part of "
                f"{stage.module!r}, which has {len(layers)} layers"
            )
        if not stage.ranks or len({len(row) for row in stage.ranks}) != 1 or not stage.ranks[0]:
            raise ValueError(f"stage {stage.id}: ranks must be a cp x tp grid, got {stage.ranks}")
        ranks = stage.flat_ranks
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"stage {stage.id}: a rank stands twice in {ranks}")
        if min(ranks) < 0 or max(ranks) >= num_ranks:
            rank = next(rank for rank in ranks if not 0 <= rank < num_ranks)
            raise ValueError(
                f"stage {stage.id}: rank {rank} is not there, cluster {plan.cluster.name!r} "
                f"has ranks 0..{num_ranks - 1}"
            )
        shape = stage.module, stage.layers, stage.cp, stage.tp, stage.ep
        if shape not in fitting:
            _FITTING_LAYERS.get_or((Identity(plan.model), shape), partial(_check_layers, plan, stage))
            fitting.add(shape)


def _check_layers(plan: Plan, stage: Stage) -> None:
    _check_heads(plan, stage)
    check_experts(stage, plan.model.module(stage.module).layers)


def _check_heads(plan: Plan, stage: Stage) -> None:
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        for operator in layer.operators:
            if isinstance(operator, Attention) and operator.num_kv_heads % stage.tp:
                raise ValueError(
                    f"stage {stage.id}: tp must divide the {operator.num_kv_heads} key/value heads of "
                    f"{stage.module}.{layer.name}, got tp = {stage.tp}"
                )


def _check_replicas(plan: Plan) -> None:
    for module in plan.model.modules:
        if not plan.replicas(module.name):
            raise ValueError(f"module {module.name!r} has no stage")
    for (name, replica), chain in plan.chain.items():
        ends = [0, *(stage.layers[1] for stage in chain)]
        starts = [*(stage.layers[0] for stage in chain), len(plan.model.module(name).layers)]
        for end, start in zip(ends, starts, strict=True):
            if end != start:
                rule = "are covered twice" if start < end else "are in no stage"
                span = f"[{min(start, end)}, {max(start, end)})"
                raise ValueError(f"module {name!r} replica {replica}: layers {span} {rule}")
        degrees = sorted({(stage.cp, stage.tp) for stage in chain})
        if len({cp for cp, _ in degrees}) > 1:
            raise ValueError(
                f"module {name!r} replica {replica}: cp must not change inside a replica, "
                f"got (cp, tp) = {degrees}"
            )


def _check_microbatches(plan: Plan) -> None:
    for (module, replica), microbatches in plan.microbatches_of.items():
        where = f"module {module!r} replica {replica}"
        if (module, replica) not in plan.chain:
            raise ValueError(f"{where} has microbatches but no stages")
        if [m.index for m in microbatches] != list(range(len(microbatches))):
            raise ValueError(f"{where}: microbatch indices must be 0..{len(microbatches) - 1} without gaps")
        for microbatch in microbatches:
            if not microbatch.rows or not all(microbatch.rows):
                raise ValueError(f"{where} microbatch {microbatch.index}: empty rows do not exist")


def _check_items(routing: Routing) -> None:
    plan = routing.plan
    for module in plan.model.modules:
        known = {item for sample in plan.batch for item in routing.items(module.name, sample.id)}
        per_replica = {
            replica: Counter(
                item for m in plan.microbatches_of.get((module.name, replica), ()) for item in m.items
            )
            for replica in plan.replicas(module.name)
        }
        for replica, counts in per_replica.items():
            _check_known(module.name, replica, counts, known)
        held = Counter(item for counts in per_replica.values() for item in counts)
        for item in sorted(known):
            if held[item] == 0:
                raise ValueError(f"module {module.name!r}: item {tuple(item)} stands in no microbatch")
            if held[item] > 1 and module.has_loss:
                raise ValueError(
                    f"module {module.name!r}: item {tuple(item)} stands in {held[item]} replicas, "
                    "its loss would count more than once"
                )


def _check_known(module: str, replica: int, counts: Counter[Item], known: set[Item]) -> None:
    for item, times in sorted(counts.items()):
        if item not in known:
            raise ValueError(f"module {module!r} replica {replica}: the batch has no item {tuple(item)}")
        if times > 1:
            raise ValueError(f"module {module!r} replica {replica}: item {tuple(item)} stands {times} times")


def _check_programs(routing: Routing, reduced: Container[int]) -> None:
    """Args: the plan's routing, and the stages that sum gradients with others, be they in the plan or not."""
    plan = routing.plan
    ranks = Counter(rank for program in plan.programs for rank in program.ranks)
    for rank in plan.ranks:
        if ranks[rank] != 1:
            raise ValueError(f"rank {rank} must have one program, got {ranks[rank]}")
    idle = sorted(set(ranks) - set(plan.ranks))
    if idle:
        raise ValueError(f"rank {idle[0]} has a program but holds no stage")
    again = _again(plan)
    first = [stage for stage in plan.stages if stage.flat_ranks[0] not in again]
    wanted = _wanted_actions(routing, first, reduced)
    held: dict[int, list[int]] = {}
    for stage in plan.stages:
        for rank in stage.flat_ranks:
            held.setdefault(rank, []).append(stage.id)
    for program in plan.programs:
        alike = {tuple(held[rank]): rank for rank in reversed(program.ranks) if rank not in again}
        for stages, rank in alike.items():  # ranks with the same stages break the same rules
            _check_program(plan, rank, {stage_id: wanted[stage_id] for stage_id in stages})
    _check_agreement(plan, again)


def _again(plan: Plan) -> set[int]:
    """Ranks of replicas that equal an earlier one, and so break the same rules."""
    return {rank for _, *others in alike_replicas(plan) for other in others for rank in other.ranks}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a stage has to do: `weights` are the Bs that, where split, have a W beside their I.

    `in_rounds`: its weights are sharded.
    """

    actions: set[Action]
    weights: set[Action]
    in_rounds: bool


def _wanted_actions(routing: Routing, stages: Sequence[Stage], reduced: Container[int]) -> dict[int, _Wanted]:
    """By stage; a backward may stand as I, with W where weights train, instead of B."""
    plan = routing.plan
    found: dict[int, _Wanted] = {}
    for stage in stages:
        backward = routing.backwards(stage)
        whole = [Action(stage.id, Pass.B, index) for index in range(len(backward))]
        actions = {Action(stage.id, Pass.F, index) for index in range(len(backward))}
        actions.update(compress(whole, backward), [reduction_of(stage.id)] if stage.id in reduced else ())
        weights = set(compress(whole, routing.trained(stage)))
        found[stage.id] = _Wanted(actions, weights, is_sharded(plan, stage))
    return found


def _check_program(plan: Plan, rank: int, wanted: dict[int, _Wanted]) -> None:
    program = plan.program[rank]
    if not program or program[-1] != STEP or program.count(STEP) != 1:
        raise ValueError(f"rank {rank}: a program ends with its only STEP, got {_tail(program)}")
    done: set[Action] = set()
    for action in program[:-1]:
        if action in done:
            raise ValueError(f"rank {rank}: action {action} stands twice")
        if action.stage not in wanted:
            raise ValueError(f"rank {rank}: action {action} is of a stage that the rank does not hold")
        _check_work(rank, action, wanted[action.stage])
        _check_place(rank, action, done)
        done.add(action)
    for action in program[:-1]:
        if action.kind is Pass.OFFLOAD and (back := action._replace(kind=Pass.ONLOAD)) not in done:
            raise ValueError(f"rank {rank}: action {back} is missing from the program")
    for stage in wanted.values():
        missing = [action for action in stage.actions - done if action.kind is not Pass.B]
        for whole in stage.actions - done - set(missing):
            missing += _missing_of_backward(whole, stage, done)
        if missing:
            raise ValueError(f"rank {rank}: action {min(missing, key=str)} is missing from the program")


def _check_work(rank: int, action: Action, wanted: _Wanted) -> None:
    if action in wanted.actions:
        return
    if action.kind in (*ROUND, Pass.OFFLOAD, Pass.ONLOAD):
        if (action.kind in ROUND) != wanted.in_rounds:
            rule = "sharded weights stay on the device" if wanted.in_rounds else "its weights are not sharded"
            raise ValueError(f"rank {rank}: action {action} of stage {action.stage}: {rule}")
        return
    whole = action._replace(kind=Pass.B)
    if action.kind not in (Pass.I, Pass.W) or whole not in wanted.actions:
        raise ValueError(f"rank {rank}: action {action} has no microbatch or no gradient to work on")
    if action.kind is Pass.W and whole not in wanted.weights:
        raise ValueError(f"rank {rank}: action {action} has no weights to train, {whole} splits into I alone")


def _missing_of_backward(whole: Action, wanted: _Wanted, done: set[Action]) -> list[Action]:
    """B, where nothing of it stands; else what is missing of I and W."""
    split = [whole._replace(kind=Pass.I)] + [whole._replace(kind=Pass.W)] * (whole in wanted.weights)
    return [action for action in split if action not in done] if done & set(split) else [whole]


_RIVALS = {Pass.B: (Pass.I, Pass.W), Pass.I: (Pass.B,), Pass.W: (Pass.B,)}


def _check_place(rank: int, action: Action, done: Container[object]) -> None:
    """F before B or I, I before W, a backward whole or split, reduction after all; weights are there."""
    stage, kind, number = action
    if (stage, Pass.OFFLOAD, None) in done or kind is Pass.ONLOAD:
        _check_here(rank, action, done)
    for rival in _RIVALS.get(kind, ()):
        if (stage, rival, number) in done:
            raise ValueError(
                f"rank {rank}: action {action} stands after {action._replace(kind=rival)}: "
                "a backward is whole or split"
            )
    before = action.continues
    if before is not None and before not in done:
        earlier = "its forward" if before.kind is Pass.F else str(before)
        raise ValueError(f"rank {rank}: action {action} stands before {earlier}")
    for closing in REDUCTIONS:
        if (stage, closing, None) in done:
            raise ValueError(f"rank {rank}: action {action} stands after {Action(stage, closing)}")


def _check_here(rank: int, action: Action, done: Container[object]) -> None:
    """The weights of a stage that goes to the host are on the device when it works."""
    away = Action(action.stage, Pass.OFFLOAD)
    if action.kind is Pass.ONLOAD and away not in done:
        raise ValueError(f"rank {rank}: action {action} stands before {away}: its stage has not left")
    if action.kind in COMPUTE and away in done and (back := away._replace(kind=Pass.ONLOAD)) not in done:
        raise ValueError(f"rank {rank}: action {action} stands after {away}, before {back}")


def _check_agreement(plan: Plan, again: Container[int]) -> None:
    """All ranks of a stage run its actions in one order; stages that share ranks likewise."""
    for stage in plan.stages:
        leader, *others = stage.flat_ranks
        if leader in again:
            continue
        for rank in others:
            if plan.program[rank] is plan.program[leader]:
                continue
            shared = {s.id for s in plan.stages if {rank, leader} <= set(s.flat_ranks)}
            mine, theirs = (
                [action for action in plan.program[r] if action.stage in shared] for r in (rank, leader)
            )
            if mine != theirs:
                index = next(
                    i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]
                )
                raise ValueError(
                    f"ranks {leader} and {rank} share stage {stage.id} but differ in order: "
                    f"{theirs[index]} and {mine[index]} at position {index}"
                )


def _tail(program: tuple[Action, ...]) -> str:
    return " ".join(str(action) for action in program[-3:]) or "nothing"


def _check_token_shards(routing: Routing) -> None:
    """Every shard is of a row that exists, and its blocks cover that row exactly once."""
    plan = routing.plan
    seen: set[tuple[str, int, int, int]] = set()
    for shard in plan.token_shards:
        where = f"token shard {shard.module}[{shard.replica}] microbatch {shard.microbatch} row {shard.row}"
        key = (shard.module, shard.replica, shard.microbatch, shard.row)
        if key in seen:
            raise ValueError(f"{where}: the row has an owner for every token already")
        seen.add(key)
        _check_token_shard(routing, shard, where)


def _check_token_shard(routing: Routing, shard: TokenShard, where: str) -> None:
    plan = routing.plan
    chain = plan.chain.get((shard.module, shard.replica))
    if chain is None:
        raise ValueError(f"{where}: there is no such replica")
    microbatches = plan.microbatches_of.get((shard.module, shard.replica), ())
    if not 0 <= shard.microbatch < len(microbatches):
        raise ValueError(f"{where}: the replica has microbatches 0..{len(microbatches) - 1}")
    rows = row_tokens(routing, microbatches[shard.microbatch])
    if not 0 <= shard.row < len(rows):
        raise ValueError(f"{where}: the microbatch has rows 0..{len(rows) - 1}")
    cp = chain[0].cp
    if shard.block_tokens < 1 or any(not 0 <= owner < cp for owner in shard.owners):
        raise ValueError(
            f"{where}: want blocks of >= 1 token and owners in 0..{cp - 1}, "
            f"got {shard.block_tokens} tokens and owners {sorted(set(shard.owners))}"
        )
    num_blocks = -(-rows[shard.row] // shard.block_tokens)
    if len(shard.owners) != num_blocks:
        raise ValueError(
            f"{where}: {rows[shard.row]} tokens are {num_blocks} blocks of {shard.block_tokens}, "
            f"want as many owners, got {len(shard.owners)}"
        )
