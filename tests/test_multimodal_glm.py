"""GLM's towers and language models as users hand them in."""

from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4v import modeling_glm4v as glm4v

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.glm import CORRECTION, CorrectedRouter
from runtime.models.norm import replace_parts, widen_norms
from tests import user_models
from tests.encoder_cases import GLM, widen_vision_rotations
from tests.test_adapters_glm import MOE
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images, model_of, patched
from tests.user_models import VISION
from workbench.job.notations.cornstarch import ParallelSpec


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)


def tower() -> PreTrainedModel:
    torch.manual_seed(5)
    model: PreTrainedModel = glm4v.Glm4vVisionModel(glm4v.Glm4vVisionConfig(**GLM))
    widen_norms(model, glm4v.Glm4vRMSNorm)
    return model.double()


def mixture() -> PreTrainedModel:
    """GLM-4.5, small, whose corrections change the experts that are chosen."""
    torch.manual_seed(5)
    sizes = {key: value for key, value in MOE.items() if key != "model_type"}
    model: PreTrainedModel = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
    widen_norms(model, glm4_moe.Glm4MoeRMSNorm)
    replace_parts(model, glm4_moe.Glm4MoeTopkRouter, CorrectedRouter)
    for router in (each for each in model.modules() if isinstance(each, CorrectedRouter)):
        torch.nn.init.normal_(router.weight)
        router.get_buffer(CORRECTION).copy_(torch.linspace(0.6, -0.6, MOE["n_routed_experts"]))
    model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


def batch() -> dict[str, Any]:
    return {"input_ids": ids(), **patched(images())}


def test_images_of_any_size_before_a_language_model() -> None:
    spec = spec_of(num_microbatches=3, encoder_specs={"vision": ParallelSpec(pp_size=2)})
    assert_parity(model_of(tower(), "merger"), spec, batch(), ranks=Ranks.EMULATED)


def test_all_that_ends_the_tower_is_trained_as_its_projector() -> None:
    model = model_of(tower(), "merger", trainable="projector")
    trained = {name.split(".")[1] for name, p in model.vision_encoder.named_parameters() if p.requires_grad}
    assert trained == {"post_layernorm", "downsample", "merger"}
    assert_parity(model, spec_of(num_microbatches=3), batch(), ranks=Ranks.EMULATED)


def test_corrections_of_a_users_routers_are_used() -> None:
    """With their values; other experts are chosen without them."""
    model = MultimodalModule(
        {"vision": ModalityModule(user_models.siglip(), "mlp")}, mixture(), token_ids={"vision": VISION}
    )
    given = {
        "input_ids": [torch.tensor([1, VISION, 2, 3]), torch.tensor([4, 5, 6, 7, 8])],
        "pixel_values": [user_models.image(), None],
    }
    assert_parity(model, spec_of(num_microbatches=2), given, ranks=Ranks.EMULATED)
    loss = model(given).loss.item()
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.zero_()
    assert abs(model(given).loss.item() - loss) > 1e-6


def test_a_correction_of_another_size_is_refused() -> None:
    language_model = mixture()
    router = next(each for each in language_model.modules() if isinstance(each, CorrectedRouter))
    router.register_buffer(CORRECTION, torch.zeros(3))
    model = MultimodalModule(
        {"vision": ModalityModule(user_models.siglip(), "mlp")}, language_model, token_ids={"vision": VISION}
    )
    given = {"input_ids": [torch.tensor([1, VISION])], "pixel_values": [user_models.image()]}
    with (
        pytest.raises(ValueError, match=rf"buffer '.*{CORRECTION}' must have shape \(4,\), got \(3,\)"),
        spec_of(num_microbatches=1).apply(model, ranks=Ranks.EMULATED) as parallel,
    ):
        parallel.execute(given)
