"""Llama 4 against transformers' own: loss and gradients of packed items, experts, limits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama4 import modeling_llama4 as llama4

from runtime.models.decoder import DecoderAdapter
from runtime.models.norm import widen_norms
from runtime.step.stage_module import StageInput
from tests import tiny_models
from tests.encoder_cases import widen_vision_rotations
from tests.test_adapters import build, relative
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT

F64 = torch.float64
SAMPLES = (Sample(1, (Segment(TEXT, 0, 9, 9),)), Sample(2, (Segment(TEXT, 0, 6, 6),)))
LLAMA4: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "llama4_text",
    "head_dim": 8,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [0, 1],
}


def original(weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    config = llama4.Llama4TextConfig.from_dict(LLAMA4)
    config._attn_implementation = "sdpa"
    theirs = llama4.Llama4ForCausalLM(config).to(dtype).eval()
    if dtype == F64:
        widen_norms(theirs, llama4.Llama4TextRMSNorm)
        theirs.to(dtype)
    assert theirs.load_state_dict(weights) is not None
    return theirs


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
def test_two_samples_equal_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 against the untouched model; float64 against it without its detours through float32."""
    if dtype == F64:
        widen_vision_rotations(monkeypatch)
    ours, _, data = build(tiny_models.llm(LLAMA4), dtype, *SAMPLES)
    theirs = original({key: value.detach() for key, value in ours.named_weights()}, dtype)
    losses = []
    for ids in data.input_ids.split(data.tokens_in):
        logits = theirs(input_ids=ids[None]).logits[0]
        losses.append(functional.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
    expected = torch.stack(losses).sum()
    expected.backward()
    grads = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    scale = torch.stack([grad.norm() for grad in grads.values()]).norm()

    tolerance = 1e-10 if dtype == F64 else 1e-5
    loss = ours(StageInput(None, data))
    loss.backward()
    assert relative(loss, expected) <= tolerance
    for key, parameter in ours.named_weights():
        assert (parameter.grad - grads[key]).norm() <= tolerance * scale, key


def test_the_language_half_of_a_composite_configuration() -> None:
    vision = {"vision_output_dim": 4096, "intermediate_size": 3072}  # the defaults do not fit together
    composite = {"model_type": "llama4", "text_config": LLAMA4, "vision_config": vision}
    assert module_from_config(composite, name="llm", modality=TEXT).layers == tiny_models.llm(LLAMA4).layers


def test_items_longer_than_an_attention_chunk_are_refused() -> None:
    ours, _, data = build(tiny_models.llm(LLAMA4 | {"attention_chunk_size": 8}), F64, *SAMPLES)
    with pytest.raises(ValueError, match=r"item \(1, 0\): module 'llm' takes up to 8 tokens"):
        ours(StageInput(None, data))
    assert isinstance(ours.adapter, DecoderAdapter)
