"""Stages against whole modules, groups against single samples, keys and flags against the plan."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.adapter import MicrobatchData
from runtime.reference import whole_stage
from runtime.step.stage_module import StageInput, StageModule, build_stage_module
from tests import tiny_models
from workbench.data.sample import Item, Sample, Segment
from workbench.model.model_graph import TEXT, Edge, ModelGraph, connect
from workbench.plan.lowered import Weights
from workbench.plan.plan import Microbatch, ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.stage import Stage

SOURCE = SyntheticSource(11)
F64 = torch.float64


def run(plan: Plan, *, detach: bool = False) -> dict[str, Tensor]:
    """Every stage of the plan once, in order; the output of each module."""
    outputs: dict[str, Tensor] = {}
    microbatch = {m.module: m for m in plan.microbatches}
    for stage in sorted(plan.stages, key=lambda s: (s.module == "llm", s.id)):
        if not microbatch[stage.module].rows:
            continue
        module = build_stage_module(plan, stage, seed=3, dtype=F64)
        data = microbatch_data(plan, stage, microbatch[stage.module], SOURCE, dtype=F64)
        features = {edge: outputs[edge.split(">")[0]] for edge in data.placed}
        hidden = outputs.get(stage.module)
        outputs[stage.module] = module(StageInput(hidden, data, features))
    return {name: output.detach() for name, output in outputs.items()} if detach else outputs


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


CUTS = [
    pytest.param({"vision": (1, 3), "audio": (2, 2), "llm": (1, 1, 2)}, id="a"),
    pytest.param({"vision": (3, 1), "audio": (1, 1, 1, 1), "llm": (3, 1)}, id="b"),
]


@pytest.mark.parametrize("vision", [tiny_models.SIGLIP, tiny_models.CLIP], ids=["siglip", "clip"])
@pytest.mark.parametrize("cuts", CUTS)
def test_cutting_changes_nothing(cuts: dict[str, tuple[int, ...]], vision: dict[str, object]) -> None:
    batch = tiny_models.mixed_batch()
    if vision is tiny_models.CLIP:
        batch = tuple(_with_class_token(sample) for sample in batch)
    model = tiny_models.two_encoders(tiny_models.TIED, vision)
    whole = run(tiny_models.plan_of(model, batch), detach=True)
    cut = run(tiny_models.plan_of(model, batch, cuts), detach=True)
    for name, output in whole.items():
        assert torch.equal(cut[name], output), name


def _with_class_token(sample: Sample) -> Sample:
    segments = (
        replace(s, tokens_in=s.tokens_in + 1) if s.modality == "vision" else s for s in sample.segments
    )
    return replace(sample, segments=tuple(segments))


segment_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(segment_lengths)
def test_items_do_not_see_each_other(lengths: list[int]) -> None:
    """Packed and grouped anyhow, the loss is the sum of the losses of samples run alone."""
    batch = tuple(
        Sample(i, (Segment(TEXT, 0, n + 1, n + 1), *([Segment("vision", 0, n, n)] if n % 2 else [])))
        for i, n in enumerate(lengths)
    )
    model = connect("one", (tiny_models.encoder(tiny_models.SIGLIP, "vision"), tiny_models.llm()))
    together = run(tiny_models.plan_of(model, batch), detach=True)
    alone = [run(tiny_models.plan_of(model, (sample,)), detach=True) for sample in batch]
    loss = torch.stack([outputs["llm"] for outputs in alone]).sum()
    assert far(together["llm"], loss) <= 1e-12
    if "vision" in together:
        images = torch.cat([outputs["vision"] for outputs in alone if "vision" in outputs])
        assert far(together["vision"], images) <= 1e-12


def test_features_stand_where_the_sample_puts_them() -> None:
    """Changing one image changes only what comes after it, in its own sample."""
    plan = tiny_models.plan_of(tiny_models.two_encoders(), tiny_models.mixed_batch())
    stage = replace(plan.stages[-1], layers=(0, 1))
    embed = build_stage_module(plan, stage, seed=3, dtype=F64)
    data = microbatch_data(plan, stage, plan.microbatches[-1], SOURCE, dtype=F64)
    images = torch.arange(33.0, dtype=F64)[:, None].expand(33, tiny_models.WIDTH)
    sounds = 100 + torch.arange(17.0, dtype=F64)[:, None].expand(17, tiny_models.WIDTH)
    hidden = embed(StageInput(None, data, {"vision>llm": images, "audio>llm": sounds}))
    starts = [0, 17, 34, 42]
    assert torch.equal(hidden[starts[0] + 3 : starts[0] + 12], images[:9])
    assert torch.equal(hidden[starts[1] : starts[1] + 7], sounds[:7])
    assert torch.equal(hidden[starts[1] + 11 : starts[2]], images[9:15])
    assert torch.equal(hidden[starts[3] : starts[3] + 9], images[15:24])  # k = 1 comes first in sequence
    assert torch.equal(hidden[starts[3] + 11 : starts[3] + 20], images[24:33])
    assert torch.equal(hidden[starts[3] + 20 : starts[3] + 30], sounds[7:])
    assert torch.equal(hidden[:3], embed.layers[0].embed_tokens(data.input_ids[:3]))


def test_features_can_enter_deeper() -> None:
    """An edge before layer 1 adds; text-only samples are untouched by it."""
    vision, llm = tiny_models.encoder(tiny_models.SIGLIP, "vision"), tiny_models.llm()
    edge = Edge(source="vision", target="llm", after_layer=3, before_layer=1)
    model = ModelGraph(name="deep", modules=(vision, llm), edges=(edge,))
    batch = (
        Sample(0, (Segment(TEXT, 0, 3, 3), Segment("vision", 0, 4, 4), Segment(TEXT, 1, 2, 2))),
        Sample(1, (Segment(TEXT, 0, 4, 4),)),
    )
    plan = tiny_models.plan_of(model, batch, {"llm": (2, 2)})
    first = build_stage_module(plan, plan.stages[1], seed=3, dtype=F64)
    data = microbatch_data(plan, plan.stages[1], plan.microbatches[1], SOURCE, dtype=F64)
    assert data.placed["vision>llm"].tolist() == [3, 4, 5, 6]
    features = torch.randn(4, tiny_models.WIDTH, dtype=F64, generator=torch.Generator().manual_seed(0))
    out = first(StageInput(None, data, {"vision>llm": features}))
    zero = first(StageInput(None, data, {"vision>llm": torch.zeros_like(features)}))
    assert torch.equal(out[9:], zero[9:])
    assert torch.equal(out[:3], zero[:3])
    assert not torch.allclose(out[3:7], zero[3:7])


def llm_stage(plan: Plan, layers: tuple[int, int]) -> Stage:
    return replace(whole_stage(plan.model.module("llm")), layers=layers)


def test_weights_have_the_keys_of_gradient_groups() -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(tiny_models.TIED), tiny_models.mixed_batch())
    tied = Weights("llm", None, "embed_tokens.weight")
    whole = build_stage_module(plan, llm_stage(plan, (0, 4)), seed=3, dtype=F64).weights()
    assert [len(held) for held in whole.values()] == [0, 1, 9, 9, 1]
    assert list(whole)[:2] == [Weights("llm", 0), tied]
    head = build_stage_module(plan, llm_stage(plan, (3, 4)), seed=3, dtype=F64).weights()
    assert list(head) == [Weights("llm", 3), tied]
    assert torch.equal(head[tied][0], whole[tied][0])
    for weights, held in head.items():
        assert all(torch.equal(a, b) for a, b in zip(held, whole[weights], strict=True))


def test_a_tied_weight_on_one_stage_is_one_parameter() -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(tiny_models.TIED), tiny_models.mixed_batch())
    whole = build_stage_module(plan, llm_stage(plan, (0, 4)), seed=3, dtype=F64)
    assert whole.layers[0].embed_tokens.weight is whole.layers[-1].lm_head.weight
    assert "lm_head.weight" not in dict(whole.named_weights())
    head = build_stage_module(plan, llm_stage(plan, (3, 4)), seed=3, dtype=F64)
    assert dict(head.named_weights()).keys() == {"model.norm.weight", "model.embed_tokens.weight"}
    assert head.owned_weights().keys() == {"model.norm.weight"}


def test_every_weight_follows_its_layers_flag() -> None:
    model = tiny_models.two_encoders()
    vision = tiny_models.frozen(model.module("vision"), (0, 2))
    model = replace(model, modules=(vision, *(m for m in model.modules if m.name != "vision")))
    plan = tiny_models.plan_of(model, tiny_models.mixed_batch())
    built = build_stage_module(plan, whole_stage(vision), seed=3, dtype=F64)
    for weights, held in built.weights().items():
        assert {p.requires_grad for p in held} == {weights.layer in (1, 3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_precisions_start_from_the_same_numbers(dtype: torch.dtype) -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(), tiny_models.mixed_batch())
    wide = build_stage_module(plan, plan.stages[0], seed=3, dtype=F64)
    narrow = build_stage_module(plan, plan.stages[0], seed=3, dtype=dtype)
    data = microbatch_data(plan, plan.stages[0], plan.microbatches[0], SOURCE, dtype=dtype)
    for (name, a), (_, b) in zip(wide.named_weights(), narrow.named_weights(), strict=True):
        assert torch.equal(a.to(dtype), b), name
    assert narrow(StageInput(None, data)).dtype == dtype


def test_recompute_gives_the_same_gradients() -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(), tiny_models.mixed_batch())
    settings_ = Settings(
        precision=Precision.FLOAT64,
        modules=tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules),
    )
    gradients = []
    for chosen in (plan, replace(plan, settings=settings_)):
        stage, microbatch = chosen.stages[0], chosen.microbatches[0]
        module = build_stage_module(chosen, stage, seed=3, dtype=F64)
        data = microbatch_data(chosen, stage, microbatch, SOURCE, dtype=F64)
        output = module(StageInput(None, data))
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_training_mode_draws_no_random_numbers() -> None:
    config = tiny_models.LLAMA | {"attention_dropout": 0.5}
    plan = tiny_models.plan_of(
        ModelGraph(name="alone", modules=(tiny_models.llm(config),)), (Sample(4, (Segment(TEXT, 0, 8, 8),)),)
    )
    module = build_stage_module(plan, plan.stages[0], seed=3, dtype=F64).train()
    data = microbatch_data(plan, plan.stages[0], plan.microbatches[0], SOURCE, dtype=F64)
    state = torch.get_rng_state()
    assert torch.equal(module(StageInput(None, data)), module(StageInput(None, data)))
    assert torch.equal(state, torch.get_rng_state())


def refused(model: ModelGraph, stage: Stage) -> StageModule:
    plan = replace(tiny_models.plan_of(model, tiny_models.mixed_batch()), stages=(stage,))
    return build_stage_module(plan, stage, seed=3, dtype=F64)


def test_what_cannot_run_is_refused() -> None:
    model = tiny_models.two_encoders()
    whole = whole_stage(model.module("llm"))
    with pytest.raises(ValueError, match="want tp = 1, got tp 2"):
        refused(model, replace(whole, ranks=((0, 1),)))
    early = Edge(source="vision", target="llm", after_layer=2, before_layer=0)
    with pytest.raises(ValueError, match="only the last layer's output can leave a module"):
        refused(replace(model, edges=(early,)), whole)
    narrow = tiny_models.llm(tiny_models.LLAMA | {"hidden_size": 16})
    vision = tiny_models.encoder(tiny_models.SIGLIP, "vision")
    with pytest.raises(ValueError, match="vision emits width 32, llm wants 16"):
        refused(connect("narrow", (vision, narrow)), whole)
    twin = replace(vision, name="other")
    with pytest.raises(ValueError, match="would fill the same places"):
        refused(connect("twins", (vision, tiny_models.llm()), (twin, tiny_models.llm())), whole)
    backwards = Edge(source="audio", target="vision", after_layer=3, before_layer=0)
    with pytest.raises(ValueError, match="only edges from an encoder into the LLM"):
        refused(replace(model, edges=(backwards,)), whole_stage(vision))


def test_ties_must_agree_with_the_configuration() -> None:
    tied, free = tiny_models.llm(tiny_models.TIED), tiny_models.llm()
    half = replace(tied, source=free.source)
    with pytest.raises(ValueError, match="does not tie embedding and head, the plan does"):
        refused(ModelGraph(name="m", modules=(half,)), whole_stage(half))
    unknown = replace(tied, layers=(replace(tied.layers[0], tied=(("table", "table"),)), *tied.layers[1:]))
    with pytest.raises(ValueError, match=r"tied parameter 'table' is none of model.embed_tokens.weight"):
        refused(ModelGraph(name="m", modules=(unknown,)), whole_stage(unknown))


def test_features_must_match_the_microbatch() -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(), tiny_models.mixed_batch())
    module = build_stage_module(plan, plan.stages[-1], seed=3, dtype=F64)
    data = microbatch_data(plan, plan.stages[-1], plan.microbatches[-1], SOURCE, dtype=F64)
    with pytest.raises(ValueError, match="features of edge vision>llm are missing"):
        module(StageInput(None, data, {}))
    text = Microbatch(module="llm", replica=0, index=0, rows=((Item(4, 0),),))
    alone: MicrobatchData = microbatch_data(plan, plan.stages[-1], text, SOURCE, dtype=F64)
    assert module(StageInput(None, alone)).ndim == 0
    with pytest.raises(ValueError, match="given, but no item wants them"):
        module(StageInput(None, alone, {"vision>llm": torch.zeros(1, 32)}))
