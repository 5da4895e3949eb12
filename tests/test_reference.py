"""The reference against the original transformers models, put together by hand, sample by sample."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from runtime.data.batches import SyntheticSource
from runtime.models.norm import widen_norms
from runtime.reference import Reference, reference_step
from runtime.step.optimizer import OptimizerSettings
from runtime.step.stage_module import StageModule
from tests import tiny_models
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.plan import Plan
from workbench.plan.runnable import count_targets

F64 = torch.float64
SOURCE = SyntheticSource(6)
CONFIGURED = (  # sizes that the original models take as they are
    Sample(0, (Segment(TEXT, 0, 3, 3), Segment("vision", 0, 9, 9), Segment(TEXT, 1, 5, 5))),
    Sample(1, (Segment(TEXT, 0, 6, 6),)),
    Sample(
        2,
        (
            Segment("audio", 0, 10, 10),
            Segment(TEXT, 0, 4, 4),
            Segment("vision", 0, 9, 9),
            Segment("vision", 1, 9, 9),
            Segment(TEXT, 1, 2, 2),
        ),
    ),
)


def _with_sdpa(module: StageModule) -> Any:
    config = copy.deepcopy(module.adapter.config)
    config._attn_implementation = "sdpa"
    return config


class Originals(nn.Module):
    """Llama, SigLIP and Whisper as transformers builds them, with plain projectors between."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        held = reference.modules
        self.llm = LlamaForCausalLM(_with_sdpa(held["llm"]))
        widen_norms(self.llm, LlamaRMSNorm)
        self.vision = SiglipVisionModel(_with_sdpa(held["vision"]))
        self.audio = WhisperEncoder(_with_sdpa(held["audio"]))
        width = tiny_models.WIDTH
        self.vision_projector = nn.ModuleDict(
            {"linear_1": nn.Linear(24, width), "linear_2": nn.Linear(width, width)}
        )
        self.audio_projector = nn.ModuleDict({"linear": nn.Linear(24, width)})
        self.double().eval()
        parts = {
            (key, name.removeprefix("projector.")): weight.detach()
            for module, stage_module in held.items()
            for name, weight in stage_module.named_weights()
            for key in [f"{module}_projector" if name.startswith("projector.") else module]
        }
        for part, child in self.named_children():
            weights = {name: weight for (key, name), weight in parts.items() if key == part}
            missing, unexpected = child.load_state_dict(weights, strict=False)
            assert not unexpected
            assert all(name.startswith("head.") or name == "lm_head.weight" for name in missing)
        self.llm.tie_weights()
        self.audio.embed_positions.requires_grad_(True)

    def loss_sum(self, sample: Sample) -> Tensor:
        """Sum of next-token losses of one sample's text."""
        pieces, targets = [], []
        for segment in sample.segments:
            if segment.modality == TEXT:
                ids = SOURCE.token_ids(sample.id, segment, 64)
                pieces.append(self.llm.model.embed_tokens(ids))
                targets.append(ids)
            else:
                pieces.append(self.features(sample, segment))
                targets.append(torch.full((segment.tokens_out,), -100))
        logits = self.llm(inputs_embeds=torch.cat(pieces)[None]).logits[0]
        return functional.cross_entropy(logits[:-1], torch.cat(targets)[1:], reduction="sum")

    def features(self, sample: Sample, segment: Segment) -> Tensor:
        shape = (3, 12, 12) if segment.modality == "vision" else (8, 20)
        raw = SOURCE.raw(sample.id, segment, shape).double()[None]
        if segment.modality == "vision":
            hidden = self.vision(raw).last_hidden_state[0]
            p = self.vision_projector
            return p["linear_2"](functional.gelu(p["linear_1"](hidden)))
        return self.audio_projector["linear"](self.audio(raw).last_hidden_state[0])

    def named(self) -> dict[tuple[str, str], nn.Parameter]:
        """By module and name, as the reference names them."""
        found = {}
        for key, parameter in self.named_parameters():
            part, _, name = key.partition(".")
            module, _, projector = part.partition("_")
            found[module, f"projector.{name}" if projector else name] = parameter
        return found


@pytest.mark.parametrize("llm", [tiny_models.LLAMA, tiny_models.TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("clip_norm", [None, 0.1], ids=["unclipped", "clipped"])
def test_reference_equals_the_original_models(llm: dict[str, object], clip_norm: float | None) -> None:
    settings = OptimizerSettings(clip_norm=clip_norm)
    plan = tiny_models.plan_of(tiny_models.two_encoders(llm), CONFIGURED)
    reference = Reference(plan, seed=4, dtype=F64, optimizer=settings)
    originals = Originals(reference)
    result = reference.step(SOURCE)

    loss = sum(originals.loss_sum(sample) for sample in CONFIGURED) / sum(map(count_targets, CONFIGURED))
    loss.backward()
    assert abs(result.loss - loss.item()) <= 1e-10 * loss.item()
    theirs = {key: p for key, p in originals.named().items() if not key[1].startswith("head.")}
    assert theirs.keys() == result.gradients.keys() == result.weights.keys()
    norm = torch.stack([p.grad.norm() for p in theirs.values()]).norm()
    tiny = {key for key, p in theirs.items() if p.grad.norm() <= 1e-12 * norm}
    for key, parameter in theirs.items():
        scale = norm if key in tiny else parameter.grad.norm()
        assert (result.gradients[key] - parameter.grad).norm() <= 1e-10 * scale, key

    if clip_norm is not None:
        nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
    torch.optim.AdamW(theirs.values(), lr=1e-3, weight_decay=0.01, eps=1e-8).step()
    for key, parameter in theirs.items():
        if key not in tiny:
            assert (result.weights[key] - parameter).norm() <= 1e-10 * parameter.norm(), key


def test_frozen_weights_stay_and_have_no_gradient() -> None:
    model = tiny_models.two_encoders()
    frozen = tuple(
        tiny_models.frozen(m, range(3 if m.modality != TEXT else 4)) for m in model.modules
    )  # projectors are trained
    plan = tiny_models.plan_of(replace(model, modules=frozen), CONFIGURED)
    all_trained = reference_step(tiny_models.plan_of(model, CONFIGURED), seed=4, dtype=F64, source=SOURCE)
    result = reference_step(plan, seed=4, dtype=F64, source=SOURCE)
    assert result.loss == all_trained.loss
    assert {module for module, _ in result.gradients} == {"vision", "audio"}
    for key, gradient in result.gradients.items():
        assert torch.equal(gradient, all_trained.gradients[key]), key
    untouched = Reference(plan, seed=4, dtype=F64)
    for module, stage_module in untouched.modules.items():
        for name, weight in stage_module.named_weights():
            same = torch.equal(weight, result.weights[module, name])
            assert same == ((module, name) not in result.gradients), name


def test_modules_without_items_get_zero_gradients() -> None:
    """Weight decay still reaches them, as it does on ranks that hold no items."""
    plan = tiny_models.plan_of(tiny_models.two_encoders(), CONFIGURED[1:2])
    result = reference_step(plan, seed=4, dtype=F64, source=SOURCE)
    before = dict(Reference(plan, seed=4, dtype=F64).modules["vision"].named_weights())
    for (module, name), gradient in result.gradients.items():
        if module == "vision":
            assert not gradient.any()
            expected = before[name] * (1 - 1e-3 * 0.01)
            torch.testing.assert_close(result.weights[module, name], expected.detach())


def test_a_second_step_goes_on_from_the_first() -> None:
    reference = Reference(tiny_models.plan_of(tiny_models.two_encoders(), CONFIGURED), seed=4, dtype=F64)
    losses = [reference.step(SOURCE).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def plan_without(modality: str) -> Plan:
    model = tiny_models.two_encoders()
    kept = tuple(m for m in model.modules if m.modality != modality)
    edges = tuple(e for e in model.edges if modality not in (e.source, model.module(e.target).modality))
    return tiny_models.plan_of(ModelGraph(name="m", modules=kept, edges=edges), CONFIGURED[:1])


def test_batches_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="has no text module, so it has no loss"):
        reference_step(plan_without(TEXT), seed=4, dtype=F64, source=SOURCE)
    single = (Sample(0, (Segment(TEXT, 0, 1, 1),)),)
    with pytest.raises(ValueError, match="no text token to predict"):
        reference_step(
            tiny_models.plan_of(tiny_models.two_encoders(), single), seed=4, dtype=F64, source=SOURCE
        )
