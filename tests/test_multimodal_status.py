"""What users switch between steps: parts that are trained, optimizers of their own, callbacks that fail."""

import multiprocessing
from typing import Any

import pytest
import torch

from runtime.frontend.callbacks import merge_special_tokens
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.world.failure import RankError, WorldFailed
from runtime.world.pool import Place, Pool
from tests import user_models
from tests.test_multimodal import assert_equal, gradients_of, spec_of
from tests.user_models import VISION


def test_parts_are_frozen_and_freed_between_steps() -> None:
    """Status is read anew for every step; gradients add up until the user clears them."""
    model = user_models.valm()
    parallel = spec_of(num_microbatches=4).apply(model, ranks=Ranks.EMULATED)
    batch = user_models.batch()
    switches = [(model.language_model, False, 1), (model.vision_encoder.module, False, 1), (model, True, 2)]
    for part, mode, times in switches:
        part.train(mode=mode)
        model(batch).loss.backward()
        theirs = gradients_of(model)
        for _ in range(times):
            parallel.execute(batch)
        ours = {name: gradient / times for name, gradient in gradients_of(model).items()}
        assert_equal(ours, theirs)
    assert {name.split(".")[0] for name in theirs} == {"vision_encoder", "audio_encoder", "language_model"}


def test_a_model_that_trains_nothing_has_a_loss_alone() -> None:
    model = user_models.valm().train(mode=False)
    output = spec_of(num_microbatches=4).apply(model, ranks=Ranks.EMULATED).execute(user_models.batch())
    assert output.loss == pytest.approx(model(user_models.batch()).loss.item(), rel=1e-10)
    assert not gradients_of(model)


def test_an_optimizer_of_the_users_sees_the_same_steps() -> None:
    """Momentum lives in the user's optimizer: two steps on ranks are two steps in one process."""
    losses: list[list[float]] = []
    for where in ("ranks", "here"):
        model = user_models.valm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        parallel = spec_of(num_microbatches=4).apply(model, ranks=Ranks.EMULATED)
        losses.append([])
        for _ in range(2):
            if where == "ranks":
                losses[-1].append(parallel.execute(user_models.batch()).loss)
            else:
                loss = model(user_models.batch()).loss
                loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][1] < losses[0][0]


def vision_model(**callbacks: Any) -> MultimodalModule:
    vision = ModalityModule(user_models.siglip(), "mlp", **callbacks)
    return MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})


ONE = {"input_ids": [torch.tensor([1, VISION, 2])]}


def one() -> dict[str, Any]:
    torch.manual_seed(8)
    return ONE | {"pixel_values": [user_models.image()]}


def test_a_failing_callback_is_one_line_and_leaves_no_process() -> None:
    model = vision_model(postprocess_module_callback=user_models.broken)
    before = set(multiprocessing.active_children())
    with (
        pytest.raises((WorldFailed, RankError)) as failed,
        spec_of(pp=1, num_microbatches=1).apply(model) as parallel,
    ):
        parallel.execute(one())
    assert "callback 'broken' around the projector: KeyError: 'no such item" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert set(multiprocessing.active_children()) <= before


def test_ranks_go_on_after_a_failed_step(pool: Pool) -> None:
    model = vision_model(postprocess_module_callback=user_models.broken)
    parallel = spec_of(pp=1, num_microbatches=1).apply(model, pool=pool)
    with pytest.raises((WorldFailed, RankError)):
        parallel.execute(one())
    assert not gradients_of(model)
    model.vision_encoder.around = vision_model().vision_encoder.around
    assert parallel.execute(one()).loss == pytest.approx(model(one()).loss.item(), rel=1e-10)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"preprocess_callback": user_models.broken_before},
            "callback 'broken_before' before encoder 'vision': KeyError: 'pixels'",
        ),
        (
            {"postprocess_projector_callback": user_models.broken},
            "callback 'broken' around the projector: KeyError",
        ),
    ],
)
def test_callbacks_are_named_in_one_process_too(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        vision_model(**changes)(one())


def fail_alone(place: Place, batch: dict[str, Any]) -> str:
    """A callback before the LLM that fails in one process alone: the others hear of it."""

    def before_llm(outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if place.process == 1:
            raise OSError("disk is gone")
        return merge_special_tokens(user_models.TOKEN_IDS)(outputs, inputs)

    model = user_models.valm(preprocess_callback=before_llm)
    with pytest.raises(ValueError, match=r"\w") as refused:
        spec_of(pp=1, num_microbatches=4).apply(model).execute(batch)
    return str(refused.value)


def test_a_callback_that_fails_in_one_process_is_heard_by_all(pool: Pool) -> None:
    found = pool.run(fail_alone, 3, user_models.batch())
    assert set(found) == {"process 1: callback 'before_llm' before the LLM: OSError: disk is gone"}
