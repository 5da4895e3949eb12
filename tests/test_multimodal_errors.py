"""Bad input to users' models, specifications and batches is named before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from runtime.frontend.callbacks import AnyRes, merge_special_tokens, prepend_tokens
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import MultimodalParallelModule, MultimodalParallelSpec, Ranks
from runtime.models.projector import LinearProjector
from runtime.step.optimizer import OptimizerSettings
from tests import user_models
from tests.user_models import AUDIO, TOKEN_IDS, VISION
from workbench.job.notations.cornstarch import ParallelSpec


def vit() -> ViTModel:
    return ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16))


def siglip_module(**changes: Any) -> ModalityModule:
    return ModalityModule(user_models.siglip(), **{"projector": "mlp", **changes})


def group(**changes: Any) -> MultimodalModule:
    return MultimodalModule(encoders={"vision": siglip_module()}, **changes)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: user_models.valm(encoders={"vision": ModalityModule(vit(), "mlp")}),
            "unknown model_type 'vit'",
        ),
        (lambda: user_models.valm(encoders={"llm": siglip_module()}), "encoder name must be an identifier"),
        (lambda: user_models.valm(encoders={"a b": siglip_module()}), "got 'a b'"),
        (lambda: user_models.valm(encoders={"vision": user_models.siglip()}), "want a ModalityModule or"),
        (
            lambda: user_models.valm(encoders={"vision": siglip_module(projector=None)}),
            "want a projector, got None",
        ),
        (lambda: siglip_module(projector="mpl"), "projector must be one of linear, mlp"),
        (lambda: siglip_module(projector="mlp", proj="linear"), "another spelling of 'projector'"),
        (lambda: siglip_module(trainable="some"), "'some' is not a valid"),
        (
            lambda: user_models.valm(encoders={"vision": siglip_module(projector=LinearProjector(8, 8))}),
            "its projector must have weights",
        ),
        (
            lambda: user_models.valm(token_ids={"vison": 3}),
            "token_ids names 'vison'; there are vision, audio",
        ),
        (lambda: user_models.valm(token_ids={"vision": 3, "audio": 3}), "share token 3"),
        (lambda: user_models.valm(encoders={"x": user_models.valm()}), "plans have one language model"),
        (
            lambda: user_models.valm(encoders={"x": group(preprocess_callback=prepend_tokens({}))}),
            "the callback before the LLM belongs to the whole model",
        ),
        (lambda: group().parts(), "a group of encoders cannot run by itself"),
        (
            lambda: user_models.valm(language_model=LlamaForCausalLM(LlamaConfig(**user_models.LLAMA))),
            "all models must be of one dtype",
        ),
        (lambda: AnyRes(block_px=0), "want block_px and a grid of >= 1"),
        (lambda: ParallelSpec(pp_size=0), "pp_size must be >= 1, got 0"),
        (lambda: MultimodalParallelSpec(num_microbatches=0), "num_microbatches must be >= 1"),
        (
            lambda: MultimodalParallelModule(user_models.valm(), modality_parallelism="sequential"),
            "modality_parallelism must be one of parallel, colocated, replicated, got 'sequential'",
        ),
        (
            lambda: MultimodalParallelSpec(encoder_specs={"vison": ParallelSpec()}).apply(user_models.valm()),
            "encoder_specs names 'vison'; did you mean 'vision'",
        ),
    ],
)
def test_models_and_specifications(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()


def executed(batch: dict[str, Any], **changes: Any) -> Any:
    given = {"num_microbatches": 4, **changes}
    spec = MultimodalParallelSpec(**given)
    return spec.apply(user_models.valm(), ranks=Ranks.EMULATED).execute(batch)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_microbatches": 3}, "must have 3 samples \\(1 replicas x 3 microbatches x 1\\), got 4"),
        ({"language_model_spec": ParallelSpec(pp_size=9)}, "'llm' has 4 layers, which cannot make 9 stages"),
        (
            {"language_model_spec": ParallelSpec(tp_size=3)},
            "tp of module 'llm' must divide its 2 key/value heads",
        ),
    ],
)
def test_degrees_that_do_not_fit(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        executed(user_models.batch(), **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pixels": []}, "has 'pixels', which nothing reads"),
        ({"input_ids": None}, "the batch has no 'input_ids'"),
        ({"labels": [torch.tensor([0])] * 4}, "labels of sample 0: every text token is predicted"),
        ({"pixel_values": [None] * 4}, "sample 0: encoder 'vision' makes 0 items of 0 tokens"),
        ({"pixel_values": [None] * 3}, "encoder 'vision': want input for 4 samples, got 3"),
        ({"pixel_values": torch.zeros(4, 1)}, "an item has 3 dims, several 4, got shape \\(1,\\)"),
        ({"pixel_values": torch.zeros(4, 3, 12, 13)}, "nearest that it can read is \\(3, 12, 12\\)"),
        ({"audio": {"input_features": torch.zeros(4, 8, 40)}}, "has 10 positions, got 20 tokens"),
        ({"audio": {"frames": []}}, "encoder 'audio' reads 'input_features', its input has frames"),
        ({"input_ids": [torch.tensor([1, 99])] * 4, "pixel_values": None, "audio": None}, "got 99"),
        ({"input_ids": [torch.tensor([1.5])] * 4}, "input_ids of sample 0: want a row of whole numbers"),
    ],
)
def test_batches(changes: dict[str, Any], what: str) -> None:
    held = user_models.batch() | changes
    with pytest.raises(ValueError, match=what):
        executed({key: value for key, value in held.items() if value is not None})


def test_special_tokens_in_pieces_are_named() -> None:
    model = user_models.valm()
    ids = torch.tensor([VISION] * 4 + [1] + [VISION] * 5)
    with pytest.raises(
        ValueError, match="item 0 of encoder 'vision' wants 9 places in one run, token 0 begins"
    ):
        model.prepare({"input_ids": [ids], "pixel_values": [user_models.image()]})


def test_a_callback_before_the_llm_that_loses_a_sample() -> None:
    model = user_models.valm(preprocess_callback=lambda outputs, inputs: {"input_ids": []})
    with pytest.raises(ValueError, match="the callback before the LLM must return 4 samples, got 0"):
        model.prepare(user_models.batch())


def test_a_callback_that_no_process_can_find() -> None:
    vision = siglip_module(postprocess_module_callback=lambda inputs, output: output)
    model = MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})
    held = {"input_ids": [torch.tensor([1, VISION])], "pixel_values": [user_models.image()]}
    with (
        MultimodalParallelSpec().apply(model) as parallel,
        pytest.raises(ValueError, match="processes find callbacks by name"),
    ):
        parallel.execute(held)


def test_shared_tokens_and_callbacks_exclude_each_other() -> None:
    vision = siglip_module(postprocess_module_callback=user_models.squashed)
    model = user_models.valm(
        encoders={"vision": vision, "audio": ModalityModule(user_models.whisper(), "mlp")}
    )
    spec = MultimodalParallelSpec(encoder_specs={"vision": ParallelSpec(cp_size=2)})
    with pytest.raises(ValueError, match="callbacks around the projector see whole items, want cp_size 1"):
        spec.apply(model)


def test_a_refused_batch_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = user_models.valm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallel = MultimodalParallelSpec(num_microbatches=4).apply(model, ranks=Ranks.EMULATED)
    held = user_models.batch()
    held["input_ids"][3] = torch.tensor([64])  # outside the vocabulary: found when the ranks start
    with pytest.raises(ValueError, match="tokens must be in \\[0, 64\\), got 64"):
        parallel.train_steps(held, optimizer=OptimizerSettings())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_merging_leaves_places_that_are_there() -> None:
    merge = merge_special_tokens(TOKEN_IDS)
    outputs = {"vision": [(torch.empty(2, 4), torch.empty(3, 4))], "audio": [()]}

    def merged(ids: list[int]) -> list[int]:
        return merge(outputs, {"input_ids": [torch.tensor(ids)]})["input_ids"][0].tolist()

    assert merged([1, VISION, 2, VISION]) == [1, *[VISION] * 2, 2, *[VISION] * 3]
    assert merged([VISION, 1]) == [*[VISION] * 5, 1]
    assert merged([VISION] * 5) == [VISION] * 5
    assert merged([AUDIO, *[VISION] * 3]) == [AUDIO, *[VISION] * 3]  # wrong, and named by `prepare`
