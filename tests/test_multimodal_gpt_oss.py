"""gpt-oss as the language model of users, behind a tower."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from tests import user_models
from tests.test_adapters_gpt_oss import TINY
from tests.test_multimodal import assert_parity, spec_of
from tests.user_models import VISION


def language_model() -> PreTrainedModel:
    torch.manual_seed(5)
    sizes = {key: value for key, value in TINY.items() if key != "model_type"}
    model: PreTrainedModel = GptOssForCausalLM(GptOssConfig(**sizes))
    widen_norms(model, gpt_oss.GptOssRMSNorm)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(weight, std=0.5)
    model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


def test_it_trains_as_in_one_process_behind_a_tower() -> None:
    model = MultimodalModule(
        {"vision": ModalityModule(user_models.siglip(), "mlp")},
        language_model(),
        token_ids={"vision": VISION},
    )
    given = {
        "input_ids": [torch.tensor([1, VISION, 2, 3]), torch.tensor([4, 5, 6, 7, 8])],
        "pixel_values": [user_models.image(), None],
    }
    assert_parity(model, spec_of(num_microbatches=2), given, ranks=Ranks.EMULATED)
