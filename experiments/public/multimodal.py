"""Published runs of multimodal models as jobs and plans: their step, its interval and their memory.

A row's empty or missing cells have the defaults of `DEFAULTS`. Where `dit` names a network, it is all that
trains, and takes the language model's place (`experiments.public.video_transformers`). Where `lora_rank` is
given, adapters train instead (`experiments.public.adapters`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments.public.adapters import copied_bytes, lora_of, only_said, trains_beside, with_adapters_of_row
from experiments.public.blind import FOLDER, INTERVALS, Estimate, Row
from experiments.public.video_transformers import network_of
from sim.predict import doubts_of_plan, predict
from workbench.cost.eager_traffic import PointwiseKernels
from workbench.cost.execution import Execution, GradientSum, Launch, TokenCopies, load_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.traffic import LossKernel
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.llm_table.row_mtp import with_mtp
from workbench.memory.account import peak_bytes
from workbench.memory.layer import state_bytes_of
from workbench.memory.stage import state_of
from workbench.model.layer import LayerKind
from workbench.model.model_graph import TEXT, Module
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Sharding
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Pass
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.systems import by_executor
from workbench.trace import Trace
from workbench.units import GIB, S_PER_HOUR

EXAMPLES = Path(__file__).parents[2] / "examples"
STRATEGY = "megatron-heterogeneous"  # the layouts of the job as they are
PIPELINED = "megatron-homogeneous"  # the same, with the vision module on the first of several stages
TENSOR_PARALLEL = 4  # ranks that each go over a row's whole logits
COMPILED = Execution(loss=LossKernel.TORCH, gradient_sum=GradientSum.OWN)
TRANSFORMERS = load_execution(EXAMPLES / "transformers-execution.json")
EXECUTIONS = {
    "transformers": TRANSFORMERS,
    "transformers-deepep": replace(TRANSFORMERS, copies=TokenCopies.ONCE),
    "megatron": Execution(loss=LossKernel.FUSED),
    "megatron-parallel-loss": Execution(),
    "megatron-hybridep": Execution(loss=LossKernel.FUSED, copies=TokenCopies.ONCE),
    "graphed": Execution(loss=LossKernel.FUSED, gradient_sum=GradientSum.OWN, launch=Launch.GRAPH),
    "compiled-whole-loss": replace(COMPILED, loss_passes=TENSOR_PARALLEL),
    "transformers-whole-loss": replace(TRANSFORMERS, loss_passes=TENSOR_PARALLEL),
}
WHOLE_LOSS = "-whole-loss"  # ends executions whose loss goes over the gathered logits of a row
TRAINS = {
    "projector": ("projector", "none"),
    "llm": ("projector", "all"),
    "all": ("all", "all"),
    "lora": ("none", "none"),
}  # of the vision tower, of the language model
DEFAULTS = {
    "gpus_per_node": "8",
    "cp": "1",
    "pp": "1",
    "ep": "1",
    "mtp": "0",
    "optimizer": "float32",
    "optimizer_bytes": "0",
    "memory": "yes",
}
BOUNDLESS = 10**15  # bytes of a GPU, so that a plan that does not fit has a peak
PLACE = {"zoo": "llama-3.2-1b"}  # of a job file, whose place a network of its own takes
UNITS = {"hours": S_PER_HOUR, "h": S_PER_HOUR, "seconds": 1.0, "s": 1.0, "ms": 1e-3}
GIB_OF = {"gib": 1.0, "gb": 1.0, "mb": 1 / 1024, "mib": 1 / 1024}  # tools print GiB under the name GB


@cache
def models_of(file: Path) -> dict[str, dict[str, Any]]:
    """The modules of a round, by kind and name."""
    models: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return models


def said(row: Row, name: str) -> str:
    """A row's cell, or its default."""
    return row.get(name) or DEFAULTS.get(name, "")


def job_of(row: Row, models: Mapping[str, Mapping[str, Any]]) -> Job:
    """The job of a run: one replica on each `tp` x `cp` x `pp` GPUs, all modules on the same ones, or the
    vision module on those of the first of several stages."""
    gpus, size, replicas = int(row["gpus"]), int(row["micro_batch"]), replicas_of(row)
    ranks_per_node, network = int(said(row, "gpus_per_node")), row.get("dit")
    layout = _layout(row)
    recompute = "blocks" if row["recompute"] == "full" else row["recompute"]  # as all these trainers do
    of_vision = layout | {"recompute": recompute if _of_vision(row) == "all" else "none"}
    spec = {
        "name": row["id"],
        "model": {"modules": {"llm": PLACE} if network else _modules(row, models)},
        "cluster": {
            "device": row["gpu"],
            "nodes": -(-gpus // ranks_per_node),
            "ranks_per_node": min(gpus, ranks_per_node),
        },
        "batch": {
            "samples": replicas * size * int(row["accumulation"]),
            "microbatch_samples": size,
            "replicas": replicas,
            "mask": "full" if network else "causal",
            "fixed": {
                "text_tokens": int(row["dit_tokens"] if network else row["text_tokens"]),
                "items": {"vision": _items(row)} if row["vision"] else {},
            },
        },
        "layouts": ({"vision": of_vision} if row["vision"] else {})
        | {"llm": layout | {"recompute": recompute} | _of_llm(row)},
        "precision": "bfloat16",
        "optimizer_precision": said(row, "optimizer"),
        "profile": row["gpu"],
    }
    job = job_from_spec(parse_spec(yaml.safe_dump(spec), where=row["id"]), folder=FOLDER)
    if network:
        layers = network_of(models["dit"][network], int(row["dit_tokens"]))
        module = with_adapters_of_row(Module(name="llm", modality=TEXT, layers=layers), row)
        job = replace(job, model=replace(job.model, modules=(module,), edges=()))
    modules = (_llm_of(each, row) if each.modality == TEXT else each for each in job.model.modules)
    job = replace(job, model=replace(job.model, modules=tuple(modules)))
    if blocks := row.get("stage_blocks"):
        job = _with_stages(job, [int(each) for each in blocks.split()])
    return _with_sharded_gradients(job) if row["sharding"] == Sharding.GRADIENTS else job


def _modules(row: Row, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    _, llm_trains = TRAINS[row["trains"]]
    return {
        "vision": models["vision"][row["vision"]] | {"trainable": _of_vision(row)},
        "llm": models["llm"][row["llm"]] | {"trainable": llm_trains} | lora_of(row),
    }


def _of_vision(row: Row) -> str:
    """What of the vision module is trained."""
    return "all" if trains_beside(row, "vision") else TRAINS[row["trains"]][0]


def _llm_of(module: Module, row: Row) -> Module:
    """The language model with what its row says beyond a job file."""
    return only_said(replace(module, layers=with_mtp(module.layers, int(said(row, "mtp")))), row)


def _layout(row: Row) -> dict[str, Any]:
    """What the layouts of all modules have in common."""
    tp, cp = int(row["tp"]), int(said(row, "cp"))
    sharding = "optimizer" if row["sharding"] == Sharding.GRADIENTS else row["sharding"]
    layout = {"rank_offset": 0, "tp": tp, "cp": cp, "pp": 1, "sharding": sharding}
    own: dict[str, Any] = {
        name: row[name] for name in ("key_exchange", "reshard_after", "products") if row.get(name)
    }
    if instances := row.get("instances"):
        own |= {"instances": int(instances)}
    return layout | own | {"sequence_parallel": tp > 1 and row.get("sequence_parallel") != "no"}


def _of_llm(row: Row) -> dict[str, Any]:
    """What the language model's layout has besides: its stages, its experts' ranks, what it recomputes."""
    layout: dict[str, Any] = {"pp": int(said(row, "pp")), "ep": int(said(row, "ep"))}
    if layers := row.get("recompute_layers"):
        layout["recompute_layers"] = int(layers)
    if modules := row.get("recompute_modules"):
        layout |= {"recompute_modules": modules.split(), "recompute": "none"}
    return layout


def _with_stages(job: Job, blocks: Sequence[int]) -> Job:
    """The job with so many blocks of the language model on each stage, the embedding in front, and behind
    them whatever follows the blocks."""
    first, *rest = blocks
    *others, last = (first + 1, *rest)
    stage_layers = (*others, last + len(job.model.llm.layers) - 1 - sum(blocks))
    llm = job.model.llm.name
    layouts = (
        replace(each, stage_layers=stage_layers) if each.module == llm else each for each in job.layouts
    )
    return replace(job, layouts=tuple(layouts))


def strategy_of(row: Row) -> str:
    """The strategy whose plan has the row's layouts."""
    return STRATEGY if said(row, "pp") == "1" else PIPELINED


def _items(row: Row) -> dict[str, Any]:
    """The images of a sample: at the tower's own size, squares of `image_px`, or of `item_tokens` each."""
    images, side, tokens = int(row["images"]), row.get("image_px"), row.get("item_tokens")
    if tokens:
        return {"each": images, "tokens": [int(each) for each in tokens.split()]}
    return {"images": [[int(side)] * 2] * images} if side else {"each": images}


def _with_sharded_gradients(job: Job) -> Job:
    """The job with gradients sharded beside the optimizer's state (ZeRO-2), which no job file says."""
    modules = tuple(job.settings.of(module.name) for module in job.model.modules)
    sharded = tuple(own.sharded(Sharding.GRADIENTS) for own in modules)
    return replace(job, settings=replace(job.settings, modules=sharded))


def cost_of(row: Row) -> CostModel:
    """Prices of a run's GPUs and kernels."""
    return CostModel(load_profile(row["gpu"]), EXECUTIONS[row["execution"]])


def step_of(row: Row, job: Job) -> Estimate:
    """Seconds of a run's step, or of its passes alone, as the row covers.

    In the intervals that `simulate` prints: of kernels and links alone, of a training system that was never
    compared, and of a research trainer of multimodal models.

    Raises:
        ValueError: the job has no plan, or the plan does not fit.
    """
    cost = cost_of(row)
    lowered, memory = accept(PLANNERS[strategy_of(row)](job, cost, silent))
    trace, doubts = predict(lowered, memory, cost), doubts_of_plan(lowered, cost)
    step_s = trace.iteration_s - (_update_s(trace) if row["covers"] == "passes" else 0.0)
    within = [each.interval for each in by_executor(step_s, doubts, is_multimodal=True)]
    return Estimate(step_s, {name: (w.low_s, w.high_s) for name, w in zip(INTERVALS, within, strict=True)})


def _update_s(trace: Trace) -> float:
    """Seconds of the optimizer step on the rank where it takes longest."""
    update_s: dict[int, float] = defaultdict(float)
    for span in trace.spans:
        if span.action.kind is Pass.STEP:
            update_s[span.rank] += span.end_s - span.start_s
    return max(update_s.values(), default=0.0)


def peak_gib(row: Row, job: Job) -> float:
    """Peak memory of a rank in GiB, with gradients of two bytes and the row's bytes of optimizer state.

    Of the modules' own kernels where no compiler fuses them, however much a GPU has. Where the loss goes
    over gathered logits, these and their gradients are counted beside the plan's.
    """
    eager = EXECUTIONS[row["execution"]].pointwise is PointwiseKernels.EAGER
    kernels = Kernels.EAGER if eager else Kernels.FUSED
    settings = replace(job.settings, kernels=kernels, optimizer_precision=None)
    nodes = tuple(replace(node, memory_bytes=BOUNDLESS) for node in job.cluster.nodes)
    batch = tuple(replace(sample, mask="causal") for sample in job.batch)  # for "full" a mask would be kept
    roomy = replace(job, settings=settings, cluster=replace(job.cluster, nodes=nodes), batch=batch)
    plan = PLANNERS[strategy_of(row)](roomy, cost_of(row), silent)
    peaks, kept = peak_bytes(*accept(plan)), int(said(row, "optimizer_bytes"))
    counted = state_bytes_of(settings).optimizer
    return (
        max(peak + (kept / counted - 1) * _optimizer_bytes(plan, rank) for rank, peak in peaks.items()) / GIB
        + _gathered_logits_gib(row, job)
        + copied_bytes(job.model.llm, row) / GIB
    )


def _optimizer_bytes(plan: Plan, rank: int) -> int:
    return sum(size for _, kind, size in state_of(plan, rank) if kind.part == "optimizer")


def _gathered_logits_gib(row: Row, job: Job) -> float:
    """GiB of a microbatch's whole logits and their gradients in two bytes; 0 of vocabulary-parallel ones."""
    if not row["execution"].endswith(WHOLE_LOSS):
        return 0.0
    head = job.model.llm.layers[-1]
    assert head.kind is LayerKind.HEAD
    tokens = job.microbatch_samples * job.batch[0].num_tokens
    return 2 * 2 * tokens * head.out_width / GIB


def measured_s(row: Row, value: float, unit: str) -> float | None:
    """Seconds of a step behind what was printed, a whole run's among them; None for what is no time of it."""
    name, _, per = unit.strip().lower().replace("samples per", "samples/").partition("/")
    if name in UNITS and per in ("", "step", "iteration", "it", "iter"):
        return value * UNITS[name] / (int(row["steps"]) if UNITS[name] == S_PER_HOUR else 1)
    if per in ("s", "second"):
        work = {"steps": 1, "iterations": 1, "it": 1, "samples": samples_of(row)}
        return work[name] / value if name in work else None
    if (name, per) == ("tokens", "s/gpu"):
        return samples_of(row) * tokens_of(row) / int(row["gpus"]) / value
    return None


def measured_gib(value: float, unit: str) -> float | None:
    """GiB behind what was printed; None for what is no memory."""
    words = unit.strip().lower().split()
    return value * GIB_OF[words[0]] if words and words[0] in GIB_OF else None


def replicas_of(row: Row) -> int:
    """Data-parallel replicas of a run."""
    return int(row["gpus"]) // int(row["tp"]) // int(said(row, "cp")) // int(said(row, "pp"))


def samples_of(row: Row) -> int:
    """Samples of a step of the whole run."""
    return replicas_of(row) * int(row["micro_batch"]) * int(row["accumulation"])


def tokens_of(row: Row) -> int:
    """Tokens of a sample as sources count them: a network's own, or those of the row's sequence."""
    return int(row.get("dit_tokens") or row["sequence"])
