"""Encoders and projectors of composites against transformers' own whole models, in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_features import FEATURES, perceived
from experiments.doors.whole_models import modules_of, segments_of, whole_model
from runtime.step.stage_module import StageInput, StageModule
from tests.encoder_cases import widen_vision_rotations
from tests.test_adapters import build, relative
from workbench.data.sample import Sample
from workbench.model.composites.composite import LLM, name_in_composite
from workbench.model.composites.registry import take_apart

F64 = torch.float64


def give_weights(theirs: nn.Module, ours: StageModule, part: Any) -> None:
    held = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_weights():
            theirs_name = name_in_composite(part, name)
            value = weight.T if name in part.transposed else weight
            assert held[theirs_name].shape == value.shape, (name, theirs_name)
            held[theirs_name].copy_(value)


ENCODERS = [
    (name, called) for name in FEATURES for called in take_apart(CONFIGS[name]).modules if called != LLM
]


@pytest.mark.parametrize(("name", "called"), ENCODERS)
def test_features_equal_those_of_the_whole_model(
    name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen_vision_rotations(monkeypatch)
    parts = take_apart(CONFIGS[name])
    module = modules_of(dict(parts.modules))[called]
    segments = segments_of(module)
    num = 1 if len(segments) > 1 else 2
    ours, _, data = build(module, F64, *(Sample(k, segments) for k in range(num)))
    theirs = whole_model(CONFIGS[name])
    give_weights(theirs, ours, parts.modules[called])
    expected = perceived(name, theirs, data.raw)
    features = ours(StageInput(None, data))
    assert relative(features, expected) <= 1e-10
    torch.manual_seed(0)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    features.backward(cotangent)
    held = dict(theirs.named_parameters())
    grads = {key: held[name_in_composite(parts.modules[called], key)] for key, _ in ours.named_weights()}
    unread = {key for key, weight in grads.items() if weight.grad is None}
    assert unread <= {"image_newline"}, "it ends rows of several tiles, and here is one"
    scale = torch.stack([weight.grad.norm() for key, weight in grads.items() if key not in unread]).norm()
    transposed = parts.modules[called].transposed
    for key, weight in ours.named_weights():
        if key in unread:
            continue
        grad = grads[key].grad.T if key in transposed else grads[key].grad
        assert (weight.grad - grad).norm() <= 1e-10 * scale, key
