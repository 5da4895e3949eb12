"""The plan of the next batch: stages, settings and where samples stand are kept, what they hold is new."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.balance.tokens.policies import Policy
from workbench.data.sample import Item, Sample
from workbench.model.model_graph import TEXT
from workbench.plan.build import schedule_nodes, shared_microbatches, with_programs
from workbench.plan.check import check
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.plan_schedule import schedule_of
from workbench.plan.routing import routing_of
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
    """The plan of another batch for the same ranks and weights, checked.

    The i-th sample takes the place of the i-th one: its row in the language model, and in every
    encoder the microbatch of the same samples; where modules share the batch out by degrees of their own,
    it is assigned anew in the same way. Programs stay where every stage still has as many
    microbatches with the same backwards and consumers, else they are made anew. Tokens of the
    modules that have token shards are made anew; a plan that leaves them to the zigzag of
    the lowering still does.

    Args:
        plan: of the batch before, or of any before that.
        batch: as many samples, of any lengths and masks.
        policy, block_tokens: of the token shards, see `token_shards`.
        schedule: of programs made anew; None: the plan's, as `schedule_of` tells it.
        microbatches: of the batch, grouped already; None: samples take places as said above.

    Raises:
        ValueError: another number of samples; encoder microbatches that neither follow the samples
            of the language model's nor are shares of the batch (they need their strategy); programs
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
    found = replace(draft, token_shards=shards)
    check(found)
    return found


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
    """The microbatches of the draft's batch, module after module."""
    (llm,) = (module.name for module in plan.model.modules if module.modality == TEXT)
    sharing = _sharing(plan)
    if sharing is not None:
        return sharing.of(draft)
    moved = _moved(plan, llm, draft.batch)
    placed = replace(draft, microbatches=tuple(moved))
    found: list[Microbatch] = []
    for module in plan.model.modules:
        if module.name == llm:
            found += moved
        else:
            found += _followers(placed, llm, module.name, _samples_together(plan, llm, module.name))
    return tuple(found)


class Sharing(NamedTuple):
    """How modules with degrees of their own split a batch; arguments of `shared_microbatches`."""

    samples: int
    dp: dict[str, int]
    rounds: int | None

    def of(self, plan: Plan) -> tuple[Microbatch, ...]:
        """Microbatches of the plan's batch."""
        return shared_microbatches(plan, samples_per_microbatch=self.samples, dp=self.dp, rounds=self.rounds)


def _sharing(plan: Plan) -> Sharing | None:
    """That of the plan; None where its modules have equal degrees or it is not by degrees alone."""
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
        except ValueError:  # no batch of this size goes so
            continue
    return None


def _moved(plan: Plan, llm: str, batch: Sequence[Sample]) -> list[Microbatch]:
    """The language model's microbatches with the samples of another batch in the same places."""
    new_id = {old.id: new.id for old, new in zip(plan.batch, batch, strict=True)}
    return [
        replace(
            microbatch,
            rows=tuple(tuple(Item(new_id[item.sample], item.k) for item in row) for row in microbatch.rows),
        )
        for replica in plan.replicas(llm)
        for microbatch in plan.microbatches_of.get((llm, replica), ())
    ]


def _samples_together(plan: Plan, llm: str, module: str) -> int:
    """How many samples, in the language model's order, a microbatch of an encoder holds.

    Where several numbers give the microbatches that there are, the language model's own is taken,
    else the largest.
    """
    present = {m for (name, _), held in plan.microbatches_of.items() if name == module for m in held}
    of_llm: list[int] = [len(m.items) for m in plan.microbatches if m.module == llm]
    most: int = len(plan.batch) // max(1, len(plan.replicas(llm)))
    candidates: list[int] = [*of_llm[:1], *range(most, 0, -1)]
    for number in candidates:
        if set(_followers(plan, llm, module, number)) == present:
            return number
    raise ValueError(
        f"next batch: microbatches of {module!r} in the plan of strategy {plan.strategy!r} do not hold the "
        f"items of consecutive samples of {llm!r}; plan every batch by its strategy"
    )


def _followers(plan: Plan, llm: str, module: str, number: int) -> list[Microbatch]:
    """An encoder's microbatches: items of every `number` samples of the LLM, each a row of its own.

    Every replica of the LLM has its own replica of the encoder, or several equal ones.
    """
    routing = routing_of(plan)
    llm_replicas, replicas = plan.replicas(llm), plan.replicas(module)
    copies = len(replicas) // len(llm_replicas)
    found: list[Microbatch] = []
    for position, llm_replica in enumerate(llm_replicas):
        held = plan.microbatches_of.get((llm, llm_replica), ())
        samples = [item.sample for microbatch in held for item in microbatch.items]
        index = 0
        for first in range(0, len(samples), number):
            together = samples[first : first + number]
            rows = tuple((item,) for sample in together for item in routing.items(module, sample))
            if rows:
                found += [
                    Microbatch(module=module, replica=replica, index=index, rows=rows)
                    for replica in replicas[position * copies : (position + 1) * copies]
                ]
                index += 1
    return found
