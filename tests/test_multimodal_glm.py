"""GLM's towers and language models as users hand them in."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.glm4v import modeling_glm4v as glm4v

from runtime.frontend.parallel import Ranks
from runtime.models.glm import CORRECTION, CorrectedRouter
from runtime.models.norm import widen_norms
from tests import user_models
from tests.encoder_cases import GLM, wide_rotations  # noqa: F401  (a fixture)
from tests.language_models import behind_a_tower, users_model
from tests.test_adapters_glm import MOE
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images, model_of, patched
from tests.user_models import VISION
from workbench.job.notations.cornstarch import ParallelSpec


def tower() -> PreTrainedModel:
    torch.manual_seed(5)
    model: PreTrainedModel = glm4v.Glm4vVisionModel(glm4v.Glm4vVisionConfig(**GLM))
    widen_norms(model, glm4v.Glm4vRMSNorm)
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


def test_a_correction_of_another_size_is_refused() -> None:
    language_model = users_model(MOE)
    router = next(each for each in language_model.modules() if isinstance(each, CorrectedRouter))
    router.register_buffer(CORRECTION, torch.zeros(3))
    model = behind_a_tower(language_model)
    given = {"input_ids": [torch.tensor([1, VISION])], "pixel_values": [user_models.image()]}
    with (
        pytest.raises(ValueError, match=rf"buffer '.*{CORRECTION}' must have shape \(4,\), got \(3,\)"),
        spec_of(num_microbatches=1).apply(model, ranks=Ranks.EMULATED) as parallel,
    ):
        parallel.execute(given)
