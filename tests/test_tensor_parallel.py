"""Ranks that share weights train as one process does, whatever the architecture and the layout around."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.launch import run_local
from runtime.models.choose import adapter_of
from runtime.parallel.expert.cuts import held_parts
from runtime.parallel.tensor.cuts import Cut, cuts_of
from runtime.parallel.tensor.group import TensorGroup
from runtime.run_settings import Collect, RunSettings
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.pool import Pool
from tests import tiny_models
from tests.encoder_cases import CASES, module_of
from tests.plans import cluster, disjoint_plan, finish
from tests.test_adapters_decoders import CASES as DECODERS
from tests.test_adapters_llama4 import LLAMA4
from tests.test_export import tensors_of
from tests.test_parity import assert_parity, assert_same, execute
from tests.tiny_models import whole_batch
from tests.tiny_valm import LLM
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, placed_messages
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.indexer import is_of_indexer
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.build import with_programs
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.stage import Stage
from workbench.plan.work import work_of
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import megatron_heterogeneous

Degrees = tuple[int, int, int, int]  # dp, pp, cp, tp
How = Callable[[Plan], Plan]
CONFIGS = {**tiny_models.DECODERS, **DECODERS, "llama4": LLAMA4}
REFUSED = {  # encoder -> what has no rule
    "internvit-6b-style": "attention.q_norm: there is no rule to cut WideRMSNorm",
    "phi-4-audio": "conv.glu: there is no rule to cut Phi4MultimodalAudioGluPointWiseConv",
    "parakeet": "feed_forward1.linear1: there is no rule to cut Linear",
    "parakeet, no bias": "feed_forward1.linear1: there is no rule to cut Linear",
}
FOUR = {"num_key_value_heads": 4}


def text_plan(config: dict[str, Any], ranks: Sequence[int]) -> Plan:
    """A language model on one stage whose weights the ranks share."""
    llm = tiny_models.llm(config)
    batch = tuple(Sample(i, (Segment(TEXT, 0, 5 + i, 5 + i),)) for i in range(2))
    layers = (0, len(llm.layers))
    stage = Stage(id=0, module="llm", replica=0, layers=layers, ranks=(tuple(ranks),))
    return finish(ModelGraph(name="text", modules=(llm,), edges=()), batch, [stage])


SAME_PARTS = ("llama", "qwen2", "mistral", "phi-4")  # those of llama-tied, qwen2.5 and phi3


def sequence_parallel(plan: Plan, **settings: Any) -> Plan:
    """The plan with tokens split in every module."""
    modules = tuple(
        replace(plan.settings.of(module.name), sequence_parallel=True, **settings)
        for module in plan.model.modules
    )
    return replace(plan, settings=replace(plan.settings, modules=modules))


def as_it_is(plan: Plan) -> Plan:
    return plan


HOW = pytest.mark.parametrize("how", [as_it_is, sequence_parallel])


@HOW
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SAME_PARTS])
def test_every_decoder_over_two_ranks(name: str, how: How, pool: Pool) -> None:
    """Eleven tokens in a microbatch: where they are split, the last rank holds one of padding."""
    assert_same(how(text_plan(CONFIGS[name], (0, 1))), pool)


def with_expert_parallelism(plan: Plan) -> Plan:
    """The plan with experts over the ranks of each stage."""
    stages = tuple(replace(stage, ep=stage.tp) for stage in plan.stages)
    return with_programs(replace(plan, stages=stages, programs=()))


@pytest.mark.parametrize("how", [as_it_is, sequence_parallel, with_expert_parallelism])
def test_a_bias_of_shared_experts_is_added_once(how: How, pool: Pool) -> None:
    """It is 0 at first: steps tell."""
    config = CONFIGS["deepseek_v2"]
    assert config["mlp_bias"]
    settings = RunSettings(warmup=0, steps=3, precision=Precision.FLOAT64)
    alone, shared = (
        run_local(plan, settings, pool=pool).losses
        for plan in (text_plan(config, (0,)), how(text_plan(config, (0, 1))))
    )
    assert shared == pytest.approx(alone, rel=1e-10, abs=0.0)
    assert abs(alone[-1] - alone[0]) > 1e-4


def encoder_plan(name: str) -> Plan:
    """An encoder before a tiny LLM, both over ranks 0 and 1."""
    case = CASES[name]
    vision, llm = module_of(case), tiny_models.llm()
    batch = tuple(
        Sample(k, (Segment(vision.modality, 0, *tokens), Segment(TEXT, 0, 5, 5)))
        for k, tokens in enumerate(case.items)
    )
    stages = [
        Stage(id=i, module=module.name, replica=0, layers=(0, len(module.layers)), ranks=((0, 1),))
        for i, module in enumerate((vision, llm))
    ]
    return finish(connect("two", (vision, llm)), batch, stages)


@HOW
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_every_encoder_over_two_ranks(name: str, how: How, pool: Pool) -> None:
    assert_same(how(encoder_plan(name)), pool)


TOWERS = ["omni-audio", "omni-vision", "qwen3-omni-audio", "qwen3-omni-vision", "llama4-vision"]


@pytest.mark.parametrize("trained", Trainable)
@pytest.mark.parametrize("name", TOWERS)
def test_towers_in_two_stages_of_two_ranks_beside_a_replica(
    name: str, trained: Trainable, pool: Pool
) -> None:
    """Two stages of a tower on two ranks each, then two replicas of it in two stages."""
    plan = encoder_plan(name)
    tower, llm = plan.model.modules
    tower = with_trainable(tower, trained)
    graph, half = connect("two", (tower, llm)), len(tower.layers) // 2
    cuts = {tower.name: (half, len(tower.layers) - half), "llm": (len(llm.layers),)}
    assert_same(disjoint_plan(graph, plan.batch, cuts, grids={tower.name: (1, 2)}), pool)
    assert_same(disjoint_plan(graph, plan.batch, cuts, replicas=2), pool)


@pytest.mark.parametrize("name", [name for name in REFUSED if name in CASES])
def test_an_encoder_without_rules_is_refused_by_name(name: str) -> None:
    layer = adapter_of(module_of(CASES[name])).build(1)
    with pytest.raises(ValueError, match=rf"{REFUSED[name]} for tensor parallelism; give its stage tp = 1"):
        cuts_of(layer, 2)


def encoders(llm_config: dict[str, Any] = LLM, *, tied: bool = False) -> ModelGraph:
    """All trainable: CLIP with an MLP projector, Whisper, and an LLM of an odd vocabulary."""
    llm = tiny_models.llm(llm_config | FOUR | {"tie_word_embeddings": tied})
    images = tiny_models.encoder(tiny_models.CLIP | {"num_attention_heads": 4}, "image")
    sounds = tiny_models.encoder(tiny_models.WHISPER, "audio", projector=Projector.LINEAR)
    return connect("encoders", (images, llm), (sounds, llm))


def class_token_batch(count: int) -> tuple[Sample, ...]:
    """Each sample with an image of nine patches and a class token, every other one with a clip."""
    return tuple(
        Sample(
            index,
            (
                Segment(TEXT, 0, 3 + index, 3 + index),
                Segment("image", 0, 10, 9),
                *(Segment("audio", k, 6, 6) for k in range(index % 2)),
                Segment(TEXT, 1, 4, 4),
            ),
        )
        for index in range(count)
    )


def laid_out(model: ModelGraph, layouts: dict[str, Degrees], **settings: Any) -> Plan:
    job = Job(
        name="layouts",
        model=model,
        cluster=cluster(8),
        batch=class_token_batch(4),
        microbatch_samples=1,
        layouts=tuple(
            ModuleLayout(module=name, dp=dp, pp=pp, cp=cp, tp=tp)
            for name, (dp, pp, cp, tp) in layouts.items()
        ),
        settings=Settings(precision=Precision.FLOAT64, **settings),
        profile="A40",
    )
    return megatron_heterogeneous.plan(job, CostModel(load_profile("A40")))


ONE: Degrees = (1, 1, 1, 1)
LAYOUTS = [
    pytest.param({"image": (1, 1, 1, 2), "audio": (1, 1, 1, 2), "llm": (1, 1, 1, 4)}, id="wider-llm"),
    pytest.param({"image": (1, 1, 1, 4), "audio": ONE, "llm": (1, 1, 1, 2)}, id="wider-encoder"),
    pytest.param({"image": ONE, "audio": (1, 1, 1, 2), "llm": (1, 2, 1, 2)}, id="pipeline"),
    pytest.param({"image": (2, 1, 1, 1), "audio": ONE, "llm": (2, 1, 1, 2)}, id="replicas"),
    pytest.param({"image": ONE, "audio": ONE, "llm": (1, 1, 2, 2)}, id="shared-tokens"),
    pytest.param({"image": (1, 1, 2, 2), "audio": ONE, "llm": (1, 1, 1, 2)}, id="shared-images"),
]


@HOW
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts_around(layouts: dict[str, Degrees], how: How, pool: Pool) -> None:
    plan = laid_out(encoders(), layouts)
    assert {m: plan.chain[m, 0][0].tp for m in layouts} == {m: layouts[m][3] for m in layouts}
    assert_same(how(plan), pool)


@HOW
def test_tied_weights_recomputed_split_backwards_and_a_norm(how: How, pool: Pool) -> None:
    """Everything that touches a weight's gradient at once: head and table are one weight on two stages."""
    recomputed = tuple(ModuleSettings(module=m, recompute=Recompute.FULL) for m in ("image", "llm"))
    layouts = {"image": (1, 1, 1, 2), "audio": ONE, "llm": (1, 2, 1, 2)}
    plan = how(laid_out(encoders(CONFIGS["qwen3"], tied=True), layouts, modules=recomputed))
    split = with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1))
    assert any(action.kind is Pass.W for action in split.program_actions)
    result, reference = execute(split, pool, clip_norm=0.01)
    assert_parity(split, result, reference, Precision.FLOAT64)
    free, _ = execute(split, pool)
    assert any(
        not torch.equal(ours, free.states[0].weights[key]) for key, ours in result.states[0].weights.items()
    )


def assert_exported_whole(plan: Plan, target: Path, pool: Pool) -> None:
    """Every rank's part is cut out of what is written, and training goes on from it."""
    result = run_local(plan, RunSettings(export=target, collect=Collect.STATE), pool=pool)
    written = tensors_of(target)
    for state in result.states:
        parts = held_parts(plan, state.rank)
        for key, weight in state.weights.items():
            assert torch.equal(weight, parts.get(key, torch.clone)(written[key])), key
    again = run_local(plan, RunSettings(weights=target), pool=pool)
    assert again.losses[0] < result.losses[0]


def test_an_export_is_of_whole_weights(tmp_path: Path, pool: Pool) -> None:
    layouts = {"image": (1, 1, 1, 2), "audio": (1, 1, 1, 2), "llm": (1, 1, 1, 4)}
    assert_exported_whole(laid_out(encoders(tied=True), layouts), tmp_path / "out", pool)


@given(st.integers(1, 4), st.lists(st.integers(4, 9), min_size=1, max_size=3), st.integers(0, 1))
def test_parts_join_to_the_whole(size: int, blocks: list[int], dim: int) -> None:
    cut = Cut(dim, tuple(blocks))
    whole = torch.arange(3.0 * sum(blocks)).reshape((-1, 3) if dim == 0 else (3, -1))
    parts = [cut.own(whole, member, size) for member in range(size)]
    assert torch.equal(cut.join(parts), whole)
    assert [tuple(part.shape) for part in parts] == cut.shapes(parts[-1].shape, size)
    assert sum(part.numel() for part in parts) == whole.numel()
    assert cut.start(0, size) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_hold_what_the_plan_says(name: str) -> None:
    """Elements of a gradient group, which price and memory count, are those of a rank's parts."""
    plan = text_plan(CONFIGS[name] | {"vocab_size": 64}, (0, 1))
    adapter = adapter_of(plan.model.module("llm"))
    planned = dict.fromkeys(range(adapter.num_layers), 0)
    for group in gradient_groups(plan):
        if group.ranks == (0,):
            layer = group.weights[0].layer
            planned[0 if layer is None else layer] += group.num_elements
    for index in range(adapter.num_layers):
        layer = adapter.build(index)
        cuts = cuts_of(layer, 2).cut
        own = 0
        for local, weight in layer.named_parameters():
            if layer.hugging_face_name(local) not in adapter.aliases and not is_of_indexer(local):
                own += weight.numel() // (2 if local in cuts else 1)
        assert own == planned[index], plan.model.module("llm").layers[index].name


class Counting(TensorGroup):
    """One of two members, alone: what it would add up is noted, not added up."""

    __slots__ = ("seen",)
    seen: list[int]

    def _reduce(self, x: torch.Tensor, operation: object, what: str) -> None:
        del operation, what
        self.seen.append(x.nbytes)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mixtral", "qwen3_moe", "llama4", "gemma2", "gemma4, experts", "phi", "gpt2", "opt"),
        *("olmo 2", "minimax-m2", "hunyuan v1 with experts", "mistral small 4"),
    ],
)
def test_sums_are_those_that_are_priced(name: str) -> None:
    """Their number and bytes, layer by layer, forward and backward."""
    plan = text_plan(CONFIGS[name], (0, 1))
    group = Counting((0, 1), 0, None)
    object.__setattr__(group, "seen", [])
    module = build_stage_module(plan, plan.stages[0], seed=0, dtype=torch.float64, tensor=group)
    microbatch = whole_batch(plan.model.module("llm"), plan.batch)
    data = microbatch_data(
        plan, plan.stages[0], microbatch, SyntheticSource(0), dtype=torch.float64, device="cpu", context=None
    )
    work, grid = work_of(plan, microbatch), Grid(2, 1)
    messages = [placed_messages(layer, work, grid, 8) for layer in plan.model.module("llm").layers]
    loss = module(StageInput(None, data))
    *blocks, largest, sums = group.seen
    assert (largest, sums) == (8 * work.tokens(TokenCount.IN), 16 * work.tokens(TokenCount.IN))
    assert blocks == [size for each in messages for _, size in each.forward]
    group.seen.clear()
    loss.backward()
    assert group.seen == [size for each in reversed(messages) for _, size in reversed(each.backward)]


def test_bad_degrees_name_the_weight() -> None:
    layer = adapter_of(tiny_models.llm()).build(1)
    message = r"layers.0.self_attn.k_proj.weight: .*whole heads, 2 do not go into 4"
    with pytest.raises(ValueError, match=message):
        cuts_of(layer, 4)
    narrow = adapter_of(tiny_models.llm(tiny_models.LLAMA | {"vocab_size": 3})).build(0)
    with pytest.raises(ValueError, match=r"embed_tokens.weight: 3 features do not go into 4"):
        cuts_of(narrow, 4)


def test_a_product_without_a_rule_is_named() -> None:
    layer = adapter_of(tiny_models.llm()).build(1)
    layer.block.mlp.extra = nn.Linear(2, 2)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"layers.0.mlp.extra: there is no rule to cut Linear .*tp = 1"):
        cuts_of(layer, 2)
