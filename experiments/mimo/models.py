"""The paper's models, clusters and batches, from the sizes that this folder fixes."""

import csv
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness.record import RESULTS
from workbench.cost.execution import Execution, KeyTravel
from workbench.cost.hardware import Cluster, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.job.job import Job
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.module_layers import block_layers, lm_head, patch_embedding, token_embedding
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.transformer import Block, Heads, Mlp, Norm, vit_block
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Precision, Settings

FOLDER = Path(__file__).parent
PROFILE = "H100"
VISION, LLM = "vision", "llm"
PATCH_ELEMENTS = 3 * 14 * 14
NODE_RANKS = 8


class Images(StrEnum):
    """What a context-parallel rank of H encodes of its sample: WHOLE images, or a part of each (CUT)."""

    WHOLE = "whole"
    CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Values for what the paper leaves open, fixed by `assumptions.csv` with ranges."""

    llm_tokens_per_image: float
    patches_per_llm_token: float
    size_factor: float
    llm_microbatch_samples: float
    under_context: Images = Images.WHOLE


@cache
def assumptions() -> Assumptions:
    """The nominal assumptions, with which everything is judged."""
    values = {row["name"]: float(row["value"]) for row in _rows("assumptions")}
    return Assumptions(
        **values, under_context=Images(protocol()["encoder_under_context_parallelism"]["judged"])
    )


@cache
def protocol() -> Mapping[str, Any]:
    """The protocol that was fixed before any score was known."""
    return tomllib.loads((FOLDER / "protocol.toml").read_text(encoding="utf-8"))


def variations() -> dict[str, Assumptions]:
    """Assumptions with one at a time at either end of its range."""
    variants = {}
    for row in _rows("assumptions"):
        for end in ("low", "high"):
            if row[end] != row["value"]:
                change: dict[str, Any] = {row["name"]: float(row[end])}
                variants[f"{row['name']}={row[end]}"] = replace(assumptions(), **change)
    return variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A row's model, sequence and batch."""

    encoder: str
    llm: str
    sequence_tokens: int
    vision_pct: float
    num_gpus: int
    num_samples: int


@cache
def job_of(workload: Workload, assumed: Assumptions, copies: int = 1) -> Job:
    """The row as a job on H100 nodes of eight, with sequence parallelism, everything trained.

    Samples are alike: images of one size, and text for the rest of the sequence.

    Args:
        workload: the row.
        assumed: what the paper leaves open.
        copies: of every image in a sample, each of which gives the LLM its part of the image's tokens. So
            many context-parallel ranks that share them out encode as much as if each did all images;
            only their projector has an image's tokens once among them, 3 % of the encoder's forward.
    """
    per_image = round(assumed.llm_tokens_per_image)
    num_images = round(workload.sequence_tokens * workload.vision_pct / 100 / per_image)
    image = ItemTokens(max(1, round(per_image * assumed.patches_per_llm_token)), per_image // copies)
    batch = fixed_samples(
        workload.num_samples,
        text_tokens=workload.sequence_tokens - num_images * per_image,
        items={VISION: (image,) * (num_images * copies)},
    )
    return Job(
        name=f"{workload.encoder}+{workload.llm}",
        model=model_of(workload.encoder, workload.llm, assumed.size_factor),
        cluster=cluster_of(workload.num_gpus),
        batch=batch,
        microbatch_samples=round(assumed.llm_microbatch_samples),
        settings=Settings(
            precision=Precision.BFLOAT16,
            optimizer_precision=Precision.FLOAT32,
            kernels=Kernels.MEGATRON_SEQUENCE,
        ),
        profile=PROFILE,
    )


@cache
def machine() -> CostModel:
    """H100s with ring exchange of keys, at the profile's rates."""
    return CostModel(load_profile(PROFILE), Execution(keys=KeyTravel.BEHIND))


@cache
def calibrated() -> CostModel:
    """The machine with the numbers that `calibration` fitted on printed homogeneous step times."""
    fitted = json.loads((RESULTS / "mimo_calibration.json").read_text())["ours"]
    return at_rates(fitted["fitted/collective_rate"], fitted["fitted/host_kernel_s"])


def at_rates(collective_rate: float, host_kernel_s: float) -> CostModel:
    """The machine with collectives at a share of the profile's rate, and host seconds per kernel."""
    return machine().executed(
        replace(
            machine().execution,
            collective_rate=collective_rate,
            reduction_rate=collective_rate,
            host_kernel_s=host_kernel_s,
        )
    )


@cache
def model_of(encoder: str, llm: str, size_factor: float) -> ModelGraph:
    """An encoder with an MLP projector in front of an LLM, both trained."""
    shapes = {row["name"]: row for row in _rows("module_sizes")}
    body = _llm(shapes[llm], size_factor)
    width = body.layers[0].out_width
    return connect(f"{encoder}+{llm}", (_encoder(shapes[encoder], width, size_factor), body))


def cluster_of(num_gpus: int) -> Cluster:
    """Nodes of eight H100s on NVLink, with a 400 Gb/s card per GPU."""
    profile = load_profile(PROFILE)
    intra, inter = profile.machine_link("intra").link, profile.machine_link("inter").link
    size = min(NODE_RANKS, num_gpus)
    node = Node(device=profile.device, num_ranks=size, memory_bytes=profile.memory_bytes, num_cards=size)
    return uniform(PROFILE, node, num_nodes=-(-num_gpus // size), intra=intra, inter=inter)


def _encoder(row: dict[str, str], llm_width: int, factor: float) -> Module:
    width = int(row["hidden"])
    block = vit_block(width=width, num_heads=int(row["heads"]), ffn=int(row["ffn"]), activation="gelu")
    projection = Projection(kind=Projector.MLP, in_width=width, out_width=llm_width, norm=Norm.LAYER)
    layers = (
        patch_embedding(patch_elements=PATCH_ELEMENTS, width=width, bias=True),
        *block_layers(block, round(int(row["layers"]) * factor)),
        projector_layer(projection),
    )
    return Module(name=VISION, modality=VISION, layers=layers)


def _llm(row: dict[str, str], factor: float) -> Module:
    width, vocab = int(row["hidden"]), int(row["vocab"])
    block = Block(
        width=width,
        heads=Heads(
            num=int(row["heads"]),
            num_kv=int(row["kv_heads"]),
            dim=int(row["head_dim"]),
            causal=True,
            fused=True,
            rotary=True,
        ),
        mlp=Mlp(width=int(row["ffn"]), gated=True, activation="silu", fused=True),
        norm=Norm.RMS,
    )
    layers = (
        token_embedding(vocab, width),
        *block_layers(block, round(int(row["layers"]) * factor)),
        lm_head(vocab, width, Norm.RMS),
    )
    return Module(name=LLM, modality=TEXT, layers=layers)


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))
