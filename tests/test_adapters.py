"""Adapters against transformers' own models: the same weights must give the same numbers."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.clip.modeling_clip import CLIPVisionConfig, CLIPVisionModel
from transformers.models.gemma.modeling_gemma import GemmaForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.phi.modeling_phi import PhiForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.siglip.modeling_siglip import SiglipVisionConfig, SiglipVisionModel
from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperEncoder

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.choose import ADAPTERS, adapter_of
from runtime.models.configuration import configuration
from runtime.models.decoder import DecoderAdapter, NextTokenHead
from runtime.models.norm import widen_norms
from runtime.models.vision import grid_of
from runtime.reference import whole_stage
from runtime.step.stage_module import StageInput, StageModule, build_stage_module
from tests import tiny_models
from workbench.data.sample import Item, Sample, Segment
from workbench.model.model_graph import TEXT, ModelGraph, Module, Source
from workbench.plan.plan import Microbatch

CAUSAL = {
    "llama": LlamaForCausalLM,
    "llama-tied": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "mistral": MistralForCausalLM,
    "gemma": GemmaForCausalLM,
    "phi3": Phi3ForCausalLM,
    "phi": PhiForCausalLM,
}
ENCODERS = {
    "siglip": (tiny_models.SIGLIP, lambda c: SiglipVisionModel(SiglipVisionConfig.from_dict(c))),
    "clip": (tiny_models.CLIP, lambda c: CLIPVisionModel(CLIPVisionConfig.from_dict(c))),
    "whisper": (tiny_models.WHISPER, lambda c: WhisperEncoder(WhisperConfig.from_dict(c))),
}
INTERPOLATED = {"interpolate_pos_encoding": True}
SOURCE = SyntheticSource(5)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def build(module: Module, dtype: torch.dtype, *batch: Sample) -> tuple[StageModule, Microbatch, object]:
    plan = tiny_models.plan_of(ModelGraph(name="alone", modules=(module,)), batch)
    stage = whole_stage(module)
    microbatch = plan.microbatches[0]
    data = microbatch_data(plan, stage, microbatch, SOURCE, dtype=dtype)
    return build_stage_module(plan, stage, seed=3, dtype=dtype), microbatch, data


def original_llm(name: str, ours: StageModule, dtype: torch.dtype) -> nn.Module:
    """transformers' whole model with our weights; every one of its weights comes from ours."""
    adapter = ours.adapter
    assert isinstance(adapter, DecoderAdapter)
    config = adapter.family.config.from_dict(tiny_models.DECODERS[name])
    config._attn_implementation = "sdpa"
    theirs = CAUSAL[name](config).to(dtype).eval()
    weights = {key: value.detach() for key, value in ours.named_weights()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= set(adapter.aliases)
    theirs.tie_weights()
    if adapter.family.norm is not None and dtype == torch.float64:
        keep = dict(theirs.named_parameters())
        widen_norms(theirs, adapter.family.norm, adapter.family.norm_offset)
        with torch.no_grad():
            for key, parameter in theirs.named_parameters():
                parameter.data = keep[key].data
    return theirs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(tiny_models.DECODERS))
def test_decoder_equals_transformers(name: str, dtype: torch.dtype) -> None:
    """float32 against the untouched model; float64 against it with norms that stay in float64."""
    sample = Sample(1, (Segment(TEXT, 0, 9, 9),))
    ours, _, data = build(tiny_models.llm(tiny_models.DECODERS[name]), dtype, sample)
    theirs = original_llm(name, ours, dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5

    loss = ours(StageInput(None, data))
    loss.backward()
    logits = theirs(input_ids=data.input_ids[None]).logits[0]
    expected = functional.cross_entropy(logits[:-1], data.input_ids[1:], reduction="sum")
    expected.backward()

    assert relative(loss, expected) <= tolerance
    original = dict(theirs.named_parameters())
    scale = torch.stack([p.grad.norm() for p in original.values()]).norm()
    for key, parameter in ours.named_weights():
        assert (parameter.grad - original[key].grad).norm() <= tolerance * scale, key


@pytest.mark.parametrize(
    ("name", "segment", "lacking", "more"),
    [
        pytest.param("siglip", ("vision", 9, 9), "head.", {}, id="siglip"),
        pytest.param("siglip", ("vision", 6, 6), "head.", INTERPOLATED, id="siglip-smaller"),
        pytest.param("siglip", ("vision", 12, 12), "head.", INTERPOLATED, id="siglip-larger"),
        pytest.param("clip", ("vision", 10, 9), "post_layernorm.", {}, id="clip-drops-class-token"),
        pytest.param("whisper", ("audio", 10, 10), "nothing", {}, id="whisper"),
    ],
)
def test_encoders_equal_transformers(
    name: str, segment: tuple[str, int, int], lacking: str, more: dict[str, bool]
) -> None:
    config, make_theirs = ENCODERS[name]
    modality, tokens_in, tokens_out = segment
    sample = Sample(1, (Segment(modality, 0, tokens_in, tokens_out),))
    ours, _, data = build(tiny_models.encoder(config, modality), torch.float64, sample)
    theirs = make_theirs(config).double().eval()
    load_encoder(theirs, ours, lacking=lacking)

    features = ours(StageInput(None, data))
    hidden = theirs(data.raw[0][None], **more).last_hidden_state[0, tokens_in - tokens_out :]
    assert features.shape == (tokens_out, tiny_models.WIDTH)
    assert relative(features, ours.layers[-1].projector(hidden)) <= 1e-10


def load_encoder(theirs: nn.Module, ours: StageModule, *, lacking: str) -> None:
    """Give our weights to transformers' model; only `lacking` may keep its own."""
    weights = {key: value.detach() for key, value in ours.named_weights() if not key.startswith("projector.")}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(key.startswith(lacking) for key in missing)


def test_whisper_clips_shorter_than_the_longest_take_the_first_positions() -> None:
    sample = Sample(1, (Segment("audio", 0, 4, 4),))
    ours, _, data = build(tiny_models.encoder(tiny_models.WHISPER, "audio"), torch.float64, sample)
    assert data.raw[0].shape == (8, 8)
    assert ours(StageInput(None, data)).shape == (4, tiny_models.WIDTH)


def test_runs_of_tokens_are_averaged_where_an_item_shrinks() -> None:
    whole = Sample(1, (Segment("audio", 0, 6, 6),))
    module = tiny_models.encoder(tiny_models.WHISPER, "audio")
    linear = replace(module, source=replace(module.source, projector="linear"))
    ours, _, data = build(linear, torch.float64, whole)
    each = ours(StageInput(None, data))
    pooled = ours(StageInput(None, replace(data, tokens_out=(3,))))
    assert relative(pooled, each.unflatten(0, (3, 2)).mean(dim=1)) <= 1e-12
    with pytest.raises(ValueError, match="6 tokens do not shrink evenly to 4"):
        ours(StageInput(None, replace(data, tokens_out=(4,))))


@pytest.mark.parametrize(
    ("patches", "grid"), [(1, (1, 1)), (6, (2, 3)), (9, (3, 3)), (12, (3, 4)), (7, (1, 7))]
)
def test_grids_are_as_square_as_they_can_be(patches: int, grid: tuple[int, int]) -> None:
    assert grid_of(patches) == grid


def with_config(module: Module, **changes: object) -> Module:
    assert module.source is not None
    config = json.loads(module.source.config) | changes
    return replace(module, source=replace(module.source, config=json.dumps(config)))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(replace(tiny_models.llm(), source=None), "has no source", id="no-source"),
        pytest.param(
            replace(tiny_models.llm(), source=Source(architecture="llana", config="{}")),
            f"no adapter for 'llana'; there are {', '.join(sorted(ADAPTERS))}",
            id="unknown",
        ),
        pytest.param(
            with_config(tiny_models.llm(), num_hidden_layers=3),
            "makes 5 layers .* the plan has 4",
            id="layers",
        ),
        pytest.param(
            with_config(tiny_models.llm(), hidden_size="x"),
            "module 'llm': transformers refuses its configuration: .* 'hidden_size' expected int, got str",
            id="type",
        ),
        pytest.param(
            with_config(tiny_models.llm(), num_attention_heads=5),
            "The hidden size .32. is not a multiple of the number of attention heads .5.",
            id="heads",
        ),
        pytest.param(
            with_config(tiny_models.llm(), rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope type 'dynamic' depends on the longest sequence",
            id="rope",
        ),
    ],
)
def test_modules_that_cannot_run_are_refused(module: Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_of(module)


def test_layers_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match=r"module 'llm': .* unknown value 'nope'"):
        adapter_of(with_config(tiny_models.llm(), hidden_act="nope")).build(1)
    with pytest.raises(ValueError, match=r"module 'llm': .* Padding_idx must be within num_embeddings"):
        adapter_of(with_config(tiny_models.llm(), pad_token_id=900)).build(0)


def test_sizes_that_an_encoder_cannot_take_are_refused() -> None:
    audio = adapter_of(tiny_models.encoder(tiny_models.WHISPER, "audio"))
    with pytest.raises(ValueError, match="'audio' has 10 positions, got 11 tokens"):
        audio.raw_shape(Segment("audio", 0, 11, 11))
    clip = adapter_of(tiny_models.encoder(tiny_models.CLIP, "vision"))
    with pytest.raises(ValueError, match="no patches left"):
        clip.raw_shape(Segment("vision", 0, 1, 1))


def test_the_head_gives_logits() -> None:
    ours, _, data = build(tiny_models.llm(), torch.float64, Sample(1, (Segment(TEXT, 0, 5, 5),)))
    head = ours.layers[-1]
    assert isinstance(head, NextTokenHead)
    assert head.logits(torch.zeros(5, tiny_models.WIDTH, dtype=torch.float64)).shape == (5, 64)
    assert data.items == (Item(1, 0),)


def test_equal_configurations_are_checked_once_and_everyone_has_their_own(monkeypatch: pytest.MonkeyPatch):
    """Every microbatch asks for its module's, which transformers takes longest to check."""
    fields = tiny_models.SIGLIP | {"hidden_size": 48}
    asked = []
    made = SiglipVisionConfig.from_dict
    monkeypatch.setattr(SiglipVisionConfig, "from_dict", lambda given: asked.append(given) or made(given))
    one, other = (configuration(SiglipVisionConfig, fields) for _ in range(2))
    assert len(asked) == 1
    assert one.to_dict() == other.to_dict() == made(dict(fields)).to_dict()
    one.hidden_size = 1
    assert (other.hidden_size, configuration(SiglipVisionConfig, fields).hidden_size) == (48, 48)
