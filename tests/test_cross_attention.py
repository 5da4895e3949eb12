"""Llama 3.2 Vision against transformers' own classes, sample by sample."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mllama import modeling_mllama as mllama
from transformers.models.mllama.configuration_mllama import MllamaConfig
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from runtime.data.batches import SyntheticSource
from runtime.models.cross_attention import visible_until
from runtime.models.norm import widen_norms
from runtime.reference import Reference
from tests import cross_models, tiny_models
from workbench.data.sample import Sample

SOURCE = SyntheticSource(5)
BOUND = 1e-10
IMAGE = cross_models.LANGUAGE["vocab_size"]


def original(ours: Reference) -> mllama.MllamaForConditionalGeneration:
    """transformers' whole model with our weights, norms in float64."""
    config = MllamaConfig(
        vision_config=cross_models.VISION, text_config=cross_models.LANGUAGE, image_token_index=IMAGE
    )
    config._attn_implementation = "sdpa"
    theirs = mllama.MllamaForConditionalGeneration(config)
    widen_norms(theirs, mllama.MllamaTextRMSNorm)
    theirs = theirs.double().eval()
    weights: dict[str, Tensor] = {}
    for key, parameter in ours.modules["llm"].named_weights():
        weights[key.replace("model.", "model.language_model.")] = parameter.detach()
    for key, parameter in ours.modules["vision"].named_weights():
        name = "multi_modal_projector" + key.removeprefix("projector.linear")
        weights[name if key.startswith("projector.") else f"vision_model.{key}"] = parameter.detach()
    prefixed = {k if k.startswith(("model.", "lm_head")) else f"model.{k}": w for k, w in weights.items()}
    theirs.load_state_dict(prefixed, strict=True)
    return theirs


def loss_of(theirs: nn.Module, sample: Sample) -> Tensor:
    """Summed next-token loss of one sample, alone, as a processor would prepare it."""
    ids, pixels, ratios, filled = [], [], [], []
    tower = theirs.model.vision_model
    for segment in sample.segments:
        if segment.modality == "text":
            ids += SOURCE.token_ids(sample.id, segment, IMAGE).tolist()
            continue
        ids.append(IMAGE)
        grid = segment.grid or (2, 2)
        raw = SOURCE.raw(sample.id, segment, (grid[0] * grid[1], 3, 8, 8)).double()
        pixels.append(functional.pad(raw, (0,) * 7 + (cross_models.TILES - len(raw),)))
        ratios.append(tower.config.supported_aspect_ratios.index(list(grid)) + 1)
        filled.append([1] * len(raw) + [0] * (cross_models.TILES - len(raw)))
    given = {"input_ids": torch.tensor([ids])}
    if pixels:
        mask = torch.zeros(1, len(ids), len(pixels), cross_models.TILES)
        for index, (start, end) in enumerate(get_cross_attention_token_mask(ids, IMAGE)):
            stop = len(ids) if end == -1 else end
            mask[0, start:stop, index] = torch.tensor(filled[index], dtype=torch.float32)
        given |= {
            "pixel_values": torch.stack(pixels)[None],
            "aspect_ratio_ids": torch.tensor([ratios]),
            "aspect_ratio_mask": torch.tensor([filled]),
            "cross_attention_mask": mask,
        }
    logits = theirs(**given, use_cache=False).logits[0]
    targets = torch.tensor([*ids[1:], IMAGE])
    targets[targets == IMAGE] = -100
    return functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize(
    "batch", [cross_models.batch(), cross_models.batch()[2:3]], ids=["mixed", "text-only"]
)
def test_the_model_equals_transformers(batch: tuple[Sample, ...], tmp_path: Path) -> None:
    """Loss and gradients of every weight: tiles that are not filled, several images, samples without."""
    model = cross_models.model()
    folder = cross_models.save_weights(tmp_path, model.modules)
    plan = tiny_models.plan_of(model, batch)
    ours = Reference(plan, seed=3, dtype=torch.float64, weights=folder)
    theirs = original(ours)
    num_targets = sum(s.num_tokens - len(s.of("vision")) - (s.segments[0].modality == "text") for s in batch)
    expected = torch.stack([loss_of(theirs, sample) for sample in batch]).sum() / num_targets
    expected.backward()
    found = ours.step(SOURCE)
    assert abs(found.loss - expected.item()) <= BOUND * expected.item()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for (module, name), gradient in found.gradients.items():
        key = {
            "llm": name.replace("model.", "model.language_model."),
            "vision": f"model.vision_model.{name}",
        }[module]
        if name.startswith("projector."):
            key = "model.multi_modal_projector" + name.removeprefix("projector.linear")
        if key not in gradients:  # text alone passes cross-attention by
            assert len(batch) == 1
            assert not gradient.any(), key
            continue
        assert gradient.any() or not gradients[key].any(), key
        assert (gradient - gradients[key]).norm() <= BOUND * norm, key


@pytest.mark.parametrize("places", [[0], [2], [0, 1, 5], [1, 3, 4], [0, 1, 2]])
def test_images_are_seen_as_far_as_the_processor_says(places: list[int]) -> None:
    ids = [IMAGE if index in places else 1 for index in range(8)]
    theirs = [8 if end == -1 else end for _, end in get_cross_attention_token_mask(ids, IMAGE)]
    assert visible_until(places, 8) == theirs
