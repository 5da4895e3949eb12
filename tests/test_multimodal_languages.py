"""Language models of users behind a tower: those with weights, corrections or factors that others lack."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import (
    Ernie4_5_MoeAttention,
    Ernie4_5_MoeTopKRouter,
)
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.decoder_families import DECODERS
from runtime.models.glm import CORRECTION
from runtime.models.norm import widen_norms
from runtime.models.wide_float import in_float64
from tests import user_models
from tests.test_adapters_gpt_oss import TINY
from tests.test_multimodal import assert_parity, spec_of
from tests.user_models import VISION
from workbench.model.families.registry import ARCHITECTURES


def gpt_oss_model() -> PreTrainedModel:
    torch.manual_seed(5)
    sizes = {key: value for key, value in TINY.items() if key != "model_type"}
    model: PreTrainedModel = GptOssForCausalLM(GptOssConfig(**sizes))
    widen_norms(model, gpt_oss.GptOssRMSNorm)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(weight, std=0.5)
    model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


def language_model(kind: str) -> PreTrainedModel:
    """Of its example, with corrections of its routers that are not 0."""
    config = {"model_type": kind, **next(iter(ARCHITECTURES[kind].examples.values())).config}
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    norm = DECODERS[kind].norm
    assert norm is not None
    widen_norms(model, norm)
    for name, tensor in model.state_dict().items():
        if CORRECTION in name:
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
    for module in model.modules():
        if isinstance(module, Ernie4_5_MoeAttention | Ernie4_5_MoeTopKRouter | MiniMaxM2TopKRouter):
            module.forward = in_float64(module.forward)
    if "experts" in ARCHITECTURES[kind].name or kind == "minimax_m2":
        model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "minimax_m2", "granite", "apertus", "ministral3"])
def test_others_train_as_in_one_process_behind_a_tower(kind: str) -> None:
    assert_same(language_model(kind))


def test_gpt_oss_trains_as_in_one_process_behind_a_tower() -> None:
    assert_same(gpt_oss_model())


def assert_same(language: PreTrainedModel) -> None:
    tower = ModalityModule(user_models.siglip(), "mlp")
    model = MultimodalModule({"vision": tower}, language, token_ids={"vision": VISION})
    given = {
        "input_ids": [torch.tensor([1, VISION, 2, 3]), torch.tensor([4, 5, 6, 7, 8])],
        "pixel_values": [user_models.image(), None],
    }
    assert_parity(model, spec_of(num_microbatches=2), given, ranks=Ranks.EMULATED)
