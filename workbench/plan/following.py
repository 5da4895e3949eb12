"""The plan of the next batch: stages, settings and where samples stand are kept, what they hold is new."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.balance.tokens import Policy
from workbench.balance.tokens_exchange import longest_first_exchanged
from workbench.data.sample import Item, Sample
from workbench.graph.model_graph import TEXT
from workbench.plan.build import schedule_nodes, with_programs
from workbench.plan.check import check
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing
from workbench.plan.token_shards import token_shards

BLOCK_TOKENS = 128


def next_plan(
    plan: Plan,
    batch: Sequence[Sample],
    *,
    policy: Policy = longest_first_exchanged,
    block_tokens: int = BLOCK_TOKENS,
) -> Plan:
    """The plan of another batch for the same ranks and weights, checked.

    The i-th sample takes the place of the i-th one: its row in the language model, and in every
    encoder the microbatch of the same samples. Programs stay where every stage still has as many
    microbatches with the same backwards and consumers, else they are made anew. Tokens of the
    modules that have token shards are dealt out anew; a plan that leaves them to the zigzag of
    the lowering still does.

    Args:
        plan: of the batch before, or of any before that.
        batch: as many samples, of any lengths and masks.
        policy, block_tokens: of the token shards, see `token_shards`.

    Raises:
        ValueError: another number of samples; encoder microbatches that do not follow the samples
            of the language model's (they need their strategy); programs that are not those of
            graph-aware 1F1B and do not fit the new batch; whatever `check` refuses.

    Complexity: O(actions + items) and that of the token shards.
    """
    if len(batch) != len(plan.batch):
        raise ValueError(f"next batch: the plan has places for {len(plan.batch)} samples, got {len(batch)}")
    draft = replace(plan, batch=tuple(batch), token_shards=())
    draft = replace(draft, microbatches=_microbatches(plan, draft))
    draft = _with_fitting_programs(plan, draft)
    modules = dict.fromkeys(shard.module for shard in plan.token_shards)
    shards = tuple(
        shard for name in modules for shard in token_shards(draft, name, policy, block_tokens=block_tokens)
    )
    found = replace(draft, token_shards=shards)
    check(found)
    return found


def _with_fitting_programs(plan: Plan, draft: Plan) -> Plan:
    if schedule_nodes(draft) == schedule_nodes(plan):
        return draft
    own = with_programs(replace(plan, programs=(), token_shards=()))
    if own.programs != plan.programs:
        raise ValueError(
            f"next batch: the programs of strategy {plan.strategy!r} do not fit it, and they are not "
            "those of graph-aware 1F1B, which could be made anew; plan every batch by its strategy"
        )
    return with_programs(replace(draft, programs=()))


def _microbatches(plan: Plan, draft: Plan) -> tuple[Microbatch, ...]:
    """The microbatches of the draft's batch, module after module."""
    (llm,) = (module.name for module in plan.model.modules if module.modality == TEXT)
    moved = _moved(plan, llm, draft.batch)
    placed = replace(draft, microbatches=tuple(moved))
    found: list[Microbatch] = []
    for module in plan.model.modules:
        if module.name == llm:
            found += moved
        else:
            found += _followers(placed, llm, module.name, _samples_together(plan, llm, module.name))
    return tuple(found)


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
    routing = Routing(plan)
    llm_replicas, replicas = plan.replicas(llm), plan.replicas(module)
    copies = len(replicas) // len(llm_replicas)
    found: list[Microbatch] = []
    for place, llm_replica in enumerate(llm_replicas):
        held = plan.microbatches_of.get((llm, llm_replica), ())
        samples = [item.sample for microbatch in held for item in microbatch.items]
        index = 0
        for first in range(0, len(samples), number):
            together = samples[first : first + number]
            rows = tuple((item,) for sample in together for item in routing.items(module, sample))
            if rows:
                found += [
                    Microbatch(module=module, replica=replica, index=index, rows=rows)
                    for replica in replicas[place * copies : (place + 1) * copies]
                ]
                index += 1
    return found
