"""Programs of Megatron-Bridge, and parts of them that any program of megatron-core's MIMO classes has."""

_HEAD = '''"""A plan for Megatron-Bridge 0.6, made by `workbench export`; run it under torchrun."""

import torch
'''

_REST = '''

def container(model: object, dataset: object) -> ConfigContainer:
    """Everything but the model. Data, steps, rates and checkpoints are yours to change."""
    return ConfigContainer(
        model=model,
        train=TrainingConfig(**TRAIN),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=IS_BF16, use_distributed_optimizer=IS_SHARDED, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        ddp=DistributedDataParallelConfig(**DDP),
        dataset=dataset,
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        checkpoint=CheckpointConfig(),
    )
'''

_CONFIGS = """from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    {more}OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
"""

TABLES = """
TRAIN = {train}
VOCAB = {vocab}
IS_BF16, IS_SHARDED = {is_bf16}, {is_sharded}
DDP = {ddp}
ACTIVATIONS = {{
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": torch.nn.GELU(approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}}
"""


def _one_module(head: str, provider: str, tables: str = TABLES, rest: str = _REST) -> str:
    """The program of a language model alone.

    Args:
        head: its first lines, with the imports of the provider.
        provider: the class, and arguments beside the tables'.
        tables: besides those of the model.
        rest: the function that makes the container.
    """
    return (
        head
        + _CONFIGS.replace("{more}", "MockGPTDatasetConfig,\n    ")
        + """from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

MODEL = {language}
ACTIVATION = {activation!r}
"""
        + tables
        + rest.replace("{", "{{").replace("}", "}}")
        + f"""

if __name__ == "__main__":
    provider = {provider}
        **MODEL, activation_func=ACTIVATIONS[ACTIVATION], pipeline_dtype=torch.bfloat16 if IS_BF16 else None
    )
    data = MockGPTDatasetConfig(
        seq_length=MODEL["seq_length"],
        random_seed=0,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    pretrain(container(provider, data), forward_step)
"""
    )


ONE_MODULE = _one_module(
    _HEAD + "from megatron.bridge.models.gpt_provider import GPTModelProvider\n", "GPTModelProvider("
)
LATENT_MODULE = _one_module(
    _HEAD.replace("import torch", "from functools import partial\n\nimport torch")
    + """from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.bridge.models.mla_provider import MLAModelProvider
""",
    """MLAModelProvider(
        transformer_layer_spec=partial(get_gpt_decoder_block_spec, use_transformer_engine=True),""",
)
"""The provider's own layers are all equal; here the first may be dense."""

ADAPTED_MODULE = _one_module(
    _HEAD
    + """from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
""",
    "GPTModelProvider(",
    TABLES + 'LORA = {lora}\nPRETRAINED = "CHECKPOINT"  # of the frozen weights\n',
    _REST.replace(
        "checkpoint=CheckpointConfig(),",
        "checkpoint=CheckpointConfig(pretrained_checkpoint=PRETRAINED),\n        peft=CanonicalLoRA(**LORA),",
    ),
)
"""Everything but the adapters is frozen."""

CORE = """from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import (
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

HAS_ENGINE = find_spec("transformer_engine") is not None
if HAS_ENGINE:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as Columns
    from megatron.core.extensions.transformer_engine import TENorm as Norm
    from megatron.core.extensions.transformer_engine import TERowParallelLinear as Rows
else:
    from megatron.core.tensor_parallel import ColumnParallelLinear as Columns
    from megatron.core.tensor_parallel import RowParallelLinear as Rows
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
"""

MODULES = """
MODULE_PARALLELISMS = {parallelisms}
LANGUAGE = {language}
ACTIVATION = {activation!r}
POSITIONS = {positions}
ENCODERS = {encoders}
SPECIAL_TOKEN_IDS = {special}
FREEZE = {freeze}
"""

TOWERS = '''
def config_of(words: dict, activation: str) -> TransformerConfig:
    """A module's configuration; its parallel sizes are those of its grid."""
    return TransformerConfig(
        **words,
        activation_func=ACTIVATIONS[activation],
        pipeline_dtype=torch.bfloat16 if IS_BF16 else torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for lengths that vary
        calculate_per_token_loss=True,
    )


class Patches(CLIPViTModel):
    """Without the class token, which is none of the language model's."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[images, patches, width]."""
        return super().forward(x, attention_mask=attention_mask)[:, self.class_token_len :, :]


def vit_layer() -> ModuleSpec:
    """A block of a tower, by Transformer Engine where that is installed."""
    return get_vit_layer_with_transformer_engine_spec() if HAS_ENGINE else get_vit_layer_with_local_spec()


def gpt_layer(normalization: str, options: dict) -> ModuleSpec:
    """A block of the language model, likewise."""
    if HAS_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec(**options)
    return get_gpt_layer_local_spec(**options, normalization=normalization)


def encoder_spec(words: dict) -> ModuleSpec:
    """A tower and its projector."""
    tower = ModuleSpec(
        module=Patches,
        params={{
            "transformer_config": config_of(words["config"], words["activation"]),
            "transformer_layer_spec": vit_layer(),
            "ln_pre_impl": Norm,
            "ln_post_impl": Norm,
            **words["tower"],
        }},
    )
    projector = ModuleSpec(
        module=MultimodalProjector,
        params={{
            "config": config_of(words["projector"], "gelu"),
            "submodules": MLPSubmodules(linear_fc1=Columns, linear_fc2=Rows),
            "projector_type": words["projector_type"],
            "input_size": words["config"]["hidden_size"],
        }},
    )
    return ModuleSpec(
        module=VisionModalitySubmodules,
        params={{}},
        submodules={{"encoders": {{"tower": tower}}, "input_projections": [projector]}},
    )


def language_spec() -> ModuleSpec:
    """The language model."""
    options = {{"num_experts": LANGUAGE.get("num_moe_experts"), "qk_layernorm": LANGUAGE["qk_layernorm"]}}
    return ModuleSpec(
        module=GPTModel,
        params={{
            "config": config_of(LANGUAGE, ACTIVATION),
            "transformer_layer_spec": gpt_layer(LANGUAGE["normalization"], options),
            "vocab_size": VOCAB,
            **POSITIONS,
        }},
    )

'''

SEVERAL_MODULES = (
    _HEAD
    + """from megatron.bridge.data.megatron_mimo.loaders import build_megatron_mimo_data_loaders
from megatron.bridge.data.megatron_mimo.mock_provider import MockMegatronMIMOProvider
from megatron.bridge.models.megatron_mimo.megatron_mimo_config import (
    MegatronMIMOParallelismConfig,
    ModuleParallelismConfig,
)
from megatron.bridge.models.megatron_mimo.megatron_mimo_provider import MegatronMIMOProvider
"""
    + _CONFIGS.replace("{more}", "")
    + """from megatron.bridge.training.megatron_mimo_step import forward_step
from megatron.bridge.training.pretrain_megatron_mimo import pretrain_megatron_mimo
"""
    + CORE
    + MODULES
    + "DATA = {data}\n"
    + TABLES
    + _REST.replace("{", "{{").replace("}", "}}")
    + TOWERS
    + '''
def provider() -> MegatronMIMOProvider:
    """All modules with their grids."""
    return MegatronMIMOProvider(
        language_model_spec=language_spec(),
        modality_submodules_spec={{name: encoder_spec(words) for name, words in ENCODERS.items()}},
        special_token_ids=SPECIAL_TOKEN_IDS,
        megatron_mimo_parallelism_config=MegatronMIMOParallelismConfig(
            module_parallelisms={{
                name: ModuleParallelismConfig(**words) for name, words in MODULE_PARALLELISMS.items()
            }},
            special_token_ids=SPECIAL_TOKEN_IDS,
        ),
        bf16=IS_BF16,
        **FREEZE,
    )


def iterators(config: ConfigContainer, infra: object) -> tuple:
    """Random images and text, to try it out: DATA names processors and a tokenizer that you have."""
    del infra
    train, valid, _ = build_megatron_mimo_data_loaders(
        cfg=config,
        train_state=None,
        megatron_mimo_provider=config.dataset,
        train_samples=TRAIN["train_iters"] * TRAIN["global_batch_size"],
        valid_samples=0,
        test_samples=0,
    )
    return (None if train is None else iter(train)), (None if valid is None else iter(valid))


if __name__ == "__main__":
    pretrain_megatron_mimo(container(provider(), MockMegatronMIMOProvider(**DATA)), forward_step, iterators)
'''
)
