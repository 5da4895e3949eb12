"""Small spaces of plans that vary in all four questions, listed whole."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from pathlib import Path

import yaml

from experiments.doors.export_jobs import SIGLIP, WHISPER
from workbench.cost.model import CostModel
from workbench.job.job import Job, ModuleLayout, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.plan.codec import plan_hash
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Settings
from workbench.planner.assembly import disjoint_stages
from workbench.planner.block_cuts import Cuts
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.search.joint.choice import NAME, Choice, TokenRule, build
from workbench.search.joint.grouping import Group, dealt

AWAY = 1  # layers by which a border may lie away from an even cut's
Shape = tuple[int, int]  # context-parallel ranks of a stage, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSpace:
    """A job, and the answers to each question that are combined.

    Args:
        name: of the space.
        job: on few ranks.
        cost: its machine.
        shapes: of every module: context-parallel degree and number of stages.
        replicas: of all modules.
        microbatches: numbers of samples.
        schedules: orders of passes.
        rules: owners of tokens of context-parallel modules.
        ways: how keys travel between them.
    """

    name: str
    job: Job
    cost: CostModel
    shapes: Mapping[str, tuple[Shape, ...]]
    replicas: tuple[int, ...] = (1,)
    microbatches: tuple[int, ...] = (1,)
    schedules: tuple[Schedule, ...] = tuple(
        map(usual, (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.ZB_H1))
    )
    rules: tuple[TokenRule, ...] = tuple(TokenRule)
    ways: tuple[KeyExchange, ...] = (KeyExchange.ALL_GATHER, KeyExchange.RING)

    def choices(self) -> Iterator[Choice]:
        """All of them, those with different answers and the same plan once."""
        groupings = {
            size: tuple(_groupings([s.id for s in self.job.batch], size)) for size in self.microbatches
        }
        for replicas, shapes in product(self.replicas, self._shapes()):
            if replicas * sum(cp * pp for cp, pp in shapes.values()) > self.job.cluster.num_ranks:
                continue
            counts = dict.fromkeys(shapes, replicas)
            for cuts, schedule, (rule, settings) in product(
                tuple(self._cuts(shapes)), self.schedules, tuple(self._owners(shapes))
            ):
                stages = disjoint_stages(_with_shapes(self.job, shapes, replicas, schedule), cuts)
                for size in self.microbatches:
                    for groups in groupings[size]:
                        if len(groups) % replicas:
                            continue
                        yield Choice(
                            stages=stages,
                            microbatches=dealt(self.job, groups, counts),
                            schedule=schedule,
                            settings=settings,
                            tokens=rule,
                        )

    def plans(self) -> Iterator[Plan]:
        """Of the choices, those that can be built."""
        for choice in self.choices():
            try:
                plan = build(self.job, choice, self.cost)
            except ValueError:  # a schedule that is not for such stages
                continue
            yield plan

    def _shapes(self) -> Iterator[dict[str, Shape]]:
        for chosen in product(*self.shapes.values()):
            yield dict(zip(self.shapes, chosen, strict=True))

    def _cuts(self, shapes: Mapping[str, Shape]) -> Iterator[dict[str, Cuts]]:
        each = {
            name: tuple(_near_even(len(self.job.model.module(name).layers), pp))
            for name, (_, pp) in shapes.items()
        }
        for chosen in product(*each.values()):
            yield dict(zip(each, chosen, strict=True))

    def _owners(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[TokenRule, Settings]]:
        divided = sorted(name for name, (cp, _) in shapes.items() if cp > 1)
        if not divided:
            yield TokenRule.ZIGZAG, self.job.settings
            return
        for rule, ways in product(self.rules, product(self.ways, repeat=len(divided))):
            modules = tuple(
                ModuleSettings(module=name, key_exchange=way)
                for name, way in zip(divided, ways, strict=True)
                if way is not KeyExchange.ALL_GATHER
            )
            yield rule, replace(self.job.settings, modules=modules)


@dataclass(frozen=True)
class Listed:
    """A space's feasible plans by what they are, with their values.

    Args:
        values: key -> value, see `key_of`.
    """

    values: Mapping[str, float]

    @cached_property
    def optimum(self) -> float:
        return min(self.values.values())

    @cached_property
    def digest(self) -> str:
        """Of all keys and values."""
        digest = hashlib.sha256()
        for key in sorted(self.values):
            digest.update(f"{key} {self.values[key]!r}\n".encode())
        return digest.hexdigest()


def key_of(plan: Plan) -> str:
    """What a plan is, whoever made it."""
    return plan_hash(replace(plan, strategy=NAME))


def _near_even(num_layers: int, num_stages: int) -> Iterator[Cuts]:
    """Cuts whose borders lie next to those of equal parts."""
    even = [round(place * num_layers / num_stages) for place in range(1, num_stages)]
    for inner in combinations(range(1, num_layers), num_stages - 1):
        if all(abs(border - at) <= AWAY for border, at in zip(inner, even, strict=True)):
            yield tuple(pairwise((0, *inner, num_layers)))


def _groupings(ids: list[int], size: int) -> Iterator[tuple[Group, ...]]:
    """Every way to put samples into microbatches of one size, which stand in an order."""
    if not ids:
        yield ()
        return
    for group in combinations(ids, size):
        rest = [member for member in ids if member not in group]
        for others in _groupings(rest, size):
            yield (group, *others)


def _with_shapes(job: Job, shapes: Mapping[str, Shape], replicas: int, schedule: Schedule) -> Job:
    layouts = tuple(ModuleLayout(module=name, cp=cp, pp=pp) for name, (cp, pp) in shapes.items())
    return replace(job, layouts=layouts, replicas=replicas, schedule=schedule)


_LLM = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_ENCODERS = {"vision": {**SIGLIP, "num_hidden_layers": 6}, "audio": {**WHISPER, "encoder_layers": 6}}


def _job(
    name: str,
    *encoders: str,
    trainable: str = "all",
    ranks: int = 4,
    samples: int = 4,
    text_tokens: tuple[int, int] = (256, 2048),
) -> Job:
    """Drawn samples on one node of A40s."""
    configs = {encoder: _ENCODERS[encoder] for encoder in encoders} | {"llm": _LLM}
    content = {
        "name": name,
        "model": {
            "modules": {
                called: {"config": config, "trainable": "all" if called == "llm" else trainable}
                for called, config in configs.items()
            }
        },
        "cluster": {"device": "A40", "nodes": 1, "ranks_per_node": ranks},
        "profile": "A40",
        "batch": {
            "samples": samples,
            "microbatch_samples": 1,
            "mixture": {
                "seed": 5,
                "text_tokens": list(text_tokens),
                "items": {encoder: {"most": 2} for encoder in encoders},
            },
        },
    }
    return job_from_spec(parse_spec(yaml.safe_dump(content), where=name), folder=Path())


_ONE = {"vision": ((1, 1), (1, 2), (2, 1)), "llm": ((1, 1), (1, 2), (1, 3), (2, 1))}
_BOTH = {"vision": ((1, 1), (2, 1)), "audio": ((1, 1), (2, 1)), "llm": ((1, 1), (1, 2), (1, 3), (2, 1))}


def _space(
    job: Job,
    shapes: Mapping[str, tuple[Shape, ...]],
    *,
    replicas: tuple[int, ...] = (1,),
    microbatches: tuple[int, ...] = (1,),
) -> ListedSpace:
    return ListedSpace(
        name=job.name,
        job=job,
        cost=cost_of(job, None, None),
        shapes=shapes,
        replicas=replicas,
        microbatches=microbatches,
    )


def spaces() -> tuple[ListedSpace, ...]:
    """Five of them, each with more than ten thousand feasible plans."""
    renamed = {"audio": _ONE["vision"], "llm": _ONE["llm"]}
    return (
        _space(_job("vision trained", "vision"), _ONE),
        _space(_job("vision frozen", "vision", trainable="projector", text_tokens=(128, 1024)), _ONE),
        _space(_job("audio", "audio", text_tokens=(128, 1024)), renamed),
        _space(_job("both", "vision", "audio", ranks=5), _BOTH),
        _space(
            _job("replicas", "vision", samples=4, text_tokens=(128, 3072)),
            {"vision": ((1, 1), (1, 2), (2, 1)), "llm": ((1, 1), (2, 1), (1, 2), (1, 3))},
            replicas=(1, 2),
            microbatches=(1, 2),
        ),
    )
