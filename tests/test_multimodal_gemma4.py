"""Gemma 4 with images: gradients of the whole model, ranks, sizes of images, published sizes, refusals."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from experiments.doors.gemma_configs import GEMMA4_SEEN
from experiments.doors.whole_configs import CONFIGS
from runtime.data.batches import SyntheticSource
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from runtime.reference import reference_step
from tests import user_models
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images
from tests.test_whole_composites import cuts_of, whole
from tests.user_models import VISION as VISION_ID
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import TEXT, Module
from workbench.plan.runnable import check_family

F64 = torch.float64


@cache
def limited(most: int) -> Module:
    tower = take_apart(
        {"model_type": "gemma4", "vision_config": {"num_hidden_layers": 1, "max_soft_tokens": most}}
    ).modules[VISION]
    return module_from_config(
        tower.config, name=VISION, modality=VISION, projector=tower.projector, llm_width=8
    )


@given(height=st.integers(1, 9000), width=st.integers(1, 9000), most=st.sampled_from([70, 280, 1120]))
def test_images_are_as_large_as_the_processor_makes_them(height: int, width: int, most: int) -> None:
    """Or refused where it refuses them."""
    try:
        made = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
    except ValueError:
        made = (0, 0)
    num = made[0] * made[1] // 16**2
    if num == 0:
        with pytest.raises(ValueError, match=f"image of {height} x {width} px: want 1 to {most} soft tokens"):
            image_tokens(limited(most), height, width)
        return
    assert image_tokens(limited(most), height, width) == (num, num // 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_clipped_linears": True}, "use_clipped_linears must be false: products between bounds"),
        ({"head_dim": 6}, "want a head_dim that is a multiple of 4, got 6; nearest: 8"),
    ],
)
def test_towers_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "gemma4_vision", **GEMMA4_SEEN, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="v", modality=VISION, llm_width=48))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audio_config": {}}, "audio_config must be null: a tower for sound"),
        ({"vision_config": None}, "vision_config must be an object, got none; plan its text_config alone"),
    ],
)
def test_other_parts_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        take_apart(CONFIGS["gemma4"] | change)


def test_images_longer_than_the_tables_of_positions_are_refused() -> None:
    graph, sample = whole("gemma4"), Sample(0, (Segment(VISION, 0, 28, 7, (2, 14)), Segment(TEXT, 0, 5, 5)))
    plan = disjoint_plan(graph, (sample,), cuts_of(graph))
    with pytest.raises(ValueError, match="takes up to 12 patches along a side of an image, got 14"):
        reference_step(plan, seed=0, dtype=F64, source=SyntheticSource(0))


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_a_users_tower(projector: str) -> None:
    """Images of any size, as they are, before a language model of another family."""
    torch.manual_seed(5)
    config = transformers.Gemma4VisionConfig(**GEMMA4_SEEN)
    tower: Any = gemma4.Gemma4VisionModel(config)
    for norm in {type(each) for each in tower.modules() if type(each).__name__.endswith("RMSNorm")}:
        widen_norms(tower, norm)
    vision = {"vision": ModalityModule(tower.double(), projector)}
    first, *others = images()
    given_images = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = MultimodalModule(vision, user_models.llama(), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
