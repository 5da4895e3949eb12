"""Images of any size in users' models: padded ones, and patches with their grids as processors make them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PixtralVisionConfig, PixtralVisionModel, PreTrainedModel
from transformers.models.exaone4_5 import modeling_exaone4_5 as exaone
from transformers.models.internvl import modeling_internvl as internvl
from transformers.models.phi4_multimodal import modeling_phi4_multimodal as phi4
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2

from experiments.doors.whole_sizes import EXAONE_SEEN
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from runtime.models.patch_grid import patches_of, step_of
from tests import tiny_models, user_models
from tests.encoder_cases import CASES
from tests.test_multimodal import assert_parity, spec_of
from tests.user_models import VISION
from workbench.job.notations.cornstarch import ParallelSpec
from workbench.model.model_graph import TEXT

PATCH, MERGE, FRAMES = 4, 2, 2
SIZES = ((8, 16), (16, 24), (24, 8))  # height and width in pixels
IDS = ([1, VISION, 2, 3], [VISION, 4, VISION, 5], [6, 7])


@pytest.fixture(autouse=True)
def _rotations_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    user_models.rotate_in_given_precision(monkeypatch, qwen2, qwen2_5, exaone)


def pixtral_tower() -> PreTrainedModel:
    shared = {key: value for key, value in tiny_models.SIGLIP.items() if key != "model_type"}
    torch.manual_seed(5)
    model = PixtralVisionModel(PixtralVisionConfig(**shared | {"hidden_size": 32, "hidden_act": "silu"}))
    widen_norms(model, pixtral.PixtralRMSNorm)
    return model.double()


QWEN: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}


def qwen2_tower(width: int = tiny_models.WIDTH) -> PreTrainedModel:
    torch.manual_seed(5)
    config = qwen2.Qwen2VLVisionConfig(**QWEN, embed_dim=32, hidden_size=width, mlp_ratio=2)
    return qwen2.Qwen2VisionTransformerPretrainedModel(config).double()


def qwen25_tower() -> PreTrainedModel:
    torch.manual_seed(5)
    config = qwen2_5.Qwen2_5_VLVisionConfig(
        **QWEN,
        hidden_size=32,
        out_hidden_size=tiny_models.WIDTH,
        intermediate_size=40,
        window_size=16,
        fullatt_block_indexes=[1],
    )
    model = qwen2_5.Qwen2_5_VisionTransformerPretrainedModel(config)
    widen_norms(model, qwen2_5.Qwen2_5_VLRMSNorm)
    return model.double()


def exaone_tower() -> PreTrainedModel:
    torch.manual_seed(5)
    config = exaone.Exaone4_5_VisionConfig(**EXAONE_SEEN | {"out_hidden_size": tiny_models.WIDTH})
    model = exaone.Exaone4_5_VisionModel(config)
    widen_norms(model, exaone.Exaone4_5_RMSNorm)
    return model.double()


def images() -> list[Tensor]:
    torch.manual_seed(7)
    return [user_models.image(*size) for size in SIZES]


def ids() -> list[Tensor]:
    return [torch.tensor(row) for row in IDS]


def model_of(tower: PreTrainedModel, projector: str, **changes: Any) -> MultimodalModule:
    vision = ModalityModule(tower, projector, **changes)
    return MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})


def padded(given: list[Tensor]) -> dict[str, Tensor]:
    """One tensor for all images, and their sizes."""
    whole = torch.full((len(given), 3, 24, 24), 9.0, dtype=torch.float64)
    for index, image in enumerate(given):
        whole[index, :, : image.shape[1], : image.shape[2]] = image
    return {"pixel_values": whole, "image_sizes": torch.tensor([tuple(i.shape[1:]) for i in given])}


def patched(given: list[Tensor]) -> dict[str, Tensor]:
    """All patches one image after the other, and every image's frames, rows and columns."""
    grids = [[1, i.shape[1] // PATCH, i.shape[2] // PATCH] for i in given]
    pixels = torch.cat([patches_of(image, PATCH, MERGE, FRAMES) for image in given])
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def test_pixtral_reads_images_of_any_size() -> None:
    """Padding is cut off: the second sample's images stand beside each other in one tensor."""
    first, *others = images()
    batch: dict[str, Any] = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = model_of(pixtral_tower(), "mlp")
    sizes = [[s.grid for s in sample.of("vision")] for sample in model.prepare(batch).samples]
    assert sizes == [[(2, 4)], [(4, 6), (6, 2)], []]
    assert_parity(model, spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)
    whole = padded(images())
    per_sample = [whole["pixel_values"][:1], whole["pixel_values"][1:], None]
    again = batch | {"pixel_values": per_sample, "image_sizes": whole["image_sizes"]}
    assert model(again).loss.item() == model(batch).loss.item()


@pytest.mark.parametrize(
    "tower", [qwen2_tower, qwen25_tower, exaone_tower], ids=["qwen2-vl", "qwen2.5-vl", "exaone-4.5"]
)
def test_qwen_reads_patches_and_grids(tower: Any) -> None:
    """As its processor gives them, for the whole batch; tokens already made room for, or one an image."""
    batch: dict[str, Any] = {"input_ids": ids(), **patched(images())}
    model = model_of(tower(), "merger")
    spec = spec_of(num_microbatches=3, encoder_specs={"vision": ParallelSpec(pp_size=2)})
    assert_parity(model, spec, batch, ranks=Ranks.EMULATED)
    prepared = model.prepare(batch)
    assert [[s.tokens_out for s in sample.of("vision")] for sample in prepared.samples] == [[2], [6, 3], []]
    loss = model(batch).loss.item()
    texts = prepared.source.texts
    roomy = [
        torch.cat([
            texts[i, s.k] if s.modality == TEXT else torch.full((s.tokens_out,), VISION)
            for s in sample.segments
        ])
        for i, sample in enumerate(prepared.samples)
    ]  # fmt: skip
    assert model(batch | {"input_ids": roomy}).loss.item() == loss
    apart = [patched(part) if part else None for part in (images()[:1], images()[1:], [])]
    per_sample = {key: [None if p is None else p[key] for p in apart] for key in patched(images())}
    assert model({"input_ids": ids(), **per_sample}).loss.item() == loss
    assert model({"input_ids": ids(), "pixel_values": [images()[0], images()[1:], None]}).loss.item() == loss


def test_a_merger_alone_is_trained() -> None:
    """And a callback behind it sees every image."""
    model = model_of(
        qwen2_tower(),
        "merger",
        trainable="projector",
        postprocess_projector_callback=user_models.scaled_by_place,
    )
    batch = {"input_ids": ids(), **patched(images())}
    trained = {name for name, p in model.vision_encoder.named_parameters() if p.requires_grad}
    assert trained
    assert all("merger" in name for name in trained)
    assert_parity(model, spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)


def test_patches_of_an_image_and_back() -> None:
    image = images()[1]
    frames = step_of(patches_of(image, PATCH, MERGE, FRAMES), (4, 6), PATCH, MERGE, FRAMES)
    assert torch.equal(frames, torch.stack([image] * FRAMES, dim=1))
    step = torch.randn(3, FRAMES, 16, 24)
    assert torch.equal(step_of(patches_of(step, PATCH, MERGE, FRAMES), (4, 6), PATCH, MERGE, FRAMES), step)


@pytest.mark.parametrize("tower", [qwen2_tower, qwen25_tower], ids=["qwen2-vl", "qwen2.5-vl"])
def test_videos_stand_among_images(tower: Any) -> None:
    """A video of three steps, then an image; features are those of the whole model's own call."""
    steps = [torch.randn(3, FRAMES, 16, 8, dtype=torch.float64) for _ in range(3)]
    given = [*steps, images()[1]]
    pixels = torch.cat([patches_of(x, PATCH, MERGE, FRAMES) for x in given])
    grids = torch.tensor([[3, 4, 2], [1, 4, 6]])
    rows = [torch.tensor([1, *[VISION] * 6, 2]), torch.tensor([*[VISION] * 6, 4])]
    batch = {"input_ids": rows, "pixel_values": pixels, "image_grid_thw": grids}
    model = model_of(tower(), "merger")
    prepared = model.prepare(batch)
    assert [[s.grid for s in sample.of("vision")] for sample in prepared.samples] == [[(4, 2)] * 3, [(4, 6)]]
    assert_parity(model, spec_of(num_microbatches=2), batch, ranks=Ranks.EMULATED)
    whole = model.vision_encoder.module(pixels, grids).pooler_output
    ours = [
        adapter.features(model.vision_encoder.module, x)
        for adapter in [model.architectures()["vision"].adapter]
        for x in prepared.source.items.values()
    ]
    assert torch.allclose(torch.cat(ours), whole, rtol=1e-12, atol=1e-14)
    apart = {"pixel_values": list(pixels.split([24, 24])), "image_grid_thw": list(grids[:, None])}
    assert model(batch | apart).loss.item() == model(batch).loss.item()


def clip() -> dict[str, Tensor]:
    given = patched(images())
    given["image_grid_thw"][0, 0] = 2
    return given


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (clip(), "image_grid_thw counts 52 patches, pixel_values has 44"),
        ({"image_grid_thw": torch.tensor([[-1, 2, 4]])}, r">= 1 step, row and column, got \[-1, 2, 4\]"),
        ({"image_grid_thw": torch.tensor([[1, 2, 4]])}, "counts 8 patches, pixel_values has 44"),
        ({"image_grid_thw": torch.tensor([[1, 1, 44]])}, "a grid of 1 x 44 patches, both multiples of 2"),
        ({"input_ids": [torch.tensor([VISION] * 5)] * 3}, "sample 0: 5 special tokens are not"),
        ({"input_ids": [torch.tensor([1])] * 3}, "special tokens for 0 images, got 3"),
        ({"pixel_values": torch.zeros(3, 3, 8, 8)}, r"pixel_values must be patches \[patches, numbers\]"),
    ],
)  # fmt: skip
def test_grids_that_do_not_fit(changes: dict[str, Any], what: str) -> None:
    batch = {"input_ids": ids(), **patched(images()), **changes}
    with pytest.raises(ValueError, match=what):
        model_of(qwen2_tower(), "merger").prepare(batch)


def test_what_is_refused_about_towers() -> None:
    with pytest.raises(ValueError, match="there is nothing between the two"):
        model_of(qwen2_tower(), "merger", postprocess_module_callback=user_models.squashed)
    with pytest.raises(ValueError, match="projector must be 'merger', got 'mlp'"):
        model_of(qwen2_tower(), "mlp")
    with pytest.raises(ValueError, match=r"'merger.mlp.2.weight' of shape \(32, 128\), got \(24, 128\)"):
        model_of(qwen2_tower(width=24), "merger").graph()
    with pytest.raises(ValueError, match=r"the nearest that it can read is \(3, 8, 16\)"):
        model_of(pixtral_tower(), "mlp").prepare(
            {"input_ids": ids()[:1], "pixel_values": [user_models.image(9, 17)]}
        )
    with pytest.raises(ValueError, match="image_sizes has 30 x 8 for an image"):
        model_of(pixtral_tower(), "mlp").prepare(
            {"input_ids": ids()[:1], **padded(images()[:1]), "image_sizes": torch.tensor([[30, 8]])}
        )


def internvit() -> tuple[PreTrainedModel, str, list[Tensor]]:
    shared = {key: value for key, value in tiny_models.SIGLIP.items() if key != "model_type"}
    torch.manual_seed(5)
    model = internvl.InternVLVisionModel(internvl.InternVLVisionConfig(**shared)).double()
    return model, "pixel_values", [user_models.image(), user_models.image()]


def conformer() -> tuple[PreTrainedModel, str, list[Tensor]]:
    (config,) = (c.config for c in CASES.values() if c.config["model_type"] == "phi4_multimodal_audio")
    torch.manual_seed(5)
    model = phi4.Phi4MultimodalAudioModel(phi4.Phi4MultimodalAudioConfig.from_dict(config)).double()
    clips = [torch.randn(8, 4 * tokens, dtype=torch.float64) for tokens in (7, 5)]
    return model, "audio_input_features", clips


@pytest.mark.parametrize("make", [internvit, conformer], ids=["internvit", "phi4-audio"])
def test_encoders_of_other_families(make: Any) -> None:
    tower, key, items = make()
    batch = {"input_ids": [*ids()[:1], torch.tensor([VISION, 4, 5])], key: items}
    assert_parity(model_of(tower, "linear"), spec_of(pp=1), batch, ranks=Ranks.EMULATED)
