"""Encoders of the papers against transformers' own: features and gradients of packed items."""

import pytest
import torch
from torch import Tensor, nn

from runtime.models import vision_scaled
from runtime.models.choose import adapter_of
from runtime.models.encoder import EncoderAdapter
from runtime.models.vision_rotary import window_order
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.step.weight_gradient import SplitBackward
from runtime.world.pool import Pool
from tests import tiny_models
from tests.encoder_cases import CASES, module_of, original, samples_of, widen_vision_rotations
from tests.plans import disjoint_plan
from tests.test_adapters import build, relative
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, connect

F64 = torch.float64


@pytest.mark.parametrize("name", list(CASES))
def test_two_items_of_an_encoder_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)
    case = CASES[name]
    module = module_of(case)
    ours, _, data = build(module, F64, *samples_of(case, module.modality))
    for constant in ours.named_constants().values():
        constant.copy_(torch.linspace(0.5, 1.5, constant.numel()).view_as(constant))
    theirs = original(case, ours)
    expected = torch.cat([case.features(theirs, raw) for raw in data.raw])
    assert isinstance(ours.adapter, EncoderAdapter)
    users = torch.cat([ours.adapter.features(theirs, raw) for raw in data.raw])
    assert torch.equal(users, expected), "an item of a user's model is encoded otherwise"
    if case.projected:
        expected = ours.layers[-1].projector(expected)
    torch.manual_seed(0)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    grads = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    trained = [grad.flatten() for grad in grads.values() if grad is not None]
    scale = torch.cat(trained or [torch.zeros(1)]).norm()  # a tower may have no weights of its own
    for parameter in ours.parameters():
        parameter.grad = None

    parted = SplitBackward(ours)
    features = ours(StageInput(None, data))
    assert relative(features, expected) <= 1e-10
    with parted.leaving() as work:
        features.backward(cotangent)
    work.run()
    for key, parameter in ours.named_weights():
        if not key.startswith("projector.") and grads[key] is not None:
            assert (parameter.grad - grads[key]).norm() <= 1e-10 * scale, key
        assert parameter.grad is not None, key


@pytest.mark.parametrize(
    "name",
    ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm-4v", "kimi", "video-llama-3", "gemma4", "llama4-vision"],
)
def test_rotations_equal_transformers_in_float32(name: str) -> None:
    """Against the untouched attention."""
    case = CASES[name]
    ours, _, data = build(module_of(case), torch.float32, *samples_of(case, "vision"))
    theirs = original(case, ours).float()
    expected = torch.cat([case.features(theirs, raw) for raw in data.raw])
    if case.projected:
        expected = ours.layers[-1].projector(expected)
    assert relative(ours(StageInput(None, data)), expected) <= 1e-5


def test_blocks_on_two_stages_share_their_table_of_biases(pool: Pool) -> None:
    audio, llm = module_of(CASES["phi-4-audio"]), tiny_models.llm()
    batch = (Sample(1, (Segment("audio", 0, 7, 7), Segment(TEXT, 0, 4, 4), Segment("audio", 1, 5, 5))),)
    plan = disjoint_plan(connect("talk", (audio, llm)), batch, {"audio": (2, 2), "llm": (4,)})
    stages = [build_stage_module(plan, stage, seed=0, dtype=F64) for stage in plan.chain["audio", 0]]
    (table,) = {name for name, _ in stages[0].named_weights()} & {n for n, _ in stages[1].named_weights()}
    assert [table in stage.owned_weights() for stage in stages] == [True, False]
    assert_same(plan, pool)


def test_windows_at_the_edge_are_smaller() -> None:
    order, sizes = window_order(3, 5, 2)
    assert sizes == [4, 4, 2, 2, 2, 1]
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]


def test_encoders_that_cannot_run_are_refused() -> None:
    adapter = adapter_of(module_of(CASES["qwen2-vl"]))
    with pytest.raises(ValueError, match="2 x 2 patches become one, so an image must have a multiple of 4"):
        adapter.raw_shape(Segment("vision", 0, 6, 2))
    config = CASES["internvit"].config
    with pytest.raises(ValueError, match="norm_type must be one of layer_norm, rms_norm, got 'batch'"):
        module_from_config(config | {"norm_type": "batch"}, name="v", modality="vision", llm_width=32)
    tables = config | {"use_absolute_position_embeddings": False}
    with pytest.raises(ValueError, match="use_absolute_position_embeddings must be true"):
        module_from_config(tables, name="v", modality="vision", llm_width=32)
    conformer = CASES["phi-4-audio"]
    with pytest.raises(ValueError, match="takes clips of up to 500 tokens, got 501"):
        adapter_of(module_of(conformer)).raw_shape(Segment("audio", 0, 501, 501))
    chunked = conformer._replace(config=conformer.config | {"chunk_size": 4})
    with pytest.raises(ValueError, match="chunk_size must be -1, got 4"):
        adapter_of(module_of(chunked))
    table = adapter_of(module_of(CASES["aimv2"]))
    with pytest.raises(
        ValueError, match=r"vision\[0\]: module 'vision' has positions of 8 x 8 patches, got 6 x 8"
    ):
        table.raw_shape(Segment("vision", 0, 48, 48))
    assert adapter_of(module_of(CASES["aimv2, native"])).raw_shape(Segment("vision", 0, 48, 48)) == (
        3,
        24,
        32,
    )
    audio = CASES["qwen2-audio"]
    ours, _, data = build(module_of(audio), F64, Sample(1, (Segment("audio", 0, 10, 10),)))
    with pytest.raises(ValueError, match=r"item \(1, 0\): two tokens become one, want 5 behind the encoder"):
        ours(StageInput(None, data))


def test_a_transformers_whose_layers_take_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    monkeypatch.setattr(vision_scaled, "Dinov2Layer", Older)
    with pytest.raises(
        ValueError, match=r"'vision': DINOv2's layers take no attention mask in transformers 5"
    ):
        adapter_of(module_of(CASES["dinov2"]))


def test_keys_that_a_configuration_of_qwen2_audio_leaves_out_are_its_own() -> None:
    """Not those of Whisper, whose layers it has."""
    small = {"model_type": "qwen2_audio_encoder", "encoder_layers": 1, "d_model": 40}
    module = module_from_config(small, name="audio", modality="audio", llm_width=8)
    block = adapter_of(module).build(1)
    assert sum(weight.numel() for weight in block.parameters()) == module.layers[1].num_parameters
