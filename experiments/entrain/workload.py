"""Encoder and LLM seconds of samples of Entrain's four data sets, by our corpora and cost model."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from experiments.cornstarch.modelled import A40, a40_cost
from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.data.corpora import corpus
from workbench.data.corpus import qwen2_vl_tokens
from workbench.data.sample import Sample
from workbench.data.sizes import Rules, Sizes, samples_of
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.zoo import from_shape
from workbench.planner.sample_work import SampleWork, sample_work
from workbench.units import GB, US_PER_S

CORPUS_OF = {
    "SynthChartNet": "synthchartnet-like",
    "LLaVA-150k": "llava-150k-like",
    "ChartQA": "chartqa-bars",
    "CocoQA": "cocoqa-like",
}


class Scale(NamedTuple):
    """A variation of a corpus with assumed sizes: factors on the lengths of texts and sides."""

    text: float = 1.0
    side: float = 1.0


DPI = 120  # of SynthChartNet's charts, as the corpus assumes
VARIED = {
    "SynthChartNet, half the text": Scale(text=0.5),
    "SynthChartNet, twice the text": Scale(text=2.0),
    "SynthChartNet at 72 dpi": Scale(side=72 / DPI),
    "SynthChartNet at 200 dpi": Scale(side=200 / DPI),
}
LLM_OF = {"Llama3-1b": "llama-3.2-1b", "Llama3-3b": "llama-3.2-3b"}
PANELS = tuple(product(LLM_OF, CORPUS_OF))  # of most figures
MEMORY_BYTES = 48 * 10**9  # of an A40
RULES = Rules(image=lambda height, width: [qwen2_vl_tokens(height, width)])
TP, GPUS_PER_REPLICA = 2, 16
POOL_SAMPLES = 20_000


@cache
def model(llm: str) -> ModelGraph:
    """Qwen2.5-VL's vision encoder in front of a Llama 3; the paper names nothing frozen."""
    text = from_shape(LLM_OF[llm], module="llm")
    vision = from_shape("qwen2.5-vl-vision", module="vision", llm_width=text.layers[0].out_width)
    return connect(f"qwen2.5-vision-{llm}", (vision, text))


def a40_nodes(num_nodes: int) -> Cluster:
    """Nodes of four A40s; NVLink in pairs counts as NVLink, InfiniBand 200 Gb/s between nodes."""
    node = Node(device="A40", num_ranks=4, memory_bytes=MEMORY_BYTES)
    return uniform(
        "a40-testbed",
        node,
        num_nodes=num_nodes,
        intra=Link(name="nvlink", bytes_per_s=50 * GB, latency_s=5 / US_PER_S),
        inter=Link(name="infiniband", bytes_per_s=22 * GB, latency_s=8 / US_PER_S),
    )


def job_of(dataset: str, llm: str, batch: tuple[Sample, ...], *, pp: tuple[int, int] | None = None) -> Job:
    """One replica of the paper's setup: tp 2, four samples a microbatch on average."""
    stages = pp or (None, None)
    return Job(
        name=f"{dataset}-{llm}",
        model=model(llm),
        cluster=a40_nodes(4),
        batch=batch,
        microbatch_samples=4,
        layouts=(
            ModuleLayout(module="vision", pp=stages[0], tp=TP),
            ModuleLayout(module="llm", pp=stages[1], tp=TP),
        ),
        profile=A40,
    )


def batch_of(dataset: str, num: int, seed: int) -> tuple[Sample, ...]:
    """Samples of the corpus that stands for a data set, or of one of `VARIED`."""
    if dataset not in VARIED:
        return samples_of(corpus(CORPUS_OF[dataset]).draw(num, seed), RULES)
    charts = corpus(CORPUS_OF["SynthChartNet"]).draw(num, seed)
    return samples_of([_scaled(sizes, VARIED[dataset]) for sizes in charts], RULES)


def _scaled(sizes: Sizes, scale: Scale) -> Sizes:
    return replace(
        sizes,
        text_tokens=tuple(round(tokens * scale.text) for tokens in sizes.text_tokens),
        images=tuple((round(h * scale.side), round(w * scale.side)) for h, w in sizes.images),
    )


@cache
def work_pool(dataset: str, llm: str) -> SampleWork:
    """Seconds of many samples, forward and backward on tp 2."""
    return sample_work(job_of(dataset, llm, batch_of(dataset, POOL_SAMPLES, 0)), a40_cost())


def mean_ratio(dataset: str, llm: str) -> float:
    """Vision over LLM seconds of the whole data set."""
    work = work_pool(dataset, llm)
    return float_sum(work.encoder_s) / float_sum(work.llm_s)


def batch_draws(dataset: str, llm: str, seed: int) -> Callable[[int], tuple[float, float]]:
    """A function: number of samples -> vision and LLM seconds of a new random batch."""
    work, rng = work_pool(dataset, llm), random.Random(seed)

    def draw(num_samples: int) -> tuple[float, float]:
        indices = [rng.randrange(POOL_SAMPLES) for _ in range(num_samples)]
        return float_sum(work.encoder_s[index] for index in indices), float_sum(
            work.llm_s[index] for index in indices
        )

    return draw
