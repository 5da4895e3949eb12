"""Plans to measure speed on: vision + audio + LLM of published sizes on 24 stages, 24 GPUs and 1,296 GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.trainable import Trainable
from workbench.model.zoo import from_shape
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import draft_plan

PROFILE = "H100"
IMAGE_TOKENS, SOUND_TOKENS, TEXT_TOKENS = 729, 1500, 512
NVLINK = Link(name="NVLink 4", bytes_per_s=450e9, latency_s=2e-6)
INFINIBAND = Link(name="InfiniBand NDR", bytes_per_s=50e9, latency_s=5e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters of one plan: module -> (pipeline stages, tensor-parallel degree), in rank order.

    `is_drawn`: every sample has sizes of its own, so that no two replicas are equal.
    """

    name: str
    llm: str
    layout: dict[str, tuple[int, int]]
    replicas: int
    microbatches: int  # of each replica
    samples: int  # of each microbatch
    is_drawn: bool = False


CASES = (
    Case(
        name="24 stages",
        llm="llama-3.1-8b",
        layout={"vision": (4, 1), "audio": (4, 1), "llm": (16, 1)},
        replicas=1,
        microbatches=256,
        samples=1,
    ),
    Case(
        name="24 GPUs",
        llm="llama-3.1-8b",
        layout={"vision": (2, 2), "audio": (2, 2), "llm": (4, 4)},
        replicas=1,
        microbatches=24,
        samples=1,
    ),
    Case(
        name="1296 GPUs",
        llm="llama-3.1-70b",
        layout={"vision": (1, 4), "audio": (1, 4), "llm": (8, 8)},
        replicas=18,
        microbatches=48,
        samples=2,
    ),
)


def model(llm: str, number: int = 0) -> ModelGraph:
    """SigLIP and Whisper with projectors in front of an LLM; the projectors and the LLM are trained.

    Layers of models with other numbers have other names, and so are equal to none of this one's.
    """
    text = from_shape(llm, module="llm")
    width = text.layers[0].out_width
    encoders = [
        from_shape(shape, module=name, llm_width=width, trainable=Trainable.PROJECTOR)
        for name, shape in (("vision", "siglip-so400m-14-384"), ("audio", "whisper-large-v3-enc"))
    ]
    if number:
        text, *encoders = (_renamed(module, number) for module in (text, *encoders))
    return connect("vision-audio-llm", *((encoder, text) for encoder in encoders))


def _renamed(module: Module, number: int) -> Module:
    layers = tuple(replace(layer, name=f"{layer.name} of plan {number}") for layer in module.layers)
    return replace(module, layers=layers)


def plan_of(case: Case, number: int = 0) -> Plan:
    """Plan of a case on nodes of eight GPUs.

    Plans of other numbers have other names of layers, other cuts into stages where a module has several,
    and other sizes of all samples.
    """
    graph = model(case.llm, number)
    job = Job(
        name=case.name,
        model=graph,
        cluster=cluster_of(case),
        batch=samples_of(case, number),
        microbatch_samples=case.samples,
        replicas=case.replicas,
    )
    return with_programs(replace(draft_plan(job, "bench"), stages=tuple(_stages(case, graph, number))))


def cluster_of(case: Case) -> Cluster:
    """A cluster with as many nodes as the case's ranks need."""
    num_ranks = case.replicas * sum(stages * tp for stages, tp in case.layout.values())
    node = Node(device=PROFILE, num_ranks=8, memory_bytes=80 * 10**9)
    return uniform("bench", node, num_nodes=-(-num_ranks // 8), intra=NVLINK, inter=INFINIBAND)


def _stages(case: Case, graph: ModelGraph, number: int) -> Iterator[Stage]:
    """Stages replica by replica and module by module, cut evenly except for one cut set by the number."""
    stage, rank = 0, 0
    for replica in range(case.replicas):
        for module, (pp, tp) in case.layout.items():
            for first, last in _cuts(graph.module(module), pp, number):
                ranks = tuple(range(rank, rank + tp))
                yield Stage(id=stage, module=module, replica=replica, layers=(first, last), ranks=(ranks,))
                stage, rank = stage + 1, rank + tp


def _cuts(module: Module, num_stages: int, number: int) -> list[tuple[int, int]]:
    bounds = [round(i * len(module.layers) / num_stages) for i in range(num_stages + 1)]
    if number and num_stages > 1:
        turn, index = divmod(number, num_stages - 1)
        bounds[1 + index] += -1 if turn % 2 else 1
    return list(pairwise(bounds))


def samples_of(case: Case, number: int = 0) -> tuple[Sample, ...]:
    """The batch of a case; another number draws samples of other sizes."""
    return tuple(_samples(case, number))


def _samples(case: Case, number: int) -> Iterator[Sample]:
    rng = Random(number)
    sizes = {
        "text": TEXT_TOKENS - number,
        "vision": IMAGE_TOKENS - number,
        "audio": SOUND_TOKENS - number,
    }
    for sample in range(case.replicas * case.microbatches * case.samples):
        segments = []
        for modality, largest in sizes.items():
            tokens = rng.randint(largest // 2, largest) if case.is_drawn else largest
            segments.append(Segment(modality, 0, tokens, tokens))
        yield Sample(sample, tuple(segments))
