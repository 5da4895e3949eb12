"""Megatron-LM: the arguments of `pretrain_gpt.py`, or a program of megatron-core's MIMO for several modules.

Source: Megatron-LM, megatron/training/arguments.py, as megatron-core 0.19.2 ships it (Apache-2.0).
"""

import shlex
from collections.abc import Sequence

from workbench.export import expressible
from workbench.export.approximation import (
    LLM_ONLY,
    Approximation,
    Change,
    longest_tokens,
)
from workbench.export.block_recompute import recomputed_alike
from workbench.export.decoder import Decoder, decoder_of
from workbench.export.latent import latent_words, without_flags
from workbench.export.megatron_muon import (
    inexpressible_muon,
    lacks_for_muon,
    muon_arguments,
    muon_changes,
)
from workbench.export.megatron_program import MEGATRON_SEVERAL
from workbench.export.mimo_config import (
    EXCHANGES,
    LANGUAGE,
    MIMO_ALTERNATIVES,
    PROGRAM,
    RECOMPUTED,
    SCHEDULES,
    Words,
    keys_exchanged,
    mimo_changes,
    mimo_tables,
    position_words,
    program_files,
    settings_words,
    tokens_of_item,
    transformer_words,
)
from workbench.export.mimo_limits import encoders_of, inexpressible, lacking
from workbench.export.module_layouts import Placed, RankSharing, placed_llm
from workbench.export.narrow_products import MEGATRON, even_tokens, multiplied_as
from workbench.export.target import Files, Launch, Target
from workbench.export.torchrun import nccl_environment
from workbench.export.trained import Trained
from workbench.job.notations.job_layouts import MEGATRON_SIZES
from workbench.job.notations.layout_string import layout_string
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.planner.plan_layouts import microbatch_samples
from workbench.schedule.sharded import ReshardAfter

ARGUMENTS, DATA = "arguments.sh", "data.sh"
Arguments = dict[str, str | None]  # flag -> its value; None: a flag without value

_GRID_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_FLAGS = {
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
    "layernorm_epsilon": "--norm-epsilon",
    "num_moe_experts": "--num-experts",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "rope_scaling": "--use-rope-scaling",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "yarn_rotary_scaling_factor": "--rotary-scaling-factor",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "yarn_mscale": "--mscale",
    "yarn_mscale_all_dim": "--mscale-all-dim",
}
_NEGATED = (  # flags that turn the field off
    "add_bias_linear",
    "bias_dropout_fusion",
    "yarn_correction_range_round_to_int",
)
_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")  # by layer, which Megatron-LM evaluates
_FSDP = {Sharding.GRADIENTS: "optim_grads", Sharding.PARAMETERS: "optim_grads_params"}


def arguments_of(plan: Plan) -> Arguments:
    """The flags that describe the plan, without those of data."""
    module = plan.model.llm
    placed = placed_llm(plan)
    return {
        **decoder_arguments(decoder_of(module)),
        **_layout_arguments(placed, plan),
        **_settings_arguments(plan, plan.settings.of(module.name), placed),
        "--seq-length": str(longest_tokens(plan)),
        "--micro-batch-size": str(microbatch_samples(plan)),
        "--global-batch-size": str(len(plan.batch)),
        "--train-iters": "100",
        "--lr": "1e-4",
        "--clip-grad": "1.0",
        "--log-interval": "1",
        "--eval-iters": "0",
    }


def decoder_arguments(decoder: Decoder) -> Arguments:
    """Flags of the model's sizes."""
    words = transformer_words(decoder) | position_words(decoder)
    if words["num_query_groups"] == words["num_attention_heads"]:
        del words["num_query_groups"]
    more = {
        "group_query_attention": "num_query_groups" in words,
        "add_qkv_bias": decoder.qkv_bias and not decoder.mlp_bias,
        "untie_embeddings_and_output_weights": not decoder.is_tied,
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": decoder.most_positions or 0,
    }
    mixture = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": "1e-2",
        "moe_token_dispatcher_type": "alltoall",
    }
    words |= more | (mixture if decoder.num_experts else {})
    if decoder.latent is not None:
        words |= latent_words(decoder)
    if "glu_linear_offset" in words:
        words |= {"gated_linear_unit": False, "quick_geglu": True}
    words |= {name: str(words[name]).replace(" ", "") for name in _PATTERNS if name in words}
    return as_flags(words)


def as_flags(words: Words) -> Arguments:
    """Convert fields of megatron-core to the flags that set them."""
    flags: Arguments = {}
    for name, value in words.items():
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            flags |= {flag: None} if value is not (name in _NEGATED) else {}
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            flags[flag] = (" " if isinstance(value, list) else ",").join(map(str, parts))
    return flags


def _layout_arguments(placed: Placed, plan: Plan) -> Arguments:
    layout = placed.layout
    flags: Arguments = {
        f"--{word.replace('_', '-')}": str(getattr(layout, name)) for word, name in MEGATRON_SIZES.items()
    }
    if placed.pp > 1:
        flags["--pipeline-model-parallel-layout"] = layout_string(layout.stage_layers)
    if layout.ep > 1:
        flags |= {"--expert-model-parallel-size": str(layout.ep), "--expert-tensor-parallel-size": "1"}
    if layout.cp > 1:
        flags["--cp-comm-type"] = EXCHANGES[plan.settings.of(layout.module).key_exchange]
    return flags


def _settings_arguments(plan: Plan, settings: ModuleSettings, placed: Placed) -> Arguments:
    is_cut = {"sequence_parallel": settings.sequence_parallel and placed.layout.tp > 1}
    optimizer = muon_arguments(plan, settings) or _sharding_arguments(settings)
    return as_flags(settings_words(plan, settings.module) | is_cut) | optimizer


def _sharding_arguments(settings: ModuleSettings) -> Arguments:
    if settings.sharding is Sharding.NONE:
        return {}
    flags: Arguments = {"--use-distributed-optimizer": None}
    if settings.instances > 1:
        flags["--num-distributed-optimizer-instances"] = str(settings.instances)
    if settings.is_gathered_once:  # as the distributed optimizer does, beside the passes if it is told to
        flags |= {"--overlap-grad-reduce": None, "--overlap-param-gather": None}
    elif settings.sharding in _FSDP:
        flags |= {
            "--use-megatron-fsdp": None,
            "--data-parallel-sharding-strategy": _FSDP[settings.sharding],
            "--ckpt-format": "fsdp_dtensor",
            "--no-gradient-accumulation-fusion": None,
        }
    return flags


def _lacks(trained: Trained) -> str | None:
    return lacking(trained) or lacks_for_muon(trained) or without_flags(decoder_of(trained.model.llm))


def _refuses(plan: Plan) -> str | None:
    allowed = (RankSharing.ALONE, RankSharing.APART, RankSharing.SHARED)
    return _lacks(plan) or inexpressible_muon(plan) or inexpressible(plan, allowed)


def _changes(plan: Plan) -> Sequence[Change]:
    if len(plan.model.modules) > 1:
        return mimo_changes(plan)
    changes = (
        *expressible.equal_lengths(plan),
        *expressible.wide_optimizer(plan),
        *even_tokens(plan),
        *multiplied_as(plan, MEGATRON),
        *expressible.resharded_as(plan, ReshardAfter.PASS, ReshardAfter.BACKWARD),
        *expressible.computed_again(plan, RECOMPUTED),
        *keys_exchanged(plan),
        *muon_changes(plan),
        *expressible.one_of_schedules(plan, SCHEDULES),
    )
    return (*changes, *recomputed_alike(plan, changes))


def as_shell(name: str, flags: Arguments) -> str:
    """A shell array, with one flag and its value per line."""
    lines = [flag if value is None else f"{flag} {_quoted(flag, value)}" for flag, value in flags.items()]
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"


def _quoted(flag: str, value: str) -> str:
    """Quote a value as one word, except for lists of words."""
    return value if flag == "--recompute-modules" else shlex.quote(value)


def _files(approximation: Approximation) -> Files:
    if len(approximation.becomes.model.modules) > 1:
        return program_files(MEGATRON_SEVERAL, several_tables(approximation.becomes))
    decoder = decoder_of(approximation.becomes.model.llm)
    data: Arguments = {
        "--mock-data": None,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": str(decoder.vocab),
    }
    about = "# Random tokens, to try it out; put --data-path and a tokenizer of your own here.\n"
    return {
        ARGUMENTS: as_shell("ARGUMENTS", _positions(arguments_of(approximation.becomes))),
        DATA: about + as_shell("DATA", data),
    }


def several_tables(plan: Plan) -> Words:
    """Tables of the program with several modules: each configuration includes the sizes of its grid."""
    tables = mimo_tables(plan)
    llm = plan.model.llm.name
    for name, words in tables["parallelisms"].items():
        config = tables["language"] if name == LANGUAGE else tables["encoders"][name]["config"]
        config |= {key: words.get(key, 1) for key in _GRID_SIZES}
        if name != LANGUAGE:
            tables["encoders"][name]["projector"] |= {"tensor_model_parallel_size": words[_GRID_SIZES[0]]}
    if plan.settings.of(llm).sequence_parallel and tables["language"][_GRID_SIZES[0]] > 1:
        tables["language"]["sequence_parallel"] = True
    if tables["language"]["context_parallel_size"] > 1:
        tables["language"]["cp_comm_type"] = EXCHANGES[plan.settings.of(llm).key_exchange]
    tokens = {module.name: tokens_of_item(plan, module) for module in encoders_of(plan)}
    return tables | {"tokens": tokens, "length": max(longest_tokens(plan), 1 + sum(tokens.values()))}


def _positions(flags: Arguments) -> Arguments:
    """Raise the number of positions to the longest sample's tokens."""
    most = max(int(flags["--max-position-embeddings"] or 0), int(flags["--seq-length"] or 0))
    return flags | {"--max-position-embeddings": str(most)}


def _launch(approximation: Approximation) -> Launch:
    environment = nccl_environment()
    if len(approximation.becomes.model.modules) > 1:
        return Launch(
            program=PROGRAM,
            environment=environment,
            container="An image with megatron-core 0.19.2 and what it requires: torch and Transformer "
            "Engine, as NVIDIA's PyTorch images have it. Without the latter its own layers stand in.",
            training=f"As it is, `{PROGRAM}` takes 100 steps from random weights on random images and text, "
            "and keeps no checkpoint; `--steps` sets the number. Data are what `batches` in it returns, "
            "weights what you load in `main` behind `model_of`.",
        )
    if any(
        each.sharding in _FSDP and not each.is_gathered_once
        for each in approximation.becomes.settings.modules
    ):
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = ("8", "gathering weights runs beside other work")
    return Launch(
        program='"${MEGATRON_LM:?want the folder of a Megatron-LM checkout}/pretrain_gpt.py" '
        '"${ARGUMENTS[@]}" "${DATA[@]}"',
        before=f"source ./{ARGUMENTS}\nsource ./{DATA}\n",
        environment=environment,
        container="A checkout of Megatron-LM at core_v0.19.2, its folder in `MEGATRON_LM`, and what it "
        "requires: torch, Transformer Engine and Apex, as in NVIDIA's PyTorch images.",
        training="As it is, this takes 100 steps from random weights on random tokens, and keeps no "
        "checkpoint. "
        f"`{DATA}` is where `--data-path` and a tokenizer go; `--train-iters`, `--load`, `--save` and "
        f"`--save-interval` are Megatron's flags, behind `launch.sh` or in `{ARGUMENTS}`.",
    )


TARGET = Target(
    name="megatron",
    system="Megatron-LM (megatron-core 0.19.2)",
    summary="arguments of Megatron-LM's pretrain_gpt.py, or a program of its MIMO classes",
    lacks=_lacks,
    refuses=_refuses,
    changes=_changes,
    alternatives=(*MIMO_ALTERNATIVES, *LLM_ONLY),
    files=_files,
    launch=_launch,
)
