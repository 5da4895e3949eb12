"""Learned sparse attention: the keys that an indexer chooses, its work and memory; none of it is trained."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from runtime.models.attention import pack
from runtime.models.glm import CORRECTION
from runtime.models.indexer import Indexer as RuntimeIndexer
from runtime.world.pool import Pool
from tests import paper_models, tiny_models
from tests.language_models import num_weights, refused
from tests.plans import cluster
from tests.recurrent_cases import (
    assert_recomputed_split,
    assert_sharded,
    assert_two_lengths,
    text_model,
    texts,
)
from tests.test_adapters import build
from tests.test_adapters_decoders import _plain, original  # noqa: F401  (a fixture)
from tests.test_expert_plan import changed_by_a_step, moe_plan
from tests.test_fsdp import sharded_parameters
from tests.test_parity import assert_same
from tests.test_tensor_parallel import assert_exported_whole
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work, layer_flop
from workbench.data.sample import Sample, Segment
from workbench.export.decoder import decoder_of
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.layer import saved_bytes
from workbench.memory.stage import state_of
from workbench.model.families.sparse_attention import FULL, SHARED, _indexer_types
from workbench.model.frozen import Needs
from workbench.model.hf_config import module_from_config
from workbench.model.indexer import Indexer, is_of_indexer
from workbench.model.layer import Attention, Layer, LayerKind
from workbench.model.model_graph import TEXT
from workbench.model.trained import frozen_parameters, trained_parameters
from workbench.plan.flop import _layer_flop
from workbench.plan.runnable import check_family, check_runnable
from workbench.plan.work import attention_area
from workbench.planner.assembly import blocks_cut

F64 = torch.float64
MODEL: dict[str, Any] = paper_models.DECODERS["deepseek_v32"]
SHARING: dict[str, Any] = paper_models.DECODERS["glm_moe_dsa"]  # its third layer reads what the second chose
BOTH_MODELS = pytest.mark.parametrize("config", [MODEL, SHARING], ids=["deepseek-v3.2", "glm-5"])
TOKENS = 12
BOTH = Needs(input_grad=True, weight_grad=True)


def _attention(layer: Layer) -> Attention:
    return next(operator for operator in layer.operators if isinstance(operator, Attention))


def _without_indexer(layer: Layer) -> Layer:
    attention = _attention(layer)
    plain = replace(attention, indexer=None, top_k=None)
    return replace(layer, operators=tuple(plain if each is attention else each for each in layer.operators))


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_query_attends_to_as_many_keys_as_it_sees_up_to_k(length: int, top_k: int) -> None:
    attention = replace(_attention(tiny_models.llm(MODEL).layers[1]), top_k=top_k)
    sample = Sample(0, (Segment(TEXT, 0, length, length),))
    assert attention_area(sample, attention.reach) == sum(min(place, top_k) for place in range(1, length + 1))


@pytest.mark.parametrize(
    ("name", "config", "choosing"),
    [("deepseek_v32", MODEL, [True] * 3), ("glm_moe_dsa", SHARING, [True, False, True])],
)
def test_flop_are_those_that_torch_counts(name: str, config: dict[str, Any], choosing: list[bool]) -> None:
    """Of the whole model's forward, in which transformers computes all pairs of attention and indexer.

    A layer that reads another's choice has no indexer.
    """
    module = tiny_models.llm(config)
    ours, _, data = build(module, F64, *texts(TOKENS))
    theirs = original(name, ours)
    with FlopCounterMode(display=False) as counter:
        theirs(input_ids=data.input_ids[None])
    work = Work((RowWork(TOKENS, TOKENS, TOKENS**2),))
    assert [bool(_attention(layer).indexer) for layer in module.layers[1:4]] == choosing
    assert sum(layer_flop(layer, work) for layer in module.layers) == counter.get_total_flops()


@given(st.integers(1, 400), st.integers(1, 4))
def test_an_indexer_has_a_forward_alone_and_all_pairs(length: int, tp: int) -> None:
    """Whole on every tensor-parallel rank; no gradient of it is counted."""
    layer = tiny_models.llm(MODEL).layers[1]
    attention, pairs = _attention(layer), length * (length + 1) // 2
    row = RowWork(length, length, pairs, reached=((attention.reach, pairs // 2),))
    work, plain = Work((row,)), Work((replace(row, attention_area=pairs // 2, reached=()),))
    width, latent = MODEL["hidden_size"], MODEL["q_lora_rank"]
    heads, dim = MODEL["index_n_heads"], MODEL["index_head_dim"]
    expected = 2 * length * (latent * heads * dim + width * dim + width * heads)
    expected += 2 * pairs * heads * (dim + 1)
    without = _without_indexer(layer)
    grid = Grid(tp=tp)
    assert layer_flop(layer, work, grid) - layer_flop(without, plain, grid) == pytest.approx(expected)
    assert _layer_flop(layer, work, BOTH) - _layer_flop(without, plain, BOTH) == pytest.approx(expected)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_keys_are_chosen_as_transformers_does_in_every_item(length: int, top_k: int, seed: int) -> None:
    """Bit by bit in float32; items of other lengths beside them change nothing."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV32Config.from_dict(MODEL | {"index_topk": top_k})
    theirs = deepseek_v32.DeepseekV32Indexer(config, 0)
    ours = RuntimeIndexer(theirs, deepseek_v32.apply_rotary_pos_emb)
    lengths = (length, length + 1, length)
    total = sum(lengths)
    hidden, latent = torch.randn(1, total, config.hidden_size), torch.randn(1, total, config.q_lora_rank)
    rotary = deepseek_v32.DeepseekV32RotaryEmbedding(config)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    angles = rotary(hidden, places)
    chosen = ours(hidden, latent, angles, pack(lengths, "cpu"))
    assert [tuple(each.shape) for each in chosen] == [(2, length, length), (1, length + 1, length + 1)]
    starts = (0, length, 2 * length + 1)
    for start, n, own in zip(starts, lengths, (chosen[0][0], chosen[1][0], chosen[0][1]), strict=True):
        part = slice(start, start + n)
        mask = torch.ones(1, n, n, dtype=torch.bool).tril()
        indices = theirs(hidden[:, part], latent[:, part], [x[:, part] for x in angles], mask, None)
        expected = torch.zeros(1, n, n, dtype=torch.bool).scatter_(-1, indices.long(), True) & mask
        assert torch.equal(own, expected[0])
        assert own.sum(-1).tolist() == [min(place, top_k) for place in range(1, n + 1)]


def test_full_sizes_are_counted_as_transformers_builds_them() -> None:
    """The defaults are DeepSeek-V3.2's own; its indexer is frozen in a trained model."""
    module = module_from_config({"model_type": "deepseek_v32"}, name="llm", modality=TEXT)
    assert module.num_parameters == num_weights({"model_type": "deepseek_v32"})
    attention = _attention(module.layers[1])
    assert attention.top_k == 2048
    assert attention.indexer == Indexer(width=7168, query_width=1536, num_heads=64, head_dim=128)
    of_one = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert module.num_parameters - module.num_trained == 61 * of_one


@pytest.mark.parametrize(
    "change",
    [{}, {"index_topk_freq": 4}, {"index_topk_pattern": "FSS" * 26}, {"index_topk_freq": 3, "n_group": 8}],
    ids=str,
)
def test_full_sizes_of_the_second_are_counted_as_transformers_builds_them(change: dict[str, Any]) -> None:
    """The defaults are GLM-5's own; a layer that reads an earlier choice has no indexer."""
    config = {"model_type": "glm_moe_dsa"} | change
    module = module_from_config(config, name="llm", modality=TEXT)
    assert module.num_parameters == num_weights(config)


@given(st.integers(1, 20), st.integers(0, 6), st.integers(1, 6))
def test_one_indexer_for_so_many_blocks_is_read_as_transformers_does(
    num: int, every: int, after: int
) -> None:
    stated = {"num_hidden_layers": num, "index_topk_freq": every, "index_skip_topk_offset": after}
    config = {key: value for key, value in SHARING.items() if key != "indexer_types"} | stated
    theirs = transformers.GlmMoeDsaConfig.from_dict(config).indexer_types
    assert list(_indexer_types(config)) == theirs
    blocks = tiny_models.llm(config).layers[1:-1]
    assert [_attention(block).indexer is None for block in blocks] == [each == SHARED for each in theirs]
    followed = [*theirs[1:], None]
    assert [getattr(_attention(block).indexer, "is_shared", False) for block in blocks] == [
        own == FULL and following == SHARED for own, following in zip(theirs, followed, strict=True)
    ]


def test_weights_of_an_indexer_are_frozen_beside_trained_ones() -> None:
    """They have no gradient and no optimizer state."""
    plan = moe_plan(config=MODEL)
    layer = plan.model.modules[0].layers[1]
    frozen = frozen_parameters(layer)
    assert len(frozen) == 5
    assert all(is_of_indexer(parameter.name) for parameter in frozen)
    assert {*trained_parameters(layer), *frozen} == set(layer.parameters())
    assert frozen_parameters(replace(layer, trainable=False)) == layer.parameters()
    plain = replace(plan, model=replace(plan.model, modules=(_plain_module(plan.model.modules[0]),)))
    held, without = (sum(size for _, _, size in state_of(each, 0)) for each in (plan, plain))
    num_blocks = MODEL["num_hidden_layers"]
    assert held - without == num_blocks * sum(each.num_elements for each in frozen) * 8


def _plain_module(module: Any) -> Any:
    blocks = (_without_indexer(layer) if layer.kind is LayerKind.BLOCK else layer for layer in module.layers)
    return replace(module, layers=tuple(blocks))


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 4}, {"dp": 2, "pp": 3}], ids=str)
def test_ranks_train_as_one_process(degrees: dict[str, int], pool: Pool) -> None:
    """Every tensor-parallel rank chooses all keys."""
    assert_same(moe_plan(**degrees, config=MODEL, tokens=8), pool)


def test_ranks_that_share_a_choice_train_as_one_process(pool: Pool) -> None:
    """The first stage has the layer that chooses and the one that reads its choice."""
    plan = moe_plan(tp=2, pp=2, ep=2, config=SHARING, tokens=8)
    assert [stage.layers for stage in plan.stages] == [(0, 3), (3, 5)]
    assert_same(plan, pool)


@BOTH_MODELS
def test_recomputed_split_and_sequence_parallel(config: dict[str, Any], pool: Pool) -> None:
    assert_recomputed_split(config, pool, dp=1)


def test_sharded_parameters_train_as_one_process(pool: Pool) -> None:
    """Frozen weights of a trained layer are gathered and not reduced."""
    assert_sharded(MODEL, (5, 9, 6, 7), pool)


@BOTH_MODELS
def test_two_lengths_choose_apart(config: dict[str, Any], pool: Pool) -> None:
    assert_two_lengths(config, pool)


def test_an_export_of_cut_weights_is_whole(tmp_path: Path, pool: Pool) -> None:
    assert_exported_whole(moe_plan(tp=2, ep=2, config=MODEL), tmp_path / "out", pool)


def test_a_step_leaves_the_indexer_as_transformers_leaves_it(tmp_path: Path, pool: Pool) -> None:
    """Of transformers' own checkpoint, all other weights change but corrections of routers."""
    names, changed = changed_by_a_step(transformers.DeepseekV32ForCausalLM, MODEL, tmp_path, pool)
    kept = {name for name in names if name.endswith(CORRECTION) or is_of_indexer(name)}
    assert changed == names - kept
    assert sum(map(is_of_indexer, kept)) == 5 * MODEL["num_hidden_layers"]


def test_an_indexer_takes_time_in_the_forward_alone() -> None:
    """A million pairs more take more time; the backward is that of attention to as many keys."""
    cost = CostModel(load_profile("H100"))
    layer = module_from_config({"model_type": "deepseek_v32"}, name="llm", modality=TEXT).layers[1]
    attention = _attention(layer)

    def of(area: int, own: Layer) -> Any:
        row = RowWork(8192, 8192, area, reached=((attention.reach, 14_681_088),))
        return cost.layer_time(own, Work((row,)), tp=1, cp=1, precision="bfloat16")

    causal, unscored = of(33_558_528, layer), replace(attention, indexer=None)
    operators = tuple(unscored if each is attention else each for each in layer.operators)
    without = of(33_558_528, replace(layer, operators=operators))
    assert causal.forward_s > without.forward_s
    assert causal.input_grad_s == without.input_grad_s
    assert causal.weight_grad_s == without.weight_grad_s
    assert of(34_558_528, layer).forward_s > causal.forward_s


@given(st.integers(1, 64))
def test_fused_kernels_keep_the_chosen_keys(num_tokens: int) -> None:
    """An index of four bytes each, on every rank."""
    layer = tiny_models.llm(MODEL).layers[1]
    work = Work((RowWork(num_tokens, num_tokens, num_tokens),))
    for tp in (1, 2):
        kept, without = (
            saved_bytes(each, BOTH, work, Grid(tp=tp), 2) for each in (layer, _without_indexer(layer))
        )
        assert kept - without == num_tokens * MODEL["index_topk"] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank must be given, .*; nearest: 1536"),
        ({"index_topk": 0}, "index_topk must be a whole number >= 1, got 0"),
        ({"index_head_dim": 3}, "index_head_dim must be at least qk_rope_head_dim 4, .* got 3; nearest: 4"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must list indexed_attention for each of 3"),
        ({"layer_types": 3}, "layer_types must list indexed_attention for each of 3 blocks, got 3"),
        ({"n_group": 4}, "n_group must divide 6 experts into groups of 2 or more, got 4; nearest: 1"),
    ],
)
def test_configurations_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    refused(words, lambda: check_family(tiny_models.llm(MODEL | change)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "full first, got .'shared'"),
        ({"indexer_types": ["full"]}, "must list full or shared for each of 3 blocks"),
        ({"indexer_types": None, "index_topk_pattern": "FXS"}, "must list full or shared .* got .*'X'"),
        ({"indexer_types": "FSS"}, "must list full or shared .* got 'FSS'"),
        ({"indexer_types": None, "index_skip_topk_offset": 0, "index_topk_freq": 2}, "full first, got"),
    ],
)
def test_indexers_that_have_no_choice_to_read_are_refused(change: dict[str, Any], words: str) -> None:
    refused(words, lambda: check_family(tiny_models.llm(SHARING | change)))


def test_no_stage_begins_with_a_layer_that_reads_an_earlier_choice() -> None:
    plan = moe_plan(pp=2, config=SHARING)
    first, second = plan.stages
    plan = replace(plan, stages=(replace(first, layers=(0, 2)), replace(second, layers=(2, 5))))
    words = "stage 1: llm.block.1 reads keys that an earlier .*; want another first layer than 2, nearest: 1"
    refused(words, lambda: check_runnable(plan))
    check_runnable(moe_plan(pp=2, config=SHARING))


@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.lists(st.sampled_from((FULL, SHARED)), min_size=3, max_size=3),
    st.integers(1, 6),
)
def test_stages_are_balanced_among_those_that_may_begin_there(
    cost_s: list[int], kinds: list[str], pp: int
) -> None:
    """Against all cuts in front of layers that read no earlier choice."""
    config = SHARING | {"num_hidden_layers": 4, "indexer_types": [FULL, *kinds]}
    job = Job(
        name="cut",
        model=text_model(config),
        cluster=cluster(8),
        batch=texts(5),
        layouts=(ModuleLayout(module="llm", pp=pp),),
    )
    may_begin = [place for place in range(1, 6) if place in (1, 5) or ([FULL, *kinds][place - 1]) == FULL]
    ways = [(0, *inner, 6) for inner in combinations(may_begin, pp - 1)]
    if not ways:
        refused("want at most", lambda: blocks_cut(job, tuple(map(float, cost_s)), pp, "llm"))
        return
    cuts = blocks_cut(job, tuple(map(float, cost_s)), pp, "llm")
    assert (*[first for first, _ in cuts], 6) in ways
    best = min(max(sum(cost_s[a:b]) for a, b in pairwise(way)) for way in ways)
    assert max(sum(cost_s[a:b]) for a, b in cuts) == best


def test_parameters_of_layers_that_share_a_choice_are_not_sharded() -> None:
    """Each of their layers would be a stage."""
    model, cuts = text_model(SHARING), {"llm": ((0, 5),)}
    plan = sharded_parameters(model, texts(5, 6), replicas=2, cuts=cuts, modules=("llm",))
    words = (
        "sharded parameters make a stage of every layer, and llm.block.1 reads .*; want sharding 'optimizer'"
    )
    refused(words, lambda: check_runnable(plan))


def test_degrees_masks_and_exports_are_refused() -> None:
    words = "an indexer scores all keys of a sample, on one rank; want cp 1, got 2"
    refused(words, lambda: check_runnable(moe_plan(cp=2, config=MODEL)))
    plan = moe_plan(config=MODEL)
    masked = replace(plan, batch=tuple(replace(sample, mask="full") for sample in plan.batch))
    refused("an indexer chooses .* under no mask; want causal, got full", lambda: check_runnable(masked))
    for config in (MODEL, SHARING):
        module = tiny_models.llm(config)
        refused("blocks of 'llm' with learned sparse attention", lambda module=module: decoder_of(module))
