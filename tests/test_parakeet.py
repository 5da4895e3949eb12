"""Parakeet's encoder, alone and in Nemotron 3 Nano Omni: gradients, layouts, clips, scores, refusals."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.models.parakeet import modeling_parakeet as parakeet

from experiments.doors.nemotron_configs import PARAKEET_HEARD
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.audio_parakeet import StoredBatchNorm, by_distance, positions
from runtime.models.choose import adapter_of
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests import user_models
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_composites_weights import plan_of
from tests.test_multimodal import assert_parity, spec_of
from tests.test_nemotron_omni import SAID, seen
from tests.test_parity import assert_same
from tests.test_tilings import source_of
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import AUDIO, LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens
from workbench.model.layer import Attention, Matmul
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.runnable import check_family

F64 = torch.float64
NAMES = ("nemotron_h_omni, sound", "nemotron_h_omni, biases")
RATE = 16_000


def heard(k: int, num: int) -> Segment:
    """A clip of so many tokens."""
    return Segment(AUDIO, k, num, num)


BATCH = (
    Sample(0, (SAID, heard(0, 7), seen(0, 4, 6), heard(1, 3))),
    Sample(1, (heard(0, 7), SAID)),
    Sample(2, (Segment(TEXT, 0, 9, 9),)),
)


def whole(name: str = NAMES[0], **trained: Trainable) -> ModelGraph:
    """Both towers before their language model."""
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    for called, kept in trained.items():
        modules[called] = with_trainable(modules[called], kept)
    return connect("whole", *([modules[called], modules[LLM]] for called in (VISION, AUDIO)))


def cuts_of(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    sizes = {module.name: len(module.layers) for module in graph.modules}
    return {VISION: (sizes[VISION],), AUDIO: (2, sizes[AUDIO] - 2), LLM: (2, sizes[LLM] - 2)}


def encoder(**more: Any) -> Module:
    config = {"model_type": "parakeet_encoder", **PARAKEET_HEARD, **more}
    return module_from_config(config, name=AUDIO, modality=AUDIO, llm_width=48)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, pool: Pool) -> None:
    """Of every weight that a module has."""
    ours, theirs = gradients_of_both(name, plan_of(name), tmp_path / "whole", pool)
    assert ours.keys() == theirs.keys()
    assert_same_gradients(ours, theirs, ours.keys())


@pytest.mark.parametrize(
    ("trained", "grids"),
    [
        ({}, {VISION: (1, 2), AUDIO: (1, 1), LLM: (1, 2)}),
        ({AUDIO: Trainable.PROJECTOR, LLM: Trainable.NONE}, {}),
        ({AUDIO: Trainable.NONE}, {}),
    ],
    ids=str,
)
def test_layouts_and_frozen_parts_train_as_one_process(
    trained: dict[str, Trainable], grids: dict[str, tuple[int, int]], pool: Pool
) -> None:
    """Clips of one length and of others, on two stages, beside images."""
    graph = whole(**trained)
    assert_same(disjoint_plan(graph, BATCH, cuts_of(graph), grids=grids), pool)


def test_replicas(pool: Pool) -> None:
    graph = whole()
    batch = (BATCH[0], Sample(1, (heard(0, 2), seen(0, 4, 4), SAID)))
    cuts = {**cuts_of(graph), AUDIO: (len(graph.module(AUDIO).layers),)}
    assert_same(disjoint_plan(graph, batch, cuts, replicas=2), pool)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=str)
def test_ranks_that_would_share_its_blocks_are_refused(grid: tuple[int, int]) -> None:
    graph = whole()
    plan = disjoint_plan(graph, BATCH[:2], cuts_of(graph), grids={AUDIO: grid})
    stage = next(each for each in plan.stages if each.module == AUDIO)
    with pytest.raises(ValueError, match=r"want (tp|cp) 1, got 2") as info:
        build_stage_module(plan, stage, seed=0, dtype=F64)
    assert "\n" not in str(info.value)


@cache
def processor() -> SimpleNamespace:
    name = "_estimate_audio_num_embeddings"
    return source_of("nemotron_h_omni.processing_nemotron_h_omni", name)


@given(samples=st.integers(160, 2_000_000), factor=st.sampled_from([4, 8]))
def test_clips_have_as_many_tokens_as_its_processor_says(samples: int, factor: int) -> None:
    """And as many as the model makes of all frames that the processor gives."""
    given_to = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=factor)
    expected = processor()._estimate_audio_num_embeddings(given_to, samples)
    part = encoder(subsampling_factor=factor)
    assert clip_tokens(part, samples / RATE) == ((expected, expected),)
    adapter: Any = adapter_of(part)
    assert adapter.item_size((16, 1 + samples // 160))[:2] == (expected, expected)


def test_scores_of_distances_are_those_of_the_pairs() -> None:
    num = 5
    scores = torch.randn(2, 3, num, 2 * num - 1)
    placed = by_distance(scores)
    for i in range(num):
        for j in range(num):
            assert torch.equal(placed[:, :, i, j], scores[:, :, i, num - 1 - (i - j)])
    theirs = parakeet.ParakeetEncoderRelPositionalEncoding(parakeet.ParakeetEncoderConfig(**PARAKEET_HEARD))
    assert torch.equal(positions(num, 24, torch.device("cpu")), theirs(torch.zeros(1, num, 24))[0])


def test_a_batch_norm_by_stored_statistics_is_torchs() -> None:
    torch.manual_seed(3)
    theirs = nn.BatchNorm1d(6).double().eval()
    for each in (theirs.weight, theirs.bias, theirs.running_mean):
        nn.init.normal_(each)
    nn.init.uniform_(theirs.running_var, 0.5, 2.0)
    ours = StoredBatchNorm(theirs).double()
    for name, buffer in ours.named_buffers():
        buffer.copy_(theirs.get_buffer(name))
    x = torch.randn(4, 6, 7, dtype=F64)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-14, atol=1e-14)
    assert not torch.allclose(ours(x), theirs.train()(x), rtol=1e-3)


def test_flop_of_a_block_are_counted_by_hand() -> None:
    """Matmuls of a token: 2 MLPs, 4 and twice 1 of attention, 3 of convolutions; 8 D a pair of tokens."""
    width, ffn, num = 24, 40, 11
    block = encoder().layers[1]
    products = [op for op in block.operators if isinstance(op, Matmul)]
    per_token = sum(op.in_features * op.out_features * op.tokens_scale for op in products)
    assert per_token == 4 * width * ffn + (4 + 2 + 3) * width**2
    pairs = [op for op in block.operators if isinstance(op, Attention)]
    assert sum(4 * op.num_heads * op.mean_dim for op in pairs) == 8 * width
    scores_of_distances = 2 * num * (2 * num - 1) * width
    assert 4 * num**2 * width == pytest.approx(scores_of_distances, rel=1 / num)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"subsampling_conv_stride": 3}, "subsampling_conv_stride must be 2, got 3; nearest: 2"),
        ({"subsampling_conv_kernel_size": 5}, "subsampling_conv_kernel_size must be 3, got 5; nearest: 3"),
        ({"subsampling_factor": 6}, "subsampling_factor must be a power of 2, got 6; nearest: 8"),
        ({"num_mel_bins": 20}, "must be a multiple of subsampling_factor 8, got 20; nearest: 16"),
        ({"conv_kernel_size": 8}, "conv_kernel_size must be odd, got 8; nearest: 9"),
    ],
)
def test_convolutions_that_are_not_built_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as info:
        check_family(encoder(**change))
    assert "\n" not in str(info.value)


def test_a_configuration_that_names_the_type_of_its_release_is_read() -> None:
    config = CONFIGS[NAMES[0]]
    typed = {**config["sound_config"], "model_type": "parakeet"}
    assert take_apart({**config, "sound_config": typed}) == take_apart(config)
    assert take_apart(config).token_ids == {VISION: 90, AUDIO: 91}


def test_a_users_encoder() -> None:
    """Clips of unequal lengths, of which one ends within a token; norms by stored statistics."""
    torch.manual_seed(5)
    off = dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0)
    model = parakeet.ParakeetEncoder(parakeet.ParakeetEncoderConfig(**PARAKEET_HEARD, **off)).double()
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape) + 0.5)
    audio = ModalityModule(model, "linear")
    whole_model = MultimodalModule(
        {"audio": audio}, user_models.llama(), token_ids={"audio": user_models.AUDIO}
    )
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.eval()
    clips = [torch.randn(16, 24, dtype=F64), torch.randn(16, 13, dtype=F64)]
    texts = [torch.tensor([1, user_models.AUDIO, 2]), torch.tensor([user_models.AUDIO, 3, 4])]
    batch = {"input_ids": texts, "input_features": clips}
    assert_parity(whole_model, spec_of(num_microbatches=2), batch, ranks=Ranks.EMULATED)
