"""The plans of the fidelity suite on this machine's cores: one thing is varied at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from experiments.demo_job import demo_model
from experiments.fidelity import divided, many_ranks
from experiments.fidelity.work import (
    LLM,
    Cuts,
    Plans,
    Work,
    audio_encoder,
    decoder,
    image_encoder,
    plan_of,
    sample,
    text_only,
    text_samples,
    this_machine,
    with_encoders,
)
from workbench.balance.tokens.policies import Policy, contiguous, longest_first, zigzag
from workbench.cost.hardware import Cluster, Link
from workbench.model.trainable import Trainable
from workbench.plan.check import check
from workbench.plan.plan import Plan, Recompute
from workbench.plan.token_shards import Scope, token_shards
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual

IMAGE = 196  # tokens of 224 x 224 pixels in patches of 16
CLIP = 150  # Whisper frames
PAIR = 2  # ranks of the clean part
CROWD = 4


class Part(StrEnum):
    """The claim a plan belongs to."""

    CLEAN = "clean"  # two ranks, each pinned to a core of its own
    CONTEXT = "context"  # two ranks that share the tokens of the language model
    DIVIDED = "divided"  # two ranks that divide each layer's weights
    CROWDED = "crowded"  # more ranks than cores
    EMULATED = "emulated"  # more ranks than this machine has, each on a core of its own
    REHEARSAL = "rehearsal"  # run while calibrating, never judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan of the suite; plans of equal `job` and `part` are ranked against each other."""

    name: str
    job: str
    part: Part
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A plan that was refused, with the reason."""

    name: str
    reason: str


Refused = Callable[[LeftOut], None]
Machine = Callable[[Part, Link], Cluster]


def cases(
    link: Link, refused: Refused = lambda left_out: None, machine: Machine | None = None
) -> tuple[Case, ...]:
    """Return all plans in execution order; those a schedule refuses are passed to `refused`.

    `machine` makes the cluster that the ranks of a part run on; None: this machine's cores.
    """
    planned: list[Case] = []
    for part, work, plans in (
        (Part.CLEAN, text_work(), _schedules),
        (Part.CLEAN, text_work(), _text_plans),
        *((Part.CLEAN, image_work(mix), _image_plans) for mix in IMAGE_MIXES),
        (Part.CLEAN, three_work(), _three_plans),
        (Part.CLEAN, mixed_lengths_work(), _length_plans),
        *((Part.CLEAN, long_work(length), _long_plans) for length in LONG_TOKENS),
        *((Part.CONTEXT, shared_text_work(mask), _shared_text_plans) for mask in ("causal", "prefix_lm")),
        (Part.DIVIDED, text_work(), divided.text_plans),
        (Part.DIVIDED, image_work("everything"), divided.image_plans),
        (Part.DIVIDED, divided.experts_work(), divided.expert_plans),
        *((Part.CROWDED, masked_work(mask), _masked_plans) for mask in MASKED),
        (Part.CROWDED, crowded_work(), _crowded_plans),
        (Part.EMULATED, text_work(), many_ranks.text_plans),
        *((Part.EMULATED, image_work(mix), many_ranks.image_plans) for mix in ("projector", "everything")),
        (Part.EMULATED, three_work(), many_ranks.three_plans),
    ):
        cluster = (machine or _cluster_of)(part, link)
        for name, make in plans(work, cluster):
            full = f"{work.name}, {name}"
            try:
                plan = make()
            except ValueError as error:
                refused(LeftOut(name=full, reason=" ".join(str(error).split())))
                continue
            planned.append(Case(name=full, job=work.name, part=part, plan=plan))
    return tuple(planned)


def _cluster_of(part: Part, link: Link) -> Cluster:
    if part is Part.EMULATED:
        return this_machine(link, many_ranks.MANY, num_cores=many_ranks.MANY)
    return this_machine(link, CROWD if part is Part.CROWDED else PAIR)


def quick(all_cases: Sequence[Case], count: int) -> tuple[Case, ...]:
    """Up to `count` plans spread evenly over all, so that every part is represented."""
    if count >= len(all_cases):
        return tuple(all_cases)
    if count < 1:
        raise ValueError(f"want at least one plan, got {count}")
    return tuple(all_cases[index * len(all_cases) // count] for index in range(count))


# ---- text: split points, microbatch counts, schedules, replicas, recompute ----


def text_work() -> Work:
    """A Llama of six blocks, all trained, on eight texts of 128 tokens."""
    return Work(
        name="text", model=text_only(decoder("llama", width=512, blocks=6)), batch=text_samples([128] * 8)
    )


def halves(first: int, num_layers: int) -> Cuts:
    """Cut the language model into two stages."""
    return {LLM: ((first, (0,)), (num_layers - first, (1,)))}


def _schedules(work: Work, cluster: Cluster) -> Plans:
    """Every kind of schedule applicable to text alone, in microbatches of one text."""
    for kind in ScheduleKind:
        if kind.spec.shares_ranks_in_part:  # without encoders it is 1F1B
            continue
        schedule = usual(kind)
        num_stages = 2 * schedule.virtual_stages
        ranks = [rank_block(schedule, index, num_stages) for index in range(num_stages)]
        cuts: Cuts = {LLM: tuple((8 // len(ranks), (rank,)) for rank in ranks)}
        yield str(kind), partial(plan_of, work, cluster, cuts, samples=(1,) * 8, schedule=schedule)


def _text_plans(work: Work, cluster: Cluster) -> Plans:
    plan, halved = partial(plan_of, work, cluster), partial(plan_of, work, cluster, halves(4, 8))
    for first in (2, 3, 5):
        yield f"{first} | {8 - first} layers", partial(plan, halves(first, 8), samples=(1,) * 8)
    for count in (4, 2, 1):
        yield f"{count} microbatches", partial(halved, samples=(8 // count,) * count)
    for sizes in ((3, 2, 2, 1), (1, 4, 1, 2)):
        yield f"microbatches of {sizes}", partial(halved, samples=sizes)
    gpipe = Schedule(kind=ScheduleKind.GPIPE)
    yield "gpipe of (3, 2, 2, 1)", partial(halved, samples=(3, 2, 2, 1), schedule=gpipe)
    yield "recompute", partial(halved, samples=(1,) * 8, recompute=Recompute.FULL)
    whole: list[Cuts] = [{LLM: ((8, (rank,)),)} for rank in range(PAIR)]
    for count in (8, 4):
        yield f"2 replicas, {count} microbatches", partial(plan, whole, samples=(8 // count,) * count)


# ---- images: frozen mixes, encoder beside or before the language model, deferral-like sizes ----

IMAGE_MIXES = {
    "projector": (Trainable.PROJECTOR, Trainable.NONE),
    "projector and llm": (Trainable.PROJECTOR, Trainable.ALL),
    "everything": (Trainable.ALL, Trainable.ALL),
    "llm": (Trainable.NONE, Trainable.ALL),
}


def image_work(mix: str) -> Work:
    """SigLIP and a Qwen2; six samples with none, one or two images."""
    vision, llm = IMAGE_MIXES[mix]
    language = decoder("qwen2", width=384, blocks=4, trainable=llm)
    encoder = image_encoder("siglip_vision_model", width=384, blocks=4, llm_width=384, trainable=vision)
    batch = tuple(
        sample(index, ("text", 32), *[("image", IMAGE)] * images, ("text", 64 + 32 * (index % 2)))
        for index, images in enumerate((1, 2, 0, 1, 1, 1))
    )
    return Work(name=f"image, {mix}", model=with_encoders(language, encoder), batch=batch)


def _image_plans(work: Work, cluster: Cluster) -> Plans:
    """Plans of 6 vision layers and 6 language-model layers."""
    six = (1,) * 6
    plan = partial(plan_of, work, cluster)
    apart: Cuts = {"vision": ((6, (0,)),), LLM: ((6, (1,)),)}
    yield "encoder | llm", partial(plan, apart, samples=six)
    beside: Cuts = {"vision": ((3, (0,)), (3, (1,))), LLM: ((3, (0,)), (3, (1,)))}
    yield "both cut in half", partial(plan, beside, samples=six)
    joined: Cuts = {"vision": ((6, (0,)),), LLM: ((2, (0,)), (4, (1,)))}
    yield "encoder + 2 | 4", partial(plan, joined, samples=six)
    uneven = {"vision": (2, 1, 2, 1), LLM: (1, 2, 1, 2)}
    yield "encoder | llm, uneven microbatches", partial(plan, apart, samples=uneven)


# ---- three modules ----


def three_work() -> Work:
    """CLIP, Whisper and a Llama: projectors and the language model are trained."""
    language = decoder("llama", width=384, blocks=3)
    vision = image_encoder(
        "clip_vision_model", width=256, blocks=4, llm_width=384, trainable=Trainable.PROJECTOR
    )
    audio = audio_encoder(width=256, blocks=2, frames=CLIP, llm_width=384, trainable=Trainable.PROJECTOR)
    batch = tuple(
        sample(
            index,
            ("text", 24),
            *[("image", IMAGE)] * (index != 4),
            ("text", 24),
            *[("audio", CLIP)] * (index != 1),
            ("text", 40),
            class_tokens={"image": 1},
        )
        for index in range(6)
    )
    return Work(name="image and audio", model=with_encoders(language, vision, audio), batch=batch)


def _three_plans(work: Work, cluster: Cluster) -> Plans:
    """Plans of 6 vision, 4 audio and 5 language-model layers."""
    cuts_by_name: dict[str, Cuts] = {
        "encoders | llm": {"vision": ((6, (0,)),), "audio": ((4, (0,)),), LLM: ((5, (1,)),)},
        "image | audio + llm": {"vision": ((6, (0,)),), "audio": ((4, (1,)),), LLM: ((5, (1,)),)},
        "encoders + 2 | 3": {"vision": ((6, (0,)),), "audio": ((4, (0,)),), LLM: ((2, (0,)), (3, (1,)))},
    }
    for name, cuts in cuts_by_name.items():
        yield name, partial(plan_of, work, cluster, cuts, samples=(1,) * 6)


# ---- lengths ----

LONG_TOKENS = (512, 1024)


def mixed_lengths_work() -> Work:
    """Texts of 64 to 448 tokens."""
    lengths = [448, 64, 128, 256, 192, 64, 320, 128]
    return Work(
        name="mixed lengths",
        model=text_only(decoder("llama", width=384, blocks=4)),
        batch=text_samples(lengths),
    )


def _length_plans(work: Work, cluster: Cluster) -> Plans:
    for sizes in ((1,) * 8, (1, 3, 2, 2), (2, 2, 2, 2)):
        yield f"microbatches of {sizes}", partial(plan_of, work, cluster, halves(3, 6), samples=sizes)
    longest_last = replace(work, batch=tuple(sorted(work.batch, key=lambda one: one.num_tokens)))
    by_length = partial(plan_of, longest_last, cluster, halves(3, 6), samples=(1,) * 8)
    yield "one by one, longest last", by_length


def long_work(length: int) -> Work:
    """A narrower Llama on a few long texts."""
    model = text_only(decoder("llama", width=256, blocks=4))
    return Work(name=f"texts of {length}", model=model, batch=text_samples([length] * 4))


def _long_plans(work: Work, cluster: Cluster) -> Plans:
    for first in (3, 4):
        cut = partial(plan_of, work, cluster, halves(first, 6), samples=(1,) * 4)
        yield f"{first} | {6 - first} layers", cut


# ---- shared tokens: who owns which tokens, under which mask ----

POLICIES: Mapping[str, Policy] = {"zigzag": zigzag, "longest first": longest_first, "contiguous": contiguous}
BLOCK = 32
MASKED = ("EP", "EE", "MP")


def shared_text_work(mask: str) -> Work:
    """Three texts of a question and an answer on a Llama of two blocks."""
    batch = tuple(sample(index, ("text", 320), ("text", 448), mask=mask) for index in range(3))
    return Work(
        name=f"shared text, {mask}", model=text_only(decoder("llama", width=256, blocks=2)), batch=batch
    )


def masked_work(mask: str) -> Work:
    """Encoder outputs prepended (EP), embedded (EE), or both kinds of samples packed (MP)."""
    language = decoder("llama", width=256, blocks=2)
    encoder = image_encoder(
        "siglip_vision_model", width=64, blocks=1, llm_width=256, trainable=Trainable.PROJECTOR
    )
    prepended = (("image", IMAGE), ("image", IMAGE), ("text", 376))
    embedded = (("text", 100), ("image", IMAGE), ("text", 176), ("image", IMAGE), ("text", 100))
    order = {"EP": (prepended,) * 3, "EE": (embedded,) * 3, "MP": (embedded, prepended, embedded)}[mask]
    batch = tuple(sample(index, *parts, mask="multimodal") for index, parts in enumerate(order))
    return Work(name=f"shared tokens, {mask}", model=with_encoders(language, encoder), batch=batch)


def _shared_text_plans(work: Work, cluster: Cluster) -> Plans:
    """Plans with all layers on both ranks."""
    yield from _sharded(work, cluster, {LLM: ((4, (0, 1)),)}, tuple(POLICIES))


def _masked_plans(work: Work, cluster: Cluster) -> Plans:
    """The language model on two ranks, a small encoder on a third: three ranks on two cores."""
    cuts: Cuts = {"vision": ((3, (2,)),), LLM: ((4, (0, 1)),)}
    yield from _sharded(work, cluster, cuts, ("longest first", "contiguous"))


def _sharded(work: Work, cluster: Cluster, cuts: Cuts, policies: Sequence[str]) -> Plans:
    def make(policy: Policy) -> Plan:
        plan = plan_of(work, cluster, cuts, samples=(1,) * 3)
        shards = token_shards(plan, LLM, policy, block_tokens=BLOCK, scope=Scope.ROW)
        sharded = replace(plan, token_shards=shards)
        check(sharded)
        return sharded

    for name in policies:
        yield name, partial(make, POLICIES[name])


# ---- more ranks than cores ----


def crowded_work() -> Work:
    """The demo's model on four samples, projectors and language model trained."""
    batch = tuple(
        sample(index, ("text", 24), ("image", IMAGE), ("text", 24), ("audio", CLIP), ("text", 40))
        for index in range(4)
    )
    return Work(name="four ranks on two cores", model=demo_model(Trainable.ALL), batch=batch)


def _crowded_plans(work: Work, cluster: Cluster) -> Plans:
    """Plans of 18 vision, 6 audio and 6 language-model layers."""
    two: Sequence[tuple[int, tuple[int]]] = ((3, (2,)), (3, (3,)))
    cuts_by_name: dict[str, Cuts] = {
        "9 | 9, audio | llm": {
            "vision": ((9, (0,)), (9, (1,))),
            "audio": ((6, (2,)),),
            LLM: ((6, (3,)),),
        },
        "vision | audio | 3 | 3": {"vision": ((18, (0,)),), "audio": ((6, (1,)),), LLM: two},
        "10 | 8, audio | 3 | 3": {"vision": ((10, (0,)), (8, (1,))), "audio": ((6, (1,)),), LLM: two},
    }
    for name, cuts in cuts_by_name.items():
        yield name, partial(plan_of, work, cluster, cuts, samples=(1,) * 4)
