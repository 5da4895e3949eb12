"""Users' models on ranks: the loss and gradients of `.execute` are those of the models in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.frontend.callbacks import AnyRes, prepend_tokens
from runtime.frontend.multimodal import EncoderModule, ModalityModule, MultimodalModule
from runtime.frontend.parallel import MultimodalParallelModule, MultimodalParallelSpec, Ranks
from runtime.step.optimizer import OptimizerSettings
from runtime.world.failure import WorldFailed
from runtime.world.pool import Pool
from tests import user_models
from tests.encoder_cases import widen_vision_rotations
from tests.user_models import SIDE_PX, TOKEN_IDS, VISION
from workbench.job.notations.cornstarch import ParallelSpec

BOUND = 1e-10
MASKS = ("causal", "full", "sliding_window(window=5)", "prefix_lm(prefix=2)")
NEGLIGIBLE = 1e-12  # of the global norm: such a gradient is rounding


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By name; taken away from the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Ranks also bring zeros: of a layer that this batch had no item for."""
    assert all(name in theirs or not ours[name].any() for name in ours)
    norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        scale = gradient.norm() if gradient.norm() > NEGLIGIBLE * norm else norm
        assert (ours.get(name, torch.zeros_like(gradient)) - gradient).norm() <= BOUND * scale, name


def assert_parity(
    model: MultimodalModule, spec: MultimodalParallelSpec, batch: dict[str, Any], **where: Any
) -> None:
    output = model(batch)
    output.loss.backward()
    theirs = gradients_of(model)
    with spec.apply(model, **where) as parallel:
        step = parallel.execute(batch)
    assert abs(step.loss - output.loss.item()) <= BOUND * output.loss.item()
    assert_equal(gradients_of(model), theirs)


def spec_of(*, pp: int = 2, num_microbatches: int = 2, **changes: Any) -> MultimodalParallelSpec:
    return MultimodalParallelSpec(
        language_model_spec=ParallelSpec(pp_size=pp), num_microbatches=num_microbatches, **changes
    )


def test_listing_of_v1_on_four_processes(pool: Pool) -> None:
    """Both encoders frozen but for their projectors, as the listing freezes them."""
    model = user_models.valm()
    for encoder in (model.vision_encoder, model.audio_encoder):
        encoder.module.train(mode=False)
        encoder.projector.train(mode=True)
    spec = MultimodalParallelSpec(
        encoder_specs={"vision": ParallelSpec(), "audio": ParallelSpec()},
        language_model_spec=ParallelSpec(pp_size=2),
        num_microbatches=2,
        microbatch_size=2,
    )
    assert_parity(model, spec, user_models.batch(), pool=pool)
    trained = {name.split(".")[1] for name, p in _trained(model)}
    assert trained == {"module", "projector"}  # the flags are as the user set them


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def test_listing_of_icml_on_six_processes(pool: Pool) -> None:
    model = MultimodalModule(
        encoders={
            "vision": EncoderModule(user_models.clip(), proj="mlp"),
            "audio": EncoderModule(user_models.whisper(), proj="linear"),
        },
        language_model=user_models.llama(tie_word_embeddings=True),
        token_ids=TOKEN_IDS,
    )
    model(user_models.batch()).loss.backward()
    theirs = gradients_of(model)
    parallel = MultimodalParallelModule(
        model,
        modality_parallelism="parallel",
        encoder_specs={"vision": ParallelSpec(pp_size=2), "audio": ParallelSpec()},
        language_model_spec=ParallelSpec(pp_size=3),
        num_microbatches=4,
        microbatch_size=1,
        pool=pool,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        losses.append(parallel.execute(user_models.batch()).loss)
        if step == 0:
            assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, theirs)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("parallelism", "frozen"),
    [
        ("parallel", ("vision_encoder.module",)),
        ("colocated", ("language_model", "audio_encoder")),
        ("colocated", ()),
        ("replicated", ("vision_encoder.module",)),
    ],
)
def test_every_place_of_encoders(parallelism: str, frozen: Sequence[str]) -> None:
    model = user_models.valm()
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    spec = spec_of(num_microbatches=4, modality_parallelism=parallelism)
    assert_parity(model, spec, user_models.batch(), ranks=Ranks.EMULATED)


def test_replicas_and_shared_tokens() -> None:
    spec = MultimodalParallelSpec(
        language_model_spec=ParallelSpec(cp_size=2), dp_size=2, num_microbatches=2, microbatch_size=1
    )
    assert_parity(user_models.valm(), spec, user_models.batch(), ranks=Ranks.EMULATED)


def test_tensor_parallel_parts_make_whole_gradients(pool: Pool) -> None:
    """Tied embedding and head, grouped heads; the projector's callbacks see whole items."""
    vision = ModalityModule(
        user_models.siglip(), "mlp", postprocess_projector_callback=user_models.scaled_by_place
    )
    audio = ModalityModule(user_models.whisper(), "linear", trainable="projector")
    model = user_models.valm(
        encoders={"vision": vision, "audio": audio},
        language_model=user_models.llama(tie_word_embeddings=True),
    )
    spec = MultimodalParallelSpec(
        encoder_specs={"vision": ParallelSpec(tp_size=2)},
        language_model_spec=ParallelSpec(tp_size=2, pp_size=2),
        num_microbatches=4,
    )
    assert_parity(model, spec, user_models.batch(), pool=pool)


def test_all_four_callbacks(pool: Pool) -> None:
    """AnyRes splits images of any size; features stand before the text; what lies between is changed."""
    vision = ModalityModule(
        model=user_models.clip(),
        projector="mlp",
        preprocess_callback=AnyRes(block_px=SIDE_PX),
        postprocess_module_callback=user_models.scaled_by_place,
        postprocess_projector_callback=user_models.squashed,
    )
    model = MultimodalModule(
        encoders={"vision": vision},
        language_model=ModalityModule(user_models.llama()),
        token_ids={"vision": VISION},
        preprocess_callback=prepend_tokens({"vision": VISION}),
    )
    torch.manual_seed(7)
    images = [user_models.image(20, 31), None, user_models.image(40, 12)]
    ids = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]
    held = {"input_ids": ids, "pixel_values": images}
    assert model.prepare(held).samples[0].num_tokens == 3 + 9 * (1 + 4)
    assert_parity(model, spec_of(num_microbatches=3), held, pool=pool)


def test_special_tokens_make_room_for_blocks() -> None:
    """One special token of an image becomes all tokens of its blocks."""
    vision = ModalityModule(user_models.siglip(), "linear", preprocess_callback=AnyRes(block_px=SIDE_PX))
    model = MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})
    held = {
        "input_ids": torch.tensor([[1, VISION, 2, 3, 0], [4, 5, 6, VISION, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "pixel_values": [user_models.image(24, 24), user_models.image(12, 30)],
    }
    sizes = [[s.tokens_out for s in sample.segments] for sample in model.prepare(held).samples]
    assert sizes == [[1, 9, 9, 9, 9, 9, 2], [3, 9, 9, 9, 9, 1]]
    assert_parity(model, spec_of(pp=1), held, ranks=Ranks.EMULATED)


@pytest.mark.parametrize("name", ["dinov2", "llama4-vision", "qwen2-audio", "omni-audio", "qwen3-omni"])
def test_other_encoders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of another size than configured; two tokens that become one; a clip of three windows."""
    widen_vision_rotations(monkeypatch)
    if name == "dinov2":
        encoder, items = user_models.dinov2(), [user_models.image(), user_models.image(8, 16)]
    elif name == "llama4-vision":
        encoder, items = user_models.llama4_vision(), [user_models.image(), user_models.image()]
    elif name == "qwen2-audio":
        encoder, items = user_models.qwen2_audio(), [user_models.frames(10), user_models.frames(10)]
    elif name == "omni-audio":
        encoder, items = user_models.omni_audio(), [user_models.frames(24)[:, :-1], user_models.frames(3)]
    else:
        encoder, items = user_models.qwen3_omni_audio(), [user_models.frames(121), user_models.frames(25)]
    model = MultimodalModule(
        {"sense": ModalityModule(encoder, "mlp")}, user_models.llama(), token_ids={"sense": VISION}
    )
    held = {"input_ids": [torch.tensor([1, VISION, 2, 3]), torch.tensor([VISION, 4, 5])]}
    held["pixel_values" if name == "llama4-vision" else encoder.main_input_name] = items
    assert_parity(model, spec_of(pp=1), held, ranks=Ranks.EMULATED)


def test_groups_of_encoders() -> None:
    """A module of modules, with a specification of the same structure."""
    senses = MultimodalModule(
        encoders={
            "vision": ModalityModule(user_models.siglip(), "mlp"),
            "audio": ModalityModule(user_models.whisper(), "mlp"),
        },
        token_ids=TOKEN_IDS,
    )
    model = MultimodalModule(encoders={"senses": senses}, language_model=user_models.llama())
    model.senses_encoder.vision_encoder.module.train(mode=False)
    held = user_models.batch()
    held |= {"senses.audio": held.pop("audio")}
    spec = spec_of(
        num_microbatches=4,
        encoder_specs={"senses": MultimodalParallelSpec(encoder_specs={"vision": ParallelSpec(pp_size=2)})},
    )
    plan = spec.apply(model, ranks=Ranks.EMULATED).plan(held)
    assert [stage.module for stage in plan.stages] == ["senses.vision"] * 2 + ["senses.audio"] + ["llm"] * 2
    assert_parity(model, spec, held, ranks=Ranks.EMULATED)


def test_training_on_the_ranks_is_torchs_adamw() -> None:
    """Weights that come back are those of torch's optimizer on the gradients of one process."""
    model, twin = user_models.valm(), user_models.valm()
    settings = OptimizerSettings(clip_norm=None)
    spec_of(num_microbatches=4).apply(model, ranks=Ranks.EMULATED).train_steps(
        user_models.batch(), optimizer=settings
    )
    twin(user_models.batch()).loss.backward()
    torch.optim.AdamW(
        [p for p in twin.parameters() if p.grad is not None and p.grad.norm() > 1e-9],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    ).step()
    weights = dict(model.named_parameters())
    for name, p in twin.named_parameters():
        if p.grad is not None and p.grad.norm() > 1e-9:
            assert (weights[name] - p).norm() <= BOUND * p.norm(), name


def test_a_callback_that_shortens_is_named_on_its_rank(pool: Pool) -> None:
    vision = ModalityModule(user_models.siglip(), "mlp", postprocess_projector_callback=user_models.shortened)
    model = MultimodalModule({"vision": vision}, user_models.llama(), token_ids={"vision": VISION})
    held = {"input_ids": [torch.tensor([1, VISION, 2])], "pixel_values": [user_models.image()]}
    parallel = spec_of(pp=1, num_microbatches=1).apply(model, pool=pool)
    with pytest.raises((ValueError, WorldFailed), match="'shortened' must keep the shape of every item"):
        parallel.execute(held)


@pytest.mark.parametrize("masks", ["gemma", MASKS])
def test_masks_of_a_batch_reach_the_ranks(masks: str | tuple[str, ...]) -> None:
    """The given model under the same dense masks is the witness; a causal batch has another loss."""
    model, batch = user_models.valm(), user_models.batch()
    causal = model(batch).loss.item()
    model.zero_grad()
    assert_parity(model, spec_of(microbatch_size=2), {**batch, "masks": masks}, ranks=Ranks.EMULATED)
    assert model({**batch, "masks": masks}).loss.item() != pytest.approx(causal, rel=1e-6)


def test_changed_buffers_are_carried_over() -> None:
    """Rotary frequencies that differ from those of the configuration."""
    model = user_models.valm()
    before = model(user_models.batch()).loss.item()
    for name, buffer in model.language_model.named_buffers():
        if name.endswith("rotary_emb.inv_freq"):
            buffer.mul_(0.3)
    assert model(user_models.batch()).loss.item() != pytest.approx(before, rel=1e-6)
    model.zero_grad()
    assert_parity(model, spec_of(microbatch_size=2), user_models.batch(), ranks=Ranks.EMULATED)


def test_buffers_that_the_runtime_does_not_compute_with_are_refused() -> None:
    model = user_models.valm()
    model.language_model.module.register_buffer("scale", torch.ones(3))
    with (
        spec_of(microbatch_size=2).apply(model, ranks=Ranks.EMULATED) as parallel,
        pytest.raises(ValueError, match=r"module 'llm': LlamaForCausalLM has the buffer 'scale'"),
    ):
        parallel.execute(user_models.batch())


@pytest.mark.parametrize(
    ("masks", "words"),
    [(3, "want one text"), (("causal",), "one for each of 4 samples"), ("diagonal", "want one of causal")],
)
def test_masks_that_are_none_are_refused(masks: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        user_models.valm()({**user_models.batch(), "masks": masks})
