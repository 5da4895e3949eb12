"""Language models of users behind a tower: those with weights, corrections or factors that others lack."""

import pytest

from runtime.frontend.parallel import Ranks
from runtime.models.glm import CORRECTION
from tests import test_adapters_cohere, test_adapters_gpt_oss, test_lfm2
from tests.encoder_cases import widen_vision_rotations
from tests.language_models import an_image_and_a_text, behind_a_tower, users_model
from tests.test_adapters_glm import MOE
from tests.test_multimodal import assert_parity, spec_of
from tests.test_nemotron_h import LATENT
from workbench.model.families.registry import ARCHITECTURES

EXAMPLES = {
    kind: {"model_type": kind, **next(iter(ARCHITECTURES[kind].examples.values())).config}
    for kind in ("ernie4_5_moe", "minimax_m2", "granite", "apertus", "ministral3")
}
CONFIGS = EXAMPLES | {
    "cohere2": test_adapters_cohere.TINY,
    "glm4_moe": MOE,
    "gpt_oss": test_adapters_gpt_oss.TINY,
    "lfm2": test_lfm2.TINY,
    "nemotron_h": LATENT,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_they_train_as_in_one_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)
    model = behind_a_tower(users_model(CONFIGS[kind]))
    assert_parity(model, spec_of(num_microbatches=2), an_image_and_a_text(), ranks=Ranks.EMULATED)


def test_corrections_of_a_users_routers_are_used() -> None:
    """Other experts are chosen without them."""
    model, given = behind_a_tower(users_model(MOE)), an_image_and_a_text()
    loss = model(given).loss.item()
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.zero_()
    assert abs(model(given).loss.item() - loss) > 1e-6
