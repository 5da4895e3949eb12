"""Users' models where every process is one rank of a group that exists, and the examples."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.frontend.multimodal import MultimodalModule
from runtime.frontend.parallel import MultimodalParallelSpec
from runtime.world.pool import Place, Pool
from tests import user_models
from workbench.job.notations.cornstarch import ParallelSpec

EXAMPLES = Path(__file__).parents[1] / "examples"
BOUND = 1e-10
SPEC = MultimodalParallelSpec(
    language_model_spec=ParallelSpec(tp_size=2, pp_size=2), num_microbatches=2, microbatch_size=2
)
SPEC_RANKS = 6
LEARNING_RATE = 0.1
ROUNDING = 1e-15  # relative to weights; a key bias gets a gradient of this size


def made() -> MultimodalModule:
    model = user_models.valm()
    model.vision_encoder.module.requires_grad_(requires_grad=False)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


@dataclass(frozen=True, slots=True)
class Trained:
    losses: tuple[float, ...]
    num_own: int  # parameters that got a gradient
    weights: dict[str, Tensor]


def train(place: Place, batches: list[dict[str, Any]]) -> Trained:
    """What a user's script does under torchrun."""
    model = made()
    optimizer = sgd(model)
    losses, num_own = [], 0
    with SPEC.apply(model) as parallel:
        for batch in batches:
            losses.append(parallel.execute(batch).loss)
            num_own = sum(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        parallel.collect_weights()
    return Trained(tuple(losses), num_own, {name: p.detach() for name, p in model.named_parameters()})


def test_a_process_per_rank_trains_as_one_process(pool: Pool) -> None:
    """Two steps on two batches, so plans differ; afterwards every process has the same weights."""
    second = user_models.batch()
    second["input_ids"] = second["input_ids"][::-1]
    second["pixel_values"] = second["pixel_values"][::-1]
    second["audio"] = {"input_features": second["audio"]["input_features"][::-1]}
    batches = [user_models.batch(), second]
    ranks: list[Trained] = pool.run(train, SPEC_RANKS, batches)
    model = made()
    optimizer = sgd(model)
    for step, batch in enumerate(batches):
        loss = model(batch).loss
        assert all(abs(rank.losses[step] - loss.item()) <= BOUND * loss.item() for rank in ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    num_all = sum(p.requires_grad for p in model.parameters())
    assert all(0 < rank.num_own < num_all for rank in ranks)
    for name, theirs in model.named_parameters():
        for rank in ranks:
            assert (rank.weights[name] - theirs).norm() <= BOUND * theirs.norm() + ROUNDING, name


def execute_own(place: Place, batches: list[dict[str, Any]], num_stages: int) -> str:
    """The complaint about a batch of this process's own."""
    spec = MultimodalParallelSpec(language_model_spec=ParallelSpec(pp_size=num_stages), num_microbatches=4)
    with pytest.raises(ValueError, match=r"\w") as refused:
        spec.apply(made()).execute(batches[place.process])
    return str(refused.value)


def test_processes_that_differ_are_named_on_all_of_them(pool: Pool) -> None:
    other = user_models.batch() | {"pixel_values": [None] * 4}
    other["input_ids"] = [ids[ids != user_models.VISION] for ids in other["input_ids"]]
    batches = [user_models.batch()] * 3 + [other]
    for complaint in pool.run(execute_own, 4, batches, 2):
        assert complaint.startswith("process 3: its batch differs from the first process's")
    for complaint in pool.run(execute_own, 4, [user_models.batch()] * 4, 1):
        assert complaint == "the plan runs on 3 ranks, got 4 processes"
    refused = user_models.batch() | {"pixel_values": [None] * 4}
    good = user_models.batch()
    for complaint in pool.run(execute_own, 4, [good, good, refused, good], 2):
        assert complaint.startswith("process 2: sample 0: encoder 'vision' makes 0 items of 0 tokens")


@pytest.mark.parametrize("name", ["modality_modules", "encoder_modules"])
def test_examples_train(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    example = importlib.import_module(name)
    monkeypatch.setattr(example, "STEPS", 2)
    example.main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
