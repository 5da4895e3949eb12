"""Kimi K2.5 as a whole: gradients, ranks, sizes of images, refusals; and DeepSeek-V3 as users hand it in."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_sizes import KIMI_SEEN
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from tests import paper_models, user_models
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.language_models import users_model
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images
from tests.test_tilings import source_of
from tests.user_models import VISION as VISION_ID
from workbench.model.composites.composite import VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import Module
from workbench.plan.runnable import check_family


@cache
def limited(limits: tuple[tuple[str, int], ...]) -> Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1} | dict(limits)
    part = take_apart({"model_type": "kimi_k25", "vision_config": sizes, "projection_hidden_size": 64})
    tower = part.modules[VISION]
    return module_from_config(
        tower.config, name=VISION, modality=VISION, projector=tower.projector, llm_width=8
    )


@given(
    height=st.integers(1, 9000),
    width=st.integers(1, 9000),
    limits=st.sampled_from([{}, {"max_patches": 256}, {"max_side_patches": 20}]),
)
def test_images_are_as_large_as_the_processor_makes_them(
    height: int, width: int, limits: dict[str, int]
) -> None:
    most, side = limits.get("max_patches", 16_384), limits.get("max_side_patches", 512)
    resize = source_of("kimi_k25.image_processing_kimi_k25", "navit_resize").navit_resize
    _, padded = resize(height, width, 14, 2, most, side)
    num = padded[0] * padded[1] // 14**2
    assert image_tokens(limited(tuple(limits.items())), height, width) == (num, num // 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pos_emb_width": 5}, "pos_emb_width must be pos_emb_height 6, got 5; nearest: 6"),
        ({"num_attention_heads": 4}, "want a multiple of 4, got 6 of a head; nearest: 8"),
    ],
)
def test_towers_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "kimi_k25_vision", **KIMI_SEEN, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="v", modality=VISION, llm_width=48))


def test_other_norms_and_squares_are_refused() -> None:
    config = CONFIGS["kimi_k25"]
    with pytest.raises(ValueError, match="projection_hidden_size must be the tower's hidden_size 24, got 25"):
        take_apart(config | {"projection_hidden_size": 25})
    oblong = config["vision_config"] | {"merge_kernel_size": [2, 1]}
    with pytest.raises(ValueError, match=r"merge_kernel_size must be a whole number >= 1, got \[2, 1\]"):
        take_apart(config | {"vision_config": oblong})


def test_a_users_tower_and_language_model() -> None:
    """Images of any size, as they are."""
    torch.manual_seed(5)
    tower = kimi.Kimi_K25VisionModel(kimi.Kimi_K25VisionConfig(**KIMI_SEEN)).double()
    vision = {"vision": ModalityModule(tower, "mlp")}
    first, *others = images()
    given_images = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = MultimodalModule(vision, user_models.llama(), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
    model = MultimodalModule(vision, users_model(paper_models.DEEPSEEK), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
