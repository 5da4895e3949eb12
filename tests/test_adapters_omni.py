"""Clips of Qwen's Omni models, cut into windows, against transformers' encoders on whole clips."""

import pytest
import torch
from torch import Tensor

from runtime.frontend.items import size_of
from runtime.models.adapter import MicrobatchData
from runtime.models.encoder import EncoderAdapter, given_to
from runtime.step.stage_module import StageInput, StageModule
from tests.encoder_cases import CASES, module_of, original, samples_of
from tests.test_adapters import build, relative
from workbench.data.sample import Item
from workbench.model.item_tokens import clip_tokens
from workbench.model.model_graph import Module

F64 = torch.float64


def heard_in_windows(ours: StageModule, module: Module, clip: Tensor) -> Tensor:
    """Features of a clip [bins, frames], cut as the job's sizes say."""
    adapter = ours.adapter
    assert isinstance(adapter, EncoderAdapter)
    windows = adapter.windows(clip)
    sizes = [size_of(adapter, window, "audio", 0) for window in windows]
    data = MicrobatchData(
        items=tuple(Item(0, k) for k in range(len(windows))),
        tokens_in=tuple(size.tokens_in for size in sizes),
        tokens_out=tuple(size.tokens_out for size in sizes),
        raw=windows,
    )
    assert [tuple(size[:2]) for size in sizes] == [
        tuple(size) for size in clip_tokens(module, clip.shape[1] / 100)
    ]
    return ours(StageInput(None, data))


@pytest.mark.parametrize("frames", [40, 47, 42, 41, 43, 5])
def test_windows_of_a_clip_are_heard_as_the_whole(frames: int) -> None:
    """Full windows, one of an odd length, one of too few frames for a token of the LLM."""
    case = CASES["omni-audio"]
    ours, _, _ = build(module_of(case), F64, *samples_of(case, "audio"))
    theirs = original(case, ours)
    clip = torch.randn(case.config["num_mel_bins"], frames, dtype=F64)
    expected = ours.layers[-1].projector(given_to("proj", theirs, clip, torch.tensor([frames])))
    assert relative(heard_in_windows(ours, module_of(case), clip), expected) <= 1e-10


@pytest.mark.parametrize("frames", [100, 208, 233, 400, 401])
def test_chunks_of_a_clip_are_heard_as_the_whole(frames: int) -> None:
    """Windows of two chunks; a last one of a single frame too."""
    case = CASES["qwen3-omni-audio"]
    case = case._replace(config=case.config | {"n_window_infer": 200}, items=((26, 26), (26, 26)))
    ours, _, _ = build(module_of(case), F64, *samples_of(case, "audio"))
    theirs = original(case, ours)
    clip = torch.randn(case.config["num_mel_bins"], frames, dtype=F64)
    expected = ours.layers[-1].projector(case.features(theirs, clip))
    assert relative(heard_in_windows(ours, module_of(case), clip), expected) <= 1e-10
