"""The plan of the next batch: stages and settings are kept, samples take the places of earlier ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.balance.tokens.policies import Policy
from workbench.data.sample import Item, Sample
from workbench.model.model_graph import TEXT
from workbench.plan.build import schedule_nodes, with_programs
from workbench.plan.check import check
from workbench.plan.microbatches import shared_microbatches
from workbench.plan.plan import Microbatch, Plan, TokenShard
from workbench.plan.plan_schedule import schedule_of
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import row_tokens
from workbench.plan.token_shards import token_shards
from workbench.schedule.choice import Schedule

BLOCK_TOKENS = 128


def next_plan(
    plan: Plan,
    batch: Sequence[Sample],
    *,
    policy: Policy = longest_first_exchanged,
    block_tokens: int = BLOCK_TOKENS,
    schedule: Schedule | None = None,
    microbatches: tuple[Microbatch, ...] | None = None,
) -> Plan:
    """Return the plan of another batch for the same ranks and weights, checked.

    The i-th sample takes the position of the previous i-th one: its row in the language model, and in every
    encoder the microbatch of the same samples; where modules split the batch by their own data-parallel
    degrees, it is split again in the same way. Programs are kept where every stage still has as many
    microbatches with the same backwards and consumers, else they are scheduled again. Token shards are made
    anew for the modules that have them; a plan that uses the default zigzag still does. Rows that token
    shards give to joint replicas stay with these, by position.

    Args:
        plan: of the previous batch, or of any earlier one.
        batch: as many samples, of any lengths and masks.
        policy, block_tokens: of the token shards, see `token_shards`.
        schedule: for programs made anew; None: the plan's, found by `schedule_of`.
        microbatches: of the batch, already grouped; None: samples take positions as above.

    Raises:
        ValueError: another number of samples; encoder microbatches that neither follow the samples
            of the language model's nor are intervals of the batch (they need their strategy); programs
            of no schedule that do not fit the new batch; whatever `check` refuses.

    Complexity: O(actions + items) and that of the token shards.
    """
    if len(batch) != len(plan.batch):
        raise ValueError(f"next batch: the plan has places for {len(plan.batch)} samples, got {len(batch)}")
    draft = replace(plan, batch=tuple(batch), token_shards=())
    draft = replace(draft, microbatches=_microbatches(plan, draft) if microbatches is None else microbatches)
    draft = _with_fitting_programs(plan, draft, schedule)
    modules = dict.fromkeys(shard.module for shard in plan.token_shards)
    shards = tuple(
        shard for name in modules for shard in token_shards(draft, name, policy, block_tokens=block_tokens)
    )
    following = replace(draft, token_shards=(*_kept_rows(plan, draft), *shards))
    check(following)
    return following


def _kept_rows(plan: Plan, draft: Plan) -> tuple[TokenShard, ...]:
    """Return the shards of the draft's rows at positions whose joint replica is given in the plan.

    Where replicas have context-parallel ranks, a policy gives tokens anew to those of each row's replica.
    """
    routing = routing_of(draft)
    joint = {name for name, (first, *_) in plan.chain.items() if first.joint_replicas > 1 and first.cp == 1}
    shards: list[TokenShard] = []
    for microbatch in draft.microbatches:
        key = microbatch.module, microbatch.replica
        given = plan.token_shards and key in joint
        for row, tokens in enumerate(row_tokens(routing, microbatch) if given else ()):
            shard = plan.token_shard.get((*key, microbatch.index, row))
            if shard is not None:
                num_blocks = -(-tokens // shard.block_tokens)
                shards.append(replace(shard, owners=(shard.owners[0],) * num_blocks))
    return tuple(shards)


def _with_fitting_programs(plan: Plan, draft: Plan, schedule: Schedule | None) -> Plan:
    if schedule_nodes(draft) == schedule_nodes(plan):
        return draft
    schedule = schedule or schedule_of(plan)
    if schedule is None:
        raise ValueError(
            f"next batch: the programs of strategy {plan.strategy!r} do not fit it, and no schedule gives "
            "them, by which they could be made anew; plan every batch by its strategy"
        )
    return with_programs(replace(draft, programs=()), schedule)


def _microbatches(plan: Plan, draft: Plan) -> tuple[Microbatch, ...]:
    """Return the microbatches of the draft's batch, module by module."""
    (llm,) = (module.name for module in plan.model.modules if module.modality == TEXT)
    sharing = _sharing_of(plan)
    if sharing is not None:
        return sharing.of(draft)
    of_llm = _llm_microbatches(plan, llm, draft.batch)
    placed = replace(draft, microbatches=tuple(of_llm))
    microbatches: list[Microbatch] = []
    for module in plan.model.modules:
        if module.name == llm:
            microbatches += of_llm
        else:
            microbatches += _encoder_microbatches(
                placed, llm, module.name, _samples_per_microbatch(plan, llm, module.name)
            )
    return tuple(microbatches)


class Sharing(NamedTuple):
    """How modules with unequal data-parallel degrees split a batch: arguments of `shared_microbatches`."""

    samples: int
    dp: dict[str, int]
    rounds: int | None

    def of(self, plan: Plan) -> tuple[Microbatch, ...]:
        """Return the microbatches of the plan's batch."""
        return shared_microbatches(plan, samples_per_microbatch=self.samples, dp=self.dp, rounds=self.rounds)


def _sharing_of(plan: Plan) -> Sharing | None:
    """Return how the plan splits its batch; None where degrees are equal or it follows another rule."""
    (llm,) = (module.name for module in plan.model.modules if module.modality == TEXT)
    dp = {module.name: len(plan.replicas(module.name)) for module in plan.model.modules}
    if len(set(dp.values())) == 1:
        return None
    samples = next(len(m.items) for m in plan.microbatches if m.module == llm)
    num_rounds = len(plan.batch) // (samples * dp[llm])
    for rounds in (1, None, *range(2, num_rounds)):
        sharing = Sharing(samples, dp, rounds)
        try:
            if set(sharing.of(plan)) == set(plan.microbatches):
                return sharing
        except ValueError:  # the batch does not divide by these rounds
            continue
    return None


def _llm_microbatches(plan: Plan, llm: str, batch: Sequence[Sample]) -> list[Microbatch]:
    """Return the language model's microbatches with the samples of another batch at the same positions."""
    new_id = {old.id: new.id for old, new in zip(plan.batch, batch, strict=True)}
    return [
        replace(
            microbatch,
            rows=tuple(tuple(Item(new_id[item.sample], item.k) for item in row) for row in microbatch.rows),
        )
        for replica in plan.replicas(llm)
        for microbatch in plan.microbatches_of.get((llm, replica), ())
    ]


def _samples_per_microbatch(plan: Plan, llm: str, module: str) -> int:
    """Return how many samples, in the language model's order, a microbatch of an encoder holds.

    If several numbers give the plan's microbatches, the language model's own is preferred, then the largest.
    """
    present = {
        m for (name, _), microbatches in plan.microbatches_of.items() if name == module for m in microbatches
    }
    llm_sizes: list[int] = [len(m.items) for m in plan.microbatches if m.module == llm]
    largest: int = len(plan.batch) // max(1, len(plan.replicas(llm)))
    candidates: list[int] = [*llm_sizes[:1], *range(largest, 0, -1)]
    for number in candidates:
        if set(_encoder_microbatches(plan, llm, module, number)) == present:
            return number
    raise ValueError(
        f"next batch: microbatches of {module!r} in the plan of strategy {plan.strategy!r} do not hold the "
        f"items of consecutive samples of {llm!r}; plan every batch by its strategy"
    )


def _encoder_microbatches(plan: Plan, llm: str, module: str, number: int) -> list[Microbatch]:
    """Group the items of every `number` samples of the LLM into an encoder's microbatches, an item a row.

    Every replica of the LLM has its own replica of the encoder, or several equal ones.
    """
    routing = routing_of(plan)
    llm_replicas, replicas = plan.replicas(llm), plan.replicas(module)
    copies = len(replicas) // len(llm_replicas)
    microbatches: list[Microbatch] = []
    for position, llm_replica in enumerate(llm_replicas):
        llm_microbatches = plan.microbatches_of.get((llm, llm_replica), ())
        samples = [item.sample for microbatch in llm_microbatches for item in microbatch.items]
        index = 0
        for first in range(0, len(samples), number):
            group = samples[first : first + number]
            rows = tuple((item,) for sample in group for item in routing.items(module, sample))
            if rows:
                microbatches += [
                    Microbatch(module=module, replica=replica, index=index, rows=rows)
                    for replica in replicas[position * copies : (position + 1) * copies]
                ]
                index += 1
    return microbatches
