"""Users' models whose encoder gives features of several blocks to the language model (DeepStack)."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from tests import tiny_models, user_models
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import QWEN, ids, images, patched
from tests.user_models import VISION
from workbench.job.notations.cornstarch import ParallelSpec
from workbench.model.model_graph import TEXT

SHARED = {
    "hidden_size": tiny_models.WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
}
ROTATIONS = {"rope_type": "default", "rope_theta": 10000.0}
AXES = {"mrope_section": [2, 1, 1]}


@pytest.fixture(autouse=True)
def _rotations_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    user_models.rotate_in_given_precision(monkeypatch, qwen3)


def tower() -> qwen3.Qwen3VLVisionModel:
    config = qwen3.Qwen3VLVisionConfig(
        **QWEN | {"depth": 3},
        hidden_size=32,
        intermediate_size=40,
        out_hidden_size=tiny_models.WIDTH,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    )
    torch.manual_seed(5)
    return qwen3.Qwen3VLVisionModel(config).double()


def model_of(**changes: Any) -> MultimodalModule:
    torch.manual_seed(6)
    llm = Qwen3ForCausalLM(Qwen3Config(**SHARED, rope_parameters=ROTATIONS, tie_word_embeddings=False))
    widen_norms(llm, type(llm.model.norm))
    vision = ModalityModule(tower(), "merger", **changes)
    return MultimodalModule({"vision": vision}, llm.double(), token_ids={"vision": VISION})


def batch() -> dict[str, Any]:
    """A sample with one image, one with two, one with text alone."""
    return {"input_ids": ids(), **patched(images())}


def test_the_loss_is_that_of_qwen3_vls_own_language_model() -> None:
    """With equal positions on all three axes, as text alone has, its arithmetic is Qwen3's."""
    model = model_of()
    llm = model.language_model.module
    whole = qwen3.Qwen3VLTextModel(
        qwen3.Qwen3VLTextConfig(**SHARED, rope_parameters=ROTATIONS | AXES)
    ).double()
    whole.load_state_dict(llm.model.state_dict())
    widen_norms(whole, type(whole.norm))
    prepared = model.prepare(batch())
    sums, count = torch.zeros((), dtype=torch.float64), 0
    features = iter(
        model.vision_encoder.module(*[patched([image])[key] for key in ("pixel_values", "image_grid_thw")])
        for image in images()
    )
    for index, sample in enumerate(prepared.samples):
        tokens, is_image, deep, labels = [], [], [], []
        for segment in sample.segments:
            if segment.modality == TEXT:
                ids_T = prepared.source.token_ids(index, segment, SHARED["vocab_size"])
                tokens.append(llm.model.embed_tokens(ids_T))
                labels.append(ids_T)
            else:
                output = next(features)
                tokens.append(output.pooler_output)
                deep.append(output.deepstack_features)
                labels.append(torch.full((segment.tokens_out,), -100))
            is_image.append(torch.full((segment.tokens_out,), segment.modality != TEXT))
        beside = {
            "visual_pos_masks": torch.cat(is_image)[None],
            "deepstack_visual_embeds": [torch.cat(each) for each in zip(*deep, strict=True)],
        }
        states_TD = whole(inputs_embeds=torch.cat(tokens)[None], **(beside if deep else {}))[0][0]
        next_T = torch.cat(labels)[1:]
        logits_TV = llm.lm_head(states_TD)[:-1]
        sums += functional.cross_entropy(logits_TV, next_T, ignore_index=-100, reduction="sum")
        count += int((next_T != -100).sum())
    assert torch.allclose(model(batch()).loss, sums / count, rtol=1e-12)


@pytest.mark.parametrize("trainable", ["all", "projector", "none"])
def test_ranks_train_as_one_process(trainable: str) -> None:
    spec = spec_of(num_microbatches=3, encoder_specs={"vision": ParallelSpec(pp_size=2)})
    assert_parity(model_of(trainable=trainable), spec, batch(), ranks=Ranks.EMULATED)


def test_every_feature_counts() -> None:
    """The loss depends on the mergers inside the tower; hooks are gone after a forward."""
    model = model_of()
    loss = model(batch()).loss
    loss.backward()
    mergers = model.vision_encoder.module.deepstack_merger_list
    assert all(bool(weight.grad.abs().max() > 0) for weight in mergers.parameters())
    assert model(batch()).loss.item() == loss.item()
    assert not any(block._forward_hooks for block in model.language_model.module.model.layers)
