"""torchtitan 0.3: a configuration module for its trainer, for plans of one dense language model.

Source: torchtitan 0.3.0 (BSD-3-Clause): config/configs.py, models/llama3, models/qwen3.
"""

from collections.abc import Sequence
from dataclasses import replace
from pprint import pformat
from typing import Any

from workbench.cost.products import ProductFormat
from workbench.export import expressible
from workbench.export.approximation import (
    LLM_ONLY,
    Approximation,
    Change,
    in_settings,
    longest_tokens,
)
from workbench.export.decoder import Decoder, decoder_of
from workbench.export.module_layouts import Placed, placed_llm, schedule_like
from workbench.export.narrow_products import (
    TORCHTITAN,
    even_tokens,
    inexpressible_in_torchtitan,
    multiplied_as,
)
from workbench.export.target import Files, Launch, Target
from workbench.export.torchrun import nccl_environment
from workbench.export.torchtitan_program import PROGRAM
from workbench.export.trained import Trained
from workbench.job.notations.job_layouts import TORCHTITAN_SIZES
from workbench.job.notations.torchtitan import OUTPUT, parts_of
from workbench.model.families.positions import rotated_share
from workbench.model.families.registry import ARCHITECTURES
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.planner.plan_layouts import microbatch_samples
from workbench.schedule.choice import ScheduleKind
from workbench.schedule.sharded import ReshardAfter
from workbench.schedule.spec import StagePlacement
from workbench.schedule.torch_csv import to_torch_csv

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text", "phi3")  # compared with its models
MODULE, CONFIG = "plan_config", "train"
USUAL_EPS = 1e-5
WIDTH = 100  # of lines
SCHEDULE_FILE = "schedule.csv"
SCHEDULES = {kind: kind.spec.torch_name for kind in ScheduleKind if kind.spec.torch_name is not None}
IN_A_FILE = tuple(
    kind
    for kind in ScheduleKind
    if kind.spec.torch_name is None
    and kind.spec.layout is StagePlacement.ROUND
    and not kind.spec.shares_ranks_in_part
)
"""Schedules that torch has no class for, but executes from a file of passes."""


def _lacks(trained: Trained) -> str | None:
    if len(trained.model.modules) > 1:
        others = ", ".join(repr(m.name) for m in trained.model.modules if m is not trained.model.llm)
        return f"modules beside the language model ({others})"
    return (
        _inexpressible_decoder(trained)
        or expressible.masked(trained)
        or expressible.too_precise(trained)
        or expressible.other_optimizer(trained)
        or expressible.frozen_parts(trained)
    )


def _refuses(plan: Plan) -> str | None:
    return (
        _lacks(plan) or expressible.unplaced(plan) or _tied_apart(plan) or inexpressible_in_torchtitan(plan)
    )


def _tied_apart(plan: Plan) -> str | None:
    module = plan.model.llm
    is_apart = decoder_of(module).is_tied and placed_llm(plan).pp > 1
    return f"one table for tokens and head on several stages of {module.name!r}" if is_apart else None


def _inexpressible_decoder(trained: Trained) -> str | None:
    module = trained.model.llm
    try:
        decoder = decoder_of(module)
    except ValueError as error:
        return str(error)
    parts = {
        "latent attention": decoder.latent is not None,
        "experts": decoder.num_experts > 0,
        "biases": decoder.qkv_bias or decoder.out_bias or decoder.mlp_bias,
        "a sliding window": decoder.window is not None,
        "attention with sinks": decoder.has_sinks,
        "layer norms": not decoder.is_rms,
        "positions that are not rotary": not decoder.is_rotary,
        f"an MLP of {decoder.activation}": not decoder.is_gated or decoder.activation != "silu",
        "heads that are rotated in part": rotated_share({"model_type": "", **decoder.source}, 1.0) != 1.0,
        "scaled positions": bool(decoder.rope_scaling) and decoder.rope_scaling.get("rope_type") != "llama3",
    }
    part = next((part for part, is_so in parts.items() if is_so), None)
    if part is None and decoder.family and decoder.family not in FAMILIES:
        return f"a language model of the family {ARCHITECTURES[decoder.family].name}"
    return None if part is None else f"{part} of {module.name!r}"


def _changes(plan: Plan) -> Sequence[Change]:
    return (
        *expressible.equal_lengths(plan),
        *even_tokens(plan),
        *multiplied_as(plan, TORCHTITAN),
        *expressible.sharded_as(plan, Sharding.GRADIENTS, Sharding.OPTIMIZER),
        *_resharded(plan),
        *expressible.computed_again(plan, ()),
        *expressible.all_recomputed(plan),
        *expressible.blocks_alone(plan),
        *_key_exchange(plan),
        *expressible.one_of_schedules(plan, _schedules_for(plan)),
    )


def _schedules_for(plan: Plan) -> tuple[ScheduleKind, ...]:
    """Kinds that it executes. Units of sharded parameters are no stages of torch's: they have no file."""
    shards = plan.settings.of(plan.model.llm.name).shards_parameters
    return (*SCHEDULES, *(() if shards else IN_A_FILE))


def _resharded(plan: Plan) -> Sequence[Change]:
    """Without stages it shards again after every backward; its stages keep weights and sums for a step."""
    if placed_llm(plan).pp == 1:
        return expressible.resharded_as(plan, ReshardAfter.BACKWARD, ReshardAfter.STEP)
    return expressible.resharded_as(plan, ReshardAfter.STEP, ReshardAfter.BACKWARD)


def _key_exchange(plan: Plan) -> Sequence[Change]:
    llm = plan.model.llm.name
    exchange = plan.settings.of(llm).key_exchange
    if placed_llm(plan).layout.cp == 1 or exchange is KeyExchange.ALL_GATHER:
        return ()

    def gathered(settings: ModuleSettings) -> ModuleSettings:
        return replace(settings, key_exchange=KeyExchange.ALL_GATHER)

    return in_settings(f"keys exchanged by {exchange}", "keys gathered", gathered)


def model_words(decoder: Decoder) -> dict[str, Any]:
    """The table of sizes from which the program builds the model."""
    rope: dict[str, Any] = {"max_seq_len": decoder.most_positions, "theta": decoder.rope_base}
    if decoder.rope_scaling:
        rope |= {"scaling": "llama", "scaling_factor": decoder.rope_scaling["factor"]}
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if key in decoder.rope_scaling:
                rope[key] = decoder.rope_scaling[key]
    sizes = ("num_blocks", "width", "ffn", "vocab", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(decoder, name) for name in (*sizes, "qk_norm", "is_tied")} | {
        "eps": USUAL_EPS if decoder.eps is None else decoder.eps,
        "rope": rope,
    }


def parallelism_words(plan: Plan) -> dict[str, Any]:
    """Fields of torchtitan's `ParallelismConfig`."""
    module = plan.model.llm
    placed, settings = placed_llm(plan), plan.settings.of(module.name)
    words: dict[str, Any] = {
        key: getattr(placed.layout, name) for key, name in TORCHTITAN_SIZES.items() if name != "dp"
    }
    words |= _data_parallel(placed, settings)
    words["enable_sequence_parallel"] = settings.sequence_parallel
    if placed.pp > 1:
        words |= _schedule_words(plan) | {
            "pipeline_parallel_microbatch_size": microbatch_samples(plan),
            "module_fqns_per_model_part": _parts(placed),
        }
    return words


def _schedule_words(plan: Plan) -> dict[str, str]:
    """The schedule's class; beside a file of passes it says how stages lie: one on each rank."""
    kind = schedule_like(plan).kind
    if kind in SCHEDULES:
        return {"pipeline_parallel_schedule": SCHEDULES[kind]}
    return {
        "pipeline_parallel_schedule": SCHEDULES[ScheduleKind.ONE_F_ONE_B],
        "pipeline_parallel_schedule_csv": SCHEDULE_FILE,
    }


def schedule_file(plan: Plan) -> str:
    """Passes of the first replica's ranks, in torch's format; all replicas have the same."""
    llm = plan.model.llm.name
    chain = plan.chain[llm, plan.replicas(llm)[0]]
    index_of = {stage.id: index for index, stage in enumerate(chain)}
    firsts = dict.fromkeys(stage.flat_ranks[0] for stage in chain)
    return to_torch_csv([plan.program[rank] for rank in firsts], index_of)


def _parts(placed: Placed) -> list[list[str]]:
    """Module names per stage, with the newest name of the head."""
    parts = parts_of(placed.layout.stage_layers)
    return [[OUTPUT[-1] if name in OUTPUT else name for name in part] for part in parts]


def _data_parallel(placed: Placed, settings: ModuleSettings) -> dict[str, Any]:
    if settings.sharding is Sharding.NONE:
        return {"data_parallel_replicate_degree": placed.dp, "data_parallel_shard_degree": 1}
    return {
        "data_parallel_replicate_degree": settings.instances,
        "data_parallel_shard_degree": placed.dp // settings.instances,
        "fsdp_reshard_after_forward": "always" if _is_freed_after_forward(settings) else "never",
    }


def _is_freed_after_forward(settings: ModuleSettings) -> bool:
    return settings.shards_parameters and settings.reshard_after is ReshardAfter.PASS


def training_words(plan: Plan) -> dict[str, Any]:
    """Fields of torchtitan's `TrainingConfig`: with stages, all microbatches of a step are one local
    batch.
    """
    placed = placed_llm(plan)
    share = len(plan.batch) // placed.dp
    wide = (plan.settings.optimizer_precision or plan.settings.precision) is not Precision.BFLOAT16
    return {
        "local_batch_size": share if placed.pp > 1 else microbatch_samples(plan),
        "global_batch_size": len(plan.batch),
        "seq_len": longest_tokens(plan),
        "steps": 100,
        "dtype": "float32" if wide else "bfloat16",
        "mixed_precision_param": str(plan.settings.precision),
        "disable_cuda_graphs": True,
    }


def _files(approximation: Approximation) -> Files:
    plan = approximation.becomes
    module = plan.model.llm
    model = model_words(decoder_of(module))
    model["rope"]["max_seq_len"] = max(model["rope"]["max_seq_len"] or 0, longest_tokens(plan))
    tables = {
        "model": model,
        "parallelism": parallelism_words(plan),
        "training": training_words(plan),
    }
    shown = {name: pformat(table, width=WIDTH, sort_dicts=False) for name, table in tables.items()}
    recompute = "none" if plan.settings.of(module.name).recompute is Recompute.NONE else "full"
    own = plan.settings.of(module.name).products
    products = None if own is ProductFormat.SAME else own.value
    program = PROGRAM.format(**shown, recompute=repr(recompute), products=repr(products))
    is_in_a_file = "pipeline_parallel_schedule_csv" in tables["parallelism"]
    return {f"{MODULE}.py": program} | ({SCHEDULE_FILE: schedule_file(plan)} if is_in_a_file else {})


def _launch(approximation: Approximation) -> Launch:
    del approximation
    return Launch(
        program=f"-m torchtitan.train --module {MODULE} --config {CONFIG}",
        environment=nccl_environment() | {"PYTHONPATH": (".", f"where {MODULE} is found")},
        container="Python 3.11 or later with torchtitan 0.3 and the torch that it requires. The folder "
        "`tokenizer` beside the configuration holds the model's tokenizer; data are samples of "
        "torchtitan's.",
        training=f"As it is, `{MODULE}.py` takes 100 steps from random weights on torchtitan's `c4_test`, "
        "and keeps no checkpoint. `dataloader`, `checkpoint` and `steps` in its configuration are yours to "
        "change, there or by torchtitan's flags.",
    )


TARGET = Target(
    name="torchtitan",
    system="torchtitan 0.3",
    summary="a configuration module for torchtitan's trainer",
    lacks=_lacks,
    refuses=_refuses,
    changes=_changes,
    alternatives=LLM_ONLY,
    files=_files,
    launch=_launch,
)
