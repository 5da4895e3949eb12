"""Megatron-LM: the arguments of `pretrain_gpt.py`, for plans of one language model.

Source: Megatron-LM, megatron/training/arguments.py, as megatron-core 0.19.2 ships it (Apache-2.0).
"""

import shlex
from collections.abc import Sequence

from workbench.export import sayable
from workbench.export.decoder import Decoder, decoder_of
from workbench.export.placed import Placed, llm_of, placed_modules
from workbench.export.said import (
    LLM_ALONE,
    Change,
    Said,
    longest_tokens,
    microbatch_samples,
)
from workbench.export.target import Files, Launch, Target
from workbench.export.torchrun import nccl_environment
from workbench.job.notations.job_layouts import MEGATRON_SIZES
from workbench.job.notations.layout_string import layout_string
from workbench.model.block_modules import BlockModule
from workbench.model.families.registry import ARCHITECTURES
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.schedule.choice import ScheduleKind

ARGUMENTS, DATA = "arguments.sh", "data.sh"
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_vl_text", "qwen3", "gpt2", "opt")
Arguments = dict[str, str | None]  # flag -> its value; None: it stands alone

RECOMPUTED = {
    BlockModule.CORE_ATTN: "core_attn",
    BlockModule.NORM: "layernorm",
    BlockModule.MLP: "mlp",
    BlockModule.MOE: "moe",
    BlockModule.MOE_ACT: "moe_act",
    BlockModule.MLA_UP_PROJ: "mla_up_proj",
}
EXCHANGES = {
    KeyExchange.ALL_GATHER: "all_gather",
    KeyExchange.RING: "p2p",
    KeyExchange.ALL_TO_ALL: "a2a",
}
_FSDP = {Sharding.GRADIENTS: "optim_grads", Sharding.PARAMETERS: "optim_grads_params"}
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)


def arguments_of(plan: Plan) -> Arguments:
    """The flags that say the plan, those of data apart."""
    module = llm_of(plan)
    placed = placed_modules(plan)[module.name]
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
    """Those of the model's sizes."""
    said: Arguments = {
        "--num-layers": str(decoder.num_blocks),
        "--hidden-size": str(decoder.width),
        "--ffn-hidden-size": str(decoder.ffn),
        "--num-attention-heads": str(decoder.num_heads),
        "--kv-channels": str(decoder.head_dim),
        "--normalization": "RMSNorm" if decoder.is_rms else "LayerNorm",
        "--position-embedding-type": "rope" if decoder.is_rotary else "learned_absolute",
        "--attention-dropout": "0.0",
        "--hidden-dropout": "0.0",
        "--make-vocab-size-divisible-by": "1",
        "--max-position-embeddings": str(decoder.most_positions or 0),
    }
    if decoder.num_kv_heads != decoder.num_heads:
        said |= {"--group-query-attention": None, "--num-query-groups": str(decoder.num_kv_heads)}
    if decoder.is_rotary:
        said["--rotary-base"] = str(round(decoder.rope_base))
    if decoder.rope_scaling:
        said |= {"--use-rope-scaling": None, "--rope-scaling-factor": str(decoder.rope_scaling["factor"])}
    if decoder.eps is not None:
        said["--norm-epsilon"] = str(decoder.eps)
    if decoder.window is not None:
        said["--window-size"] = f"{decoder.window},0"
    flags = {
        "--swiglu": decoder.is_gated,
        "--disable-bias-linear": not decoder.mlp_bias,
        "--add-qkv-bias": decoder.qkv_bias and not decoder.mlp_bias,
        "--qk-layernorm": decoder.qk_norm,
        "--untie-embeddings-and-output-weights": not decoder.is_tied,
    }
    said |= {flag: None for flag, is_on in flags.items() if is_on}
    return said | _expert_arguments(decoder)


def _expert_arguments(decoder: Decoder) -> Arguments:
    if not decoder.num_experts:
        return {}
    return {
        "--num-experts": str(decoder.num_experts),
        "--moe-router-topk": str(decoder.experts_per_token),
        "--moe-ffn-hidden-size": str(decoder.ffn),
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": "1e-2",
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": None,
    }


def _layout_arguments(placed: Placed, plan: Plan) -> Arguments:
    layout = placed.layout
    said: Arguments = {
        f"--{word.replace('_', '-')}": str(getattr(layout, name)) for word, name in MEGATRON_SIZES.items()
    }
    if placed.pp > 1:
        said["--pipeline-model-parallel-layout"] = layout_string(layout.stage_layers)
    if layout.ep > 1:
        said |= {"--expert-model-parallel-size": str(layout.ep), "--expert-tensor-parallel-size": "1"}
    if layout.cp > 1:
        said["--cp-comm-type"] = EXCHANGES[plan.settings.of(layout.module).key_exchange]
    return said


def _settings_arguments(plan: Plan, settings: ModuleSettings, placed: Placed) -> Arguments:
    said: Arguments = {"--bf16": None} if plan.settings.precision is Precision.BFLOAT16 else {}
    if settings.sequence_parallel and placed.layout.tp > 1:
        said["--sequence-parallel"] = None
    if settings.recompute is Recompute.FULL:
        said |= {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": "1",
        }
    elif settings.computed_again:
        parts = " ".join(RECOMPUTED[part] for part in settings.computed_again)
        said |= {"--recompute-granularity": "selective", "--recompute-modules": parts}
    return said | _sharding_arguments(settings)


def _sharding_arguments(settings: ModuleSettings) -> Arguments:
    if settings.sharding is Sharding.NONE:
        return {}
    said: Arguments = {"--use-distributed-optimizer": None}
    if settings.instances > 1:
        said["--num-distributed-optimizer-instances"] = str(settings.instances)
    if settings.sharding in _FSDP:
        said |= {
            "--use-megatron-fsdp": None,
            "--data-parallel-sharding-strategy": _FSDP[settings.sharding],
            "--ckpt-format": "fsdp_dtensor",
            "--no-gradient-accumulation-fusion": None,
        }
    return said


def _refuses(plan: Plan) -> str | None:
    if len(plan.model.modules) > 1:
        others = ", ".join(repr(m.name) for m in plan.model.modules if m is not llm_of(plan))
        return f"modules beside the language model ({others}); --to megatron-bridge can"
    return (
        sayable.unplaced(plan)
        or unsayable_decoder(plan)
        or sayable.masked(plan)
        or sayable.too_precise(plan)
        or sayable.frozen_parts(plan)
    )


def unsayable_decoder(plan: Plan) -> str | None:
    """What of the language model Megatron's GPT cannot be built as; None: it can."""
    try:
        decoder = decoder_of(llm_of(plan))
    except ValueError as error:
        return str(error)
    if decoder.family and decoder.family not in FAMILIES:
        name = ARCHITECTURES[decoder.family].name
        return f"a language model of the family {name}"
    if decoder.rope_scaling and decoder.rope_scaling.get("rope_type") != "llama3":
        return f"positions scaled as {decoder.rope_scaling.get('rope_type')!r}"
    return None


def _changes(plan: Plan) -> Sequence[Change]:
    return (
        *sayable.equal_lengths(plan),
        *sayable.wide_optimizer(plan),
        *sayable.computed_again(plan, RECOMPUTED),
        *sayable.one_of_schedules(plan, SCHEDULES),
    )


def as_shell(name: str, said: Arguments) -> str:
    """A shell array, one flag with its value a line."""
    lines = [flag if value is None else f"{flag} {_quoted(flag, value)}" for flag, value in said.items()]
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"


def _quoted(flag: str, value: str) -> str:
    """A list of words stays words; all else is one."""
    return value if flag == "--recompute-modules" else shlex.quote(value)


def _files(said: Said) -> Files:
    decoder = decoder_of(llm_of(said.becomes))
    data: Arguments = {
        "--mock-data": None,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": str(decoder.vocab),
    }
    about = "# Random tokens, to try it out; put --data-path and a tokenizer of your own here.\n"
    return {
        ARGUMENTS: as_shell("ARGUMENTS", _positions(arguments_of(said.becomes))),
        DATA: about + as_shell("DATA", data),
    }


def _positions(said: Arguments) -> Arguments:
    """At least as many positions as a sample has tokens."""
    most = max(int(said["--max-position-embeddings"] or 0), int(said["--seq-length"] or 0))
    return said | {"--max-position-embeddings": str(most)}


def _launch(said: Said) -> Launch:
    environment = nccl_environment()
    if any(each.sharding in _FSDP for each in said.becomes.settings.modules):
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = ("8", "gathering weights runs beside other work")
    return Launch(
        program='"${MEGATRON_LM:?want the folder of a Megatron-LM checkout}/pretrain_gpt.py" '
        '"${ARGUMENTS[@]}" "${DATA[@]}"',
        before=f"source ./{ARGUMENTS}\nsource ./{DATA}\n",
        environment=environment,
        container="A checkout of Megatron-LM at core_v0.19.2, its folder in `MEGATRON_LM`, and what it "
        "wants: torch, Transformer Engine and Apex, as in NVIDIA's PyTorch images.",
    )


TARGET = Target(
    name="megatron",
    system="Megatron-LM (megatron-core 0.19.2)",
    summary="arguments of Megatron-LM's pretrain_gpt.py",
    refuses=_refuses,
    changes=_changes,
    ways=LLM_ALONE,
    files=_files,
    launch=_launch,
)
