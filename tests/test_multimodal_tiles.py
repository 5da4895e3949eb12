"""Users' models that put tiles together: as one process, as ranks, and as transformers' whole model does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from runtime.models.projector import MLPProjector
from tests import tiny_models, user_models
from tests.test_multimodal import assert_equal, assert_parity, gradients_of, spec_of
from tests.user_models import SIDE_PX, VISION
from workbench.job.notations.cornstarch import ParallelSpec

GRIDS = [[SIDE_PX * rows, SIDE_PX * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
SIZES = ((20, 17), (40, 9), (11, 24))  # (height, width) in pixels
TILES = (5, 4, 3)
IDS = ([1, VISION, 2, 3], [4, 5, 6], [VISION, 7, VISION, 8])


def tiles(num: int) -> Tensor:
    return torch.stack([user_models.image() for _ in range(num)])


def batch() -> dict[str, Any]:
    """As transformers' processors make it: images of all samples in one tensor, filled up with zeros."""
    torch.manual_seed(7)
    images = torch.nn.utils.rnn.pad_sequence([tiles(num) for num in TILES], batch_first=True)
    ids = [torch.tensor(row) for row in IDS]
    return {"input_ids": ids, "pixel_values": images, "image_sizes": torch.tensor(SIZES)}


def model_of(tower: Any, **said: Any) -> MultimodalModule:
    vision = ModalityModule(tower, "mlp", tiles={"image_grid_pinpoints": GRIDS, **said})
    return MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})


@pytest.mark.parametrize("tower", [user_models.clip, user_models.siglip])
@pytest.mark.parametrize("said", [{}, {"vision_aspect_ratio": "anyres_max_2"}], ids=["whole", "shrunk"])
def test_ranks_put_tiles_together_as_one_process_does(tower: Any, said: dict[str, str]) -> None:
    model = model_of(tower(), **said)
    spec = spec_of(num_microbatches=3, encoder_specs={"vision": ParallelSpec(pp_size=2)})
    assert_parity(model, spec, batch(), ranks=Ranks.EMULATED)
    model(batch()).loss.backward()
    assert model.vision_encoder.image_newline.grad.abs().max() > 0


def test_a_frozen_projector_keeps_the_token_that_ends_rows() -> None:
    model = model_of(user_models.clip())
    model.vision_encoder.projector.train(mode=False)
    assert_parity(model, spec_of(num_microbatches=3), batch(), ranks=Ranks.EMULATED)
    assert "vision_encoder.image_newline" not in gradients_of(model)


def test_images_may_stand_by_sample() -> None:
    model, whole = model_of(user_models.clip()), batch()
    first, *others = [image[:num] for image, num in zip(whole["pixel_values"], TILES, strict=True)]
    apart = whole | {"pixel_values": [first, None, others], "image_sizes": [SIZES[:1], None, SIZES[1:]]}
    assert model(apart).loss.item() == model(whole).loss.item()


def test_the_loss_is_that_of_llava_next() -> None:
    """CLIP's last hidden state, which it reads where its configuration says so."""
    torch.manual_seed(3)
    whole: Any = LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=tiny_models.CLIP,
            text_config=tiny_models.LLAMA,
            vision_feature_layer=-1,
            image_grid_pinpoints=GRIDS,
            image_token_index=VISION,
        )
    )
    norm = type(whole.model.language_model.norm)
    widen_norms(whole, norm)
    whole = whole.double().eval()
    llm = user_models.llama()
    llm.model.load_state_dict(whole.model.language_model.state_dict())
    llm.lm_head.load_state_dict(whole.lm_head.state_dict())
    projector = MLPProjector(tiny_models.CLIP["hidden_size"], tiny_models.WIDTH).double()
    projector.load_state_dict(whole.model.multi_modal_projector.state_dict())
    vision = ModalityModule(whole.model.vision_tower, projector, tiles={"image_grid_pinpoints": GRIDS})
    ours = MultimodalModule({"vision": vision}, llm, token_ids={"vision": VISION})
    with torch.no_grad():
        ours.vision_encoder.image_newline.copy_(whole.model.image_newline)
    given = batch()
    output = ours(given)
    output.loss.backward()
    sums, count = [], 0
    for index, sample in enumerate(ours.prepare(given).samples):
        own = [k for k, row in enumerate((0, 2, 2)) if row == index]
        texts = iter(ours.prepare(given).source.texts[index, k] for k in range(9))
        ids = torch.cat(
            [
                next(texts) if part.modality == "text" else torch.full((part.tokens_out,), VISION)
                for part in sample.segments
            ]
        )
        said = {} if not own else {key: given[key][own] for key in ("pixel_values", "image_sizes")}
        logits = whole(input_ids=ids[None], **said).logits[0]
        labels = torch.where(ids == VISION, -100, ids)[1:]
        sums.append(torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum"))
        count += int((labels >= 0).sum())
    loss = torch.stack(sums).sum() / count
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-10)
    newline = vision.image_newline.grad.clone()
    whole.zero_grad()
    loss.backward()
    assert_equal({"newline": newline}, {"newline": whole.model.image_newline.grad})


def test_several_images_of_a_sample_are_a_tile_each_before_onevision() -> None:
    model = model_of(user_models.siglip(), vision_aspect_ratio="anyres_max_9")
    prepared = model.prepare(batch() | {"batch_num_images": torch.tensor([1, 2])})
    one = (SIDE_PX // tiny_models.SIGLIP["patch_size"]) ** 2
    found = [[part.tokens_out for part in sample.of("vision")] for sample in prepared.samples]
    assert found[1:] == [[], [one + 1, one + 1]]
    assert model(batch() | {"batch_num_images": torch.tensor([1, 2])}).loss > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_sizes": None}, "'vision' puts tiles together: give image_sizes"),
        ({"image_sizes": torch.tensor(SIZES[:2])}, "image_sizes must name 3 images, got 2"),
        ({"image_sizes": torch.tensor([(40, 40)] * 3), "pixel_values": torch.zeros(3, 4, 3, 12, 12)}, "got"),
        (
            {"pixel_values": torch.zeros(3, 5, 3, 8, 8)},
            r"20 x 17 px has tiles of shape \(5, 3, 12, 12\), got",
        ),
        ({"pixel_values": [torch.zeros(3, 12, 12), None, None]}, "an image is its tiles"),
        ({"pixel_values": [None]}, "want input for 3 samples, got 1"),
    ],
)
def test_images_that_do_not_fit_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_of(user_models.clip()).prepare(batch() | changes)


def test_words_of_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="tiles has the key 'grids'; want image_grid_pinpoints, vision_"):
        ModalityModule(user_models.clip(), "mlp", tiles={"grids": GRIDS})
    with pytest.raises(ValueError, match="around which there are no callbacks"):
        ModalityModule(
            user_models.clip(), "mlp", tiles={}, postprocess_projector_callback=user_models.scaled_by_place
        )
