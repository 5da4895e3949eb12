"""Small runnable jobs: plans that `check` accepts run for a step in one process."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import json_bytes
from runtime.data.batches import SyntheticSource
from runtime.emulation.emulate import emulate
from runtime.reference import reference_step
from runtime.run_settings import RunSettings
from workbench.job.job import job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.masks.patterns import CAUSAL, PATTERNS
from workbench.model.families.family import Architecture, Encoder, Example
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.model_graph import TEXT
from workbench.plan.parameter_shards import is_sharded
from workbench.plan.plan import KeyExchange, Plan
from workbench.plan.runnable import check_runnable
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import BY_NAME, PLANNERS
from workbench.timing.accept import accept

LLM = "llm"
RANKS = 12
STEP = RunSettings(steps=1, warmup=0, timeout_s=8.0)
ENCODERS = [family for family in ARCHITECTURES.values() if family.role in ("vision", "audio")]
GENERATORS = [family for family in ARCHITECTURES.values() if family.role == "generator"]
DECODERS = [family for family in ARCHITECTURES.values() if family.modality == TEXT]
MASKS = (
    *(name for name, pattern in PATTERNS.items() if not pattern.wanted),
    "sliding_window(window=3)", "two_sided_window(before=2, after=1)", "lambda_shaped(sinks=1, window=2)",
    "shared_question(question=2, answers=2)",
)  # fmt: skip


class AcceptedError(Exception):
    """An accepted plan does not run."""


class RefusedError(Exception):
    """A refused plan runs."""


def drawn(rng: Random) -> Any:
    """A random job with its strategy and changes to its plan."""
    encoders = {family.role: family for family in rng.sample(ENCODERS, rng.choice((0, 1, 1, 2)))}
    architectures: dict[str, Architecture] = dict(encoders)
    if rng.random() < 0.1:
        architectures |= {"generator": rng.choice(GENERATORS)}
    examples = {name: rng.choice(list(family.examples.values())) for name, family in architectures.items()}
    read_by = {example.read_by for example in examples.values()} - {"llama"}
    decoder = rng.choice([f for f in DECODERS if f.model_type in read_by] or DECODERS)
    examples[LLM], architectures[LLM] = rng.choice(list(decoder.examples.values())), decoder
    modules = {name: _module(architectures[name], example, rng) for name, example in examples.items()}
    job = {
        "name": "small",
        "model": {"modules": modules},
        "cluster": {
            "local": {"ranks": RANKS, "cores": 2},
            "memory_gib": 4,
            "intra": {"gb_per_s": 1.0, "latency_us": 100.0},
        },
        "batch": _batch(examples, rng),
        "layouts": {name: _layout(rng) for name in modules},
        "schedule": {"kind": str(_often(ScheduleKind.ONE_F_ONE_B, rng, *ScheduleKind))},
        "precision": rng.choice(("float32", "bfloat16", "float64")),
        "kernels": rng.choice(("auto", "eager", "fused")),
        "profile": "H100",
    }
    if rng.random() < 0.2:
        job["optimizer_precision"] = "float32"
    return {"job": job, "strategy": _often("cornstarch", rng, *PLANNERS), "items": _items(examples, rng)}


def _often(usual: Any, rng: Random, *rare: Any) -> Any:
    return usual if rng.random() < 0.5 else rng.choice(rare)


def _module(family: Architecture, example: Example, rng: Random) -> dict[str, Any]:
    config = {"model_type": family.model_type, **example.config}
    if rng.random() < 0.25:
        name = rng.choice([name for name, value in config.items() if isinstance(value, int)])
        value = config[name]
        config[name] = not value if isinstance(value, bool) else rng.choice((1, 2, 3, value + 1, 2 * value))
    if family.modality == TEXT:
        return {"config": config, "trainable": rng.choice(("all", "none"))}
    module: dict[str, Any] = {"config": config, "trainable": rng.choice(("all", "projector", "none"))}
    if rng.random() < 0.5:
        module["projector"] = rng.choice(("linear", "mlp", *PROJECTORS))
    if isinstance(family, Encoder) and rng.random() < 0.1:
        module["feature_layer"] = rng.choice((-1, -2, -3))
    return module


PROJECTORS: tuple[list[dict[str, Any]], ...] = (
    [{"linear": 16}, {"act": "gelu"}, {"linear": "out"}],
    [{"merge": 4}, {"linear": "out"}],
    [{"merge": 2, "how": "mean"}, {"norm": "rms"}, {"linear": "out", "bias": False}],
    [{"merge": 4, "how": "interleave"}, {"linear": 64}, {"act": "swiglu"}, {"linear": "out"}],
)


def _batch(examples: Mapping[str, Example], rng: Random) -> dict[str, Any]:
    items: dict[str, dict[str, Any]] = {}
    mixed = rng.random() < 0.4
    for name, example in examples.items():
        if name != LLM and rng.random() < 0.9:
            items[name] = (
                {"most": rng.choice((1, 2)), "missing": rng.choice((0.0, 0.5, 1.0))} if mixed else {}
            )
            if not mixed:
                items[name]["each"] = rng.choice((0, 1, 1, 2))
            if rng.random() < 0.9:
                items[name]["tokens"] = list(example.tokens)
    text = rng.choice((1, 2, 7, 16))
    sizes: dict[str, Any] = {
        "text_tokens": [text, text + rng.randrange(9)] if mixed else text,
        "items": items,
    }
    masks = [_often(CAUSAL, rng, *MASKS) for _ in range(rng.choice((1, 1, 2)))]
    return {
        "samples": rng.choice((4, 4, 8)),
        "microbatch_samples": rng.choice((1, 1, 2)),
        "replicas": rng.choice((1, 1, 1, 2)),
        "mask": masks if len(masks) > 1 else masks[0],
        ("mixture" if mixed else "fixed"): sizes | ({"seed": rng.randrange(9)} if mixed else {}),
    }


def _layout(rng: Random) -> dict[str, Any]:
    layout: dict[str, Any] = {"pp": rng.choice((1, 1, 2))}
    for name, values in CHOICES.items():
        if rng.random() < 0.1:
            layout[name] = rng.choice(values)
    return layout


CHOICES: Mapping[str, tuple[Any, ...]] = {
    "tp": (2, 2, 4),
    "cp": (2, 2, 3),
    "ep": (2,),
    "recompute": ("full", "blocks"),
    "key_exchange": tuple(map(str, KeyExchange)),
    "sequence_parallel": (True,),
    "sharding": ("optimizer", "parameters"),
}


def _items(examples: Mapping[str, Example], rng: Random) -> dict[str, list[int]]:
    """Sizes of items that the plan gets after planning."""
    near = (1, 2, 4, 16, 17, 50)
    return {
        name: [rng.choice((size, *near)) for size in example.tokens]
        for name, example in examples.items()
        if name != LLM and rng.random() < 0.15
    }


def _plan_of(tree: Any, folder: Path) -> Plan:
    job = job_from_spec(parse_spec(json.dumps(tree["job"])), folder=folder)
    planner = BY_NAME[tree["strategy"]].planner
    plan = planner(job, cost_of(job, None, None), lambda done, total, best_s: None)
    return replace(plan, batch=tuple(_resized(sample, tree["items"]) for sample in plan.batch))


def _resized(sample: Any, items: Mapping[str, list[int]]) -> Any:
    segments = tuple(
        replace(segment, tokens_in=items[segment.modality][0], tokens_out=items[segment.modality][1])
        if segment.modality in items
        else segment
        for segment in sample.segments
    )
    return replace(sample, segments=segments)


def _take(folder: Path, content: bytes) -> None:
    plan = _plan_of(json.loads(content), folder)
    lowered, _ = accept(plan)
    refusal = _refusal(plan)
    torch.set_num_threads(1)
    is_whole = not any(is_sharded(plan, stage) for stage in plan.stages)
    try:
        if is_whole:
            emulate(lowered, STEP)
        else:
            reference_step(plan, seed=0, dtype=STEP.dtype(plan), source=SyntheticSource(0))
    except Exception as error:
        if refusal is None:
            raise AcceptedError(f"{type(error).__name__}: {error}") from error
    else:
        if refusal is not None and is_whole:  # the reference has one rank, on which more can run
            raise RefusedError(str(refusal)) from refusal
    if refusal is not None:
        raise refusal


def _refusal(plan: Plan) -> ValueError | None:
    try:
        check_runnable(plan)
    except ValueError as error:
        return error
    return None


def _make(folder: Path) -> Ready:
    seeds = [drawn(Random(number)) for number in range(20)]
    for seed in seeds:  # what they have compiled is kept on disk, and no input's to wait for
        with suppress(ValueError, AcceptedError, RefusedError):
            _take(folder, json_bytes(seed))
    return Ready(
        seeds=seeds,
        draw=drawn,
        render=json_bytes,
        parse=json.loads,
        take=partial(_take, folder),
    )


TARGETS = (Target(name="runnable", make=_make),)
