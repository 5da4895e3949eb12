"""Refuses plans that break a rule, before anything runs them."""

from collections import Counter
from functools import partial

from workbench.data.sample import Item
from workbench.masks.patterns import check_masks
from workbench.model.item_tokens import check_lengths
from workbench.model.model_graph import divided_heads
from workbench.plan.alike import alike_replicas, first_of_all
from workbench.plan.check_programs import check_programs
from workbench.plan.check_rounds import check_rounds
from workbench.plan.expert_groups import check_experts
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import gradient_groups, reduction_order
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.joint import check_equally_joint, check_joint, check_joint_rows
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.matrix_pools import check_rows
from workbench.plan.optimizer_shards import check_instances
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan, TokenShard
from workbench.plan.recomputed_layers import check_recompute_layers
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import row_tokens

_SOUND_ROUNDS: LruCache[None] = LruCache(1024)
_FITTING_LAYERS: LruCache[None] = LruCache(16_384)
_SOUND_STAGES: LruCache[None] = LruCache(1024)
_SOUND_LENGTHS: LruCache[None] = LruCache(1024)
_SOUND_ITEMS: LruCache[None] = LruCache(1024)
_SOUND_SHARDS: LruCache[None] = LruCache(1024)
_SOUND_ORDERS: LruCache[None] = LruCache(1024)


@cached_on_instance
def check(plan: Plan) -> None:
    """Raise ValueError naming the first broken rule; return when the plan is sound.

    Rules: no sample has more tokens than a module has positions; stages cover the layers of every replica
    once, on ranks that exist; every item is held once by every module that needs it (encoders may hold copies
    in several replicas, the LLM may not); every stage does every pass of every microbatch once, in order;
    ranks of a stage agree; token shards cover their rows exactly once; optimizer instances divide the ranks
    that hold the same weights; sharded weights are whole for every pass and gathered alike by all who share
    them; `recompute_layers` are fewer than the module's layers; tensor-parallel ranks own parts of the same
    matrices for Muon.
    """
    check_draft(plan)
    order = frame_of(first_of_all(plan)), reduction_order(plan)
    _SOUND_ORDERS.get_or(order, lambda: check_programs(plan))
    check_instances(plan, gradient_groups(plan))
    check_rows(plan)
    if units := shard_units(plan):
        rounds = Identity(units), value_key(plan.stages), value_key(plan.programs)
        _SOUND_ROUNDS.get_or(rounds, lambda: check_rounds(plan, units, _twins(plan)))


def check_draft(plan: Plan) -> None:
    """Check the rules that need no programs; raises as `check`."""
    model = Identity(plan.model)
    _SOUND_STAGES.get_or((model, Identity(plan.cluster), value_key(plan.stages)), lambda: _check_layout(plan))
    batch = Identity(plan.batch)
    _SOUND_LENGTHS.get_or((model, batch), lambda: check_lengths(plan.model, plan.batch))
    replicas = tuple(plan.replicas(module.name) for module in plan.model.modules)
    data_key = model, batch, value_key(plan.microbatches), replicas
    _SOUND_ITEMS.get_or(data_key, lambda: _check_data(plan))
    if plan.token_shards:
        shards_key = data_key, value_key(plan.stages), value_key(plan.token_shards)
        _SOUND_SHARDS.get_or(shards_key, lambda: _check_token_shards(routing_of(plan)))
    if plan.has_joint_replicas:
        check_joint_rows(plan)
    for module in plan.model.modules:
        settings = plan.settings.of(module.name)
        check_recompute_layers(f"module {module.name!r}", settings, module.layers)


def _twins(plan: Plan) -> dict[int, int]:
    """Map each stage of a replica that equals an earlier one to the corresponding stage there."""
    pairs = [(first, other) for first, *others in alike_replicas(plan) for other in others]
    return {b: a for first, other in pairs for a, b in zip(first.stages, other.stages, strict=True)}


def _check_layout(plan: Plan) -> None:
    _check_stages(plan)
    _check_replicas(plan)


def _check_data(plan: Plan) -> None:
    _check_microbatches(plan)
    check_masks(plan.batch)
    _check_items(routing_of(plan))


def _check_stages(plan: Plan) -> None:
    repeated = [stage_id for stage_id, times in Counter(s.id for s in plan.stages).items() if times > 1]
    if repeated:
        raise ValueError(f"stage ids must be unique, {repeated[0]} is used twice")
    grids: set[tuple[object, ...]] = set()
    fitting: set[tuple[object, ...]] = set()
    for stage in plan.stages:
        layers = plan.model.module(stage.module).layers
        first, last = stage.layers
        if not 0 <= first < last <= len(layers):
            raise ValueError(
                f"stage {stage.id}: layers [{first}, {last}) are not a non-empty part of "
                f"{stage.module!r}, which has {len(layers)} layers"
            )
        if (stage.ranks, stage.joint_replicas) not in grids:
            _check_grid(plan, stage)
            grids.add((stage.ranks, stage.joint_replicas))
        grid = stage.joint_replicas, len(stage.ranks), len(stage.ranks[0]), stage.ep
        shape = stage.module, stage.layers, *grid
        if shape not in fitting:
            _FITTING_LAYERS.get_or((Identity(plan.model), shape), partial(_check_layers, plan, stage))
            fitting.add(shape)


def _check_grid(plan: Plan, stage: Stage) -> None:
    if not stage.ranks or len({len(row) for row in stage.ranks}) != 1 or not stage.ranks[0]:
        raise ValueError(f"stage {stage.id}: ranks must be a cp x tp grid, got {stage.ranks}")
    check_joint(stage)
    ranks, num_ranks = stage.flat_ranks, plan.cluster.num_ranks
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"stage {stage.id}: a rank stands twice in {ranks}")
    if min(ranks) < 0 or max(ranks) >= num_ranks:
        rank = next(rank for rank in ranks if not 0 <= rank < num_ranks)
        raise ValueError(
            f"stage {stage.id}: rank {rank} is not there, cluster {plan.cluster.name!r} "
            f"has ranks 0..{num_ranks - 1}"
        )


def _check_layers(plan: Plan, stage: Stage) -> None:
    _check_heads(plan, stage)
    check_experts(stage, plan.model.module(stage.module).layers)


def _check_heads(plan: Plan, stage: Stage) -> None:
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        for heads in map(divided_heads, layer.operators):
            if heads % stage.tp:
                raise ValueError(
                    f"stage {stage.id}: tp must divide the {heads} key/value heads of "
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
        check_equally_joint(chain)


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
        needed = {item for sample in plan.batch for item in routing.items(module.name, sample.id)}
        per_replica = {
            replica: Counter(
                item for m in plan.microbatches_of.get((module.name, replica), ()) for item in m.items
            )
            for replica in plan.replicas(module.name)
        }
        for replica, counts in per_replica.items():
            _check_replica_items(module.name, replica, counts, needed)
        num_holders = Counter(item for counts in per_replica.values() for item in counts)
        for item in sorted(needed):
            if num_holders[item] == 0:
                raise ValueError(f"module {module.name!r}: item {tuple(item)} stands in no microbatch")
            if num_holders[item] > 1 and module.has_loss:
                raise ValueError(
                    f"module {module.name!r}: item {tuple(item)} stands in {num_holders[item]} replicas, "
                    "its loss would count more than once"
                )


def _check_replica_items(module: str, replica: int, counts: Counter[Item], needed: set[Item]) -> None:
    for item, times in sorted(counts.items()):
        if item not in needed:
            raise ValueError(f"module {module!r} replica {replica}: the batch has no item {tuple(item)}")
        if times > 1:
            raise ValueError(f"module {module!r} replica {replica}: item {tuple(item)} stands {times} times")


def _check_token_shards(routing: Routing) -> None:
    """Check that every shard belongs to an existing row and that its blocks cover the row exactly once."""
    plan = routing.plan
    checked_keys: set[tuple[str, int, int, int]] = set()
    for shard in plan.token_shards:
        where = f"token shard {shard.module}[{shard.replica}] microbatch {shard.microbatch} row {shard.row}"
        key = (shard.module, shard.replica, shard.microbatch, shard.row)
        if key in checked_keys:
            raise ValueError(f"{where}: the row has an owner for every token already")
        checked_keys.add(key)
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
    cp, num_shares = chain[0].cp, chain[0].num_shares
    if shard.block_tokens < 1 or any(not 0 <= owner < num_shares for owner in shard.owners):
        raise ValueError(
            f"{where}: want blocks of >= 1 token and owners in 0..{num_shares - 1}, "
            f"got {shard.block_tokens} tokens and owners {sorted(set(shard.owners))}"
        )
    if len({owner // cp for owner in shard.owners}) > 1:
        raise ValueError(
            f"{where}: a row belongs to one of the {chain[0].joint_replicas} joint replicas, got owners "
            f"{sorted(set(shard.owners))}; nearest: {shard.owners[0]} alone"
        )
    num_blocks = -(-rows[shard.row] // shard.block_tokens)
    if len(shard.owners) != num_blocks:
        raise ValueError(
            f"{where}: {rows[shard.row]} tokens are {num_blocks} blocks of {shard.block_tokens}, "
            f"want as many owners, got {len(shard.owners)}"
        )
