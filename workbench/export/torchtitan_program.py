"""The configuration module of a torchtitan folder: its tables are the plan's, the rest is the same."""

PROGRAM = '''"""A plan for torchtitan: `--module plan_config --config train`; made by `workbench export`."""

from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

MODEL = {model}

PARALLELISM = {parallelism}

TRAINING = {training}

RECOMPUTE = {recompute}

PRODUCTS = {products}  # of the linear layers of blocks, by torchao; None: in the precision

CONVERTERS = {{
    "fp8_row": Float8LinearConverter.Config(
        recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled=True
    ),
    "mxfp8": MXFP8LinearConverter.Config(fqns=["layers"], model_compile_enabled=True),
}}

_LINEAR = {{"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}}


def _norm(width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=MODEL["eps"], param_init={{"weight": nn.init.ones_}})


def _layer(block: type) -> object:
    width, head_dim = MODEL["width"], MODEL["head_dim"]
    rope = (CosSinRoPE if MODEL["qk_norm"] else ComplexRoPE).Config(dim=head_dim, **MODEL["rope"])
    return block.Config(
        attention_norm=_norm(width),
        ffn_norm=_norm(width),
        attention=make_gqa_config(
            dim=width,
            n_heads=MODEL["num_heads"],
            n_kv_heads=MODEL["num_kv_heads"],
            head_dim=head_dim,
            wqkv_param_init=_LINEAR,
            wo_param_init=_LINEAR,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=rope,
            qk_norm=_norm(head_dim) if MODEL["qk_norm"] else None,
        ),
        feed_forward=make_ffn_config(
            dim=width, hidden_dim=MODEL["ffn"], w1_param_init=_LINEAR, w2w3_param_init=_LINEAR
        ),
    )


def model_spec() -> ModelSpec:
    """The model of the plan, built like Qwen3 where heads have norms and like Llama 3 where not."""
    is_qwen = MODEL["qk_norm"]
    model, block = (Qwen3Model, Qwen3TransformerBlock) if is_qwen else (Llama3Model, Llama3TransformerBlock)
    width, vocab, is_tied = MODEL["width"], MODEL["vocab"], MODEL["is_tied"]
    config = model.Config(
        dim=width,
        vocab_size=vocab,
        enable_weight_tying=is_tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=width,
            param_init={{"weight": skip_param_init if is_tied else partial(nn.init.normal_, std=0.02)}},
        ),
        norm=_norm(width),
        lm_head=Linear.Config(in_features=width, out_features=vocab, param_init=_LINEAR),
        layers=[_layer(block) for _ in range(MODEL["num_blocks"])],
    )
    return ModelSpec(
        name="qwen3" if is_qwen else "llama3",
        flavor="plan",
        model=config if PRODUCTS is None else CONVERTERS[PRODUCTS].build().convert(config),
        parallelize_fn=parallelize_qwen3 if is_qwen else parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter if is_qwen else Llama3StateDictAdapter,
    )


def train() -> Trainer.Config:
    """All of it. Data, tokenizer, steps and checkpoints are yours: change them here or by flags."""
    spec = model_spec()
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=MODEL["vocab"])
        ),
        hf_assets_path="./tokenizer",
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(**TRAINING),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**PARALLELISM),
        activation_checkpoint=FullAC.Config() if RECOMPUTE == "full" else None,
        compile=CompileConfig() if PRODUCTS is None else CompileConfig(enable=True, components=["model"]),
    )
'''
