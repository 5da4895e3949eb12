"""What a row can say beyond a dense replicated model: sharding, experts, recomputation, pipelines, models."""

from dataclasses import replace
from itertools import pairwise

import pytest

from sim.predict import iteration_s
from sim.step.sweep import Sweep
from tests.test_predict import of_all_replicas, row
from workbench.cost.execution import Execution, Launch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work, attention_pairs, layer_flop
from workbench.llm_table.columns import SHARES
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_bytes import activation_bytes, held_bytes, scores_bytes
from workbench.llm_table.row_doubts import relevant_doubts
from workbench.llm_table.row_execution import execution_of
from workbench.llm_table.row_model import MODULE, model_of
from workbench.llm_table.row_plan import plan_of, stages_of
from workbench.model.block_modules import BlockModule, kept_beside, part_of
from workbench.model.layer import Attention
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.timing.price import price

MIXTURE = {"architecture": "llama", "experts": 8, "topk": 2, "expert_ffn": 32, "tied": "no"}


def sharded(plan: Plan, instances: int) -> Plan:
    """The plan of all replicas with its weights sharded by the planner's own rounds."""
    modules = (ModuleSettings(module=MODULE, sharding=Sharding.PARAMETERS, instances=instances),)
    return with_programs(replace(plan, programs=(), settings=replace(plan.settings, modules=modules)))


def predicted(**cells: object):
    return RowPredictor(iteration_s).predict(row(**cells))


@pytest.mark.parametrize("group", [4, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_replica_gathers_for_all(group, precision):
    """FSDP and HSDP: the iteration time of the plan in which every replica is written out."""
    llm = row(dp=4, zero_stage=3, shard_group=group, tied="no", precision=precision)
    cost = CostModel(load_profile(llm.gpu))
    whole = lower(sharded(of_all_replicas(llm), 4 // group))
    alone = with_replicas(lower(plan_of(llm, cost.profile)), llm)
    expected, found = (
        Sweep(each).iteration_s(prices.duration_s, prices.step_s)
        for each in (whole, alone)
        for prices in [price(each, cost)]
    )
    assert found == pytest.approx(expected, rel=1e-12)


def test_sharding_holds_less_the_more_is_sharded():
    """Two bytes of weights, four of gradients and twelve of optimizer an element, each over its ranks."""
    elements = sum(
        each.num_elements
        for layer in model_of(row(tied="no")).modules[0].layers
        for each in layer.parameters()
    )
    for stage, per_element in ((0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4)):
        llm = row(dp=4, zero_stage=stage, tied="no")
        held = held_bytes(lower(plan_of(llm, load_profile(llm.gpu))), llm, 0)
        assert held == pytest.approx(per_element * elements, rel=1e-3)
    big = {"hidden": 512, "heads": 8, "layers": 32}
    sizes = [predicted(dp=4, zero_stage=stage, **big).peak_bytes for stage in range(4)]
    assert all(more > less for more, less in pairwise(sizes))


def test_a_group_holds_what_its_ranks_share():
    few, many = predicted(dp=8, zero_stage=3, shard_group=2), predicted(dp=8, zero_stage=3)
    assert few.peak_bytes > many.peak_bytes


def test_sums_beside_the_backward_are_hidden():
    big = {"hidden": 2048, "heads": 16, "layers": 8, "sequence": 1024, "dp": 8, "global_batch": 8}
    times = [predicted(**big, zero_stage=1, dp_overlap=word).iteration_s for word in ("no", "grads", "both")]
    assert times[0] > times[1] > times[2]
    assert predicted(**big, dp_overlap="no").parts.data > predicted(**big, dp_overlap="grads").parts.data


def test_more_microbatches_of_a_cut_stage_are_continued():
    """From two and three: the same as planned one by one."""
    llm = row(dp=2, zero_stage=3, global_batch=12)
    found = RowPredictor(iteration_s).predict(llm)
    cost = RowPredictor(iteration_s).cost(llm)
    whole = with_replicas(lower(plan_of(llm, cost.profile)), llm)
    assert found.iteration_s == pytest.approx(iteration_s(whole, price(whole, cost)), rel=1e-9)
    assert sum(found.parts.shares().values()) == pytest.approx(1.0)


def test_experts_lie_over_replicas():
    """Each of eight ranks holds one expert of eight, and everything else whole."""
    dense = {"global_batch": 8, "dp": 8, "hidden": 256, "heads": 4}
    alone, over = row(**dense, **MIXTURE), row(**dense, **MIXTURE, ep=8)
    whole, part = (
        held_bytes(lower(plan_of(each, load_profile(each.gpu))), each, 0) for each in (alone, over)
    )
    expert = 3 * 256 * 32
    assert whole - part == pytest.approx(18 * 4 * 7 * expert, rel=1e-3)
    recorded = RowPredictor(iteration_s, execution=Execution(launch=Launch.GRAPH))  # no host to wait for
    apart, together = (recorded.predict(each).parts.in_layers for each in (over, alone))
    assert apart > 10 * abs(together)


def test_groups_of_experts_are_the_ranks_that_hold_the_same():
    llm = row(dp=8, **MIXTURE, ep=4)
    whole = with_replicas(lower(plan_of(llm, load_profile(llm.gpu))), llm)
    mine = {group.ranks for group in whole.groups if 0 in group.ranks}
    assert mine == {tuple(range(8)), (0, 4)}


def test_modules_that_are_computed_again_are_not_kept():
    cells = {"architecture": "llama", "hidden": 512, "heads": 8, "sequence": 256, "global_batch": 1}
    words = ("none", "norm", "norm+act", "norm+mlp", "full")
    found = [predicted(**cells, recompute=word) for word in words]
    held = [
        activation_bytes(lower(plan_of(row(**cells, recompute=w), load_profile("H100"))))[0] for w in words
    ]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)
    assert [each.iteration_s for each in found] == sorted(each.iteration_s for each in found)


def test_selective_stands_beside_flash():
    again = predicted(recompute="selective", sequence=512, heads=4, hidden=256)
    assert again.iteration_s > predicted(sequence=512, heads=4, hidden=256).iteration_s


def test_stored_scores_without_dropout_take_fewer_passes_and_bytes():
    """2.5 of 4 and of 4.5 passes are of dropout; of 5 bytes a score those of mask and result."""
    masked, plain = (row(attention="stored", recompute="selective", dropout=said) for said in ("yes", "no"))
    assert row(attention="stored") == row(attention="stored", dropout="yes")
    assert row() == row(dropout="no")
    runs = [execution_of(each, Execution()) for each in (masked, plain)]
    assert [run.scores_passes for run in runs] == [4.0, 1.5]
    assert [run.scores_backward_passes for run in runs] == [4.5, 2.0]
    assert scores_bytes(plain) * 5 == scores_bytes(masked) * 2


def test_what_a_module_keeps_is_what_it_reads():
    (block,) = model_of(row(layers=1)).modules[0].layers[1:-1]
    ones = [1.0] * len(block.operators)
    names = [each.name for each in block.operators]
    left = dict(zip(names, kept_beside(block.operators, ones, (BlockModule.MLP,)), strict=True))
    assert [name for name, size in left.items() if not size] == ["mlp.gelu", "mlp.down"]
    left = dict(zip(names, kept_beside(block.operators, ones, (BlockModule.NORM,)), strict=True))
    assert [name for name, size in left.items() if not size] == ["qkv_proj", "mlp.up"]
    assert part_of(block, (BlockModule.MOE,)) is None


LATENT = {"kv_lora": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
EXPERTS = {"experts": 64, "topk": 6, "expert_ffn": 1408, "shared_expert_ffn": 2816, "first_dense_layers": 1}
PUBLISHED = {  # what it is, where it is published: cells, parameters, how exact
    "DeepSeek-V2-Lite (DeepSeek-AI 2024, DeepSeek-V2, appendix B)": (
        LATENT
        | EXPERTS
        | {"architecture": "llama", "tied": "no"}
        | {"hidden": 2048, "layers": 27, "heads": 16, "ffn": 10944, "vocab": 102400},
        15.7e9,
        2e-3,
    ),
    "T5 1.1 XL (google-research, t5x/examples/t5)": (
        {"architecture": "t5", "tied": "no"}
        | {"hidden": 2048, "layers": 24, "heads": 32, "head_dim": 64, "ffn": 5120, "vocab": 32128},
        2.85e9,
        5e-3,
    ),
    "ViT-B/16 (Dosovitskiy et al. 2021, table 1)": (
        {"architecture": "vit", "patch": 16}
        | {"hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, "sequence": 197, "vocab": 1000},
        86e6,
        0.01,
    ),
    **{
        f"DiT-{size}/2 (Peebles and Xie 2023, table 1)": (
            {"architecture": "dit", "patch": 2, "sequence": 256, "vocab": 1000}
            | {"hidden": hidden, "layers": layers, "heads": heads},
            published,
            0.011,
        )
        for size, layers, hidden, heads, published in (
            ("S", 12, 384, 6, 33e6),
            ("B", 12, 768, 12, 130e6),
            ("L", 24, 1024, 16, 458e6),
            ("XL", 28, 1152, 16, 675e6),
        )
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_parameters(name):
    cells, published, near = PUBLISHED[name]
    layers = model_of(row(**cells)).modules[0].layers
    ours = sum(p.num_elements for layer in layers for p in layer.parameters())
    assert ours == pytest.approx(published, rel=near)


def test_a_window_sees_its_tokens():
    full, same, windowed = (predicted(sequence=4096, global_batch=1, window=w) for w in (0, 4096, 128))
    assert windowed.parts.attention < full.parts.attention
    assert (same.iteration_s, same.mfu) == (full.iteration_s, full.mfu)


def test_tokens_that_see_both_ways_see_a_window_of_them():
    (layer,) = model_of(row(architecture="vit", layers=1, sequence=1024, window=100)).modules[0].layers[1:-1]
    (attention,) = (each for each in layer.operators if isinstance(each, Attention))
    whole = RowWork(1024, 1024, 1024**2)
    assert attention_pairs(attention, Work((whole,)), Grid()) == 1024 * 100


def test_adapters_train_alone():
    big = {"hidden": 4096, "heads": 32, "sequence": 2048, "global_batch": 1}
    found, whole = predicted(**big, lora_rank=4), predicted(**big)
    assert found.peak_bytes < whole.peak_bytes
    assert found.parts.products < whole.parts.products
    assert found.parts.optimizer < whole.parts.optimizer


@pytest.mark.parametrize(
    ("cells", "blocks"),
    [
        ({"layers": 6, "pp": 4}, [2, 2, 1, 1]),
        ({"layers": 6, "pp": 4, "embedding_as_layer": "yes", "loss_as_layer": "yes"}, [1, 2, 2, 1]),
        ({"layers": 7, "pp": 4, "loss_as_layer": "yes"}, [2, 2, 2, 1]),
        ({"layers": 5, "pp": 2}, [3, 2]),
        ({"layers": 6, "pp": 4, "stage_blocks": "2+1+3+0"}, [2, 1, 3, 0]),
        ({"layers": 6, "pp": 2, "virtual_stages": 2, "stage_blocks": "0 + 1 + 3 + 2"}, [0, 1, 3, 2]),
    ],
)
def test_stages_share_blocks(cells, blocks):
    stages = stages_of(row(**cells))
    edges = [(stage.id == 0) + (stage.id == len(stages) - 1) for stage in stages]
    sizes = [stage.layers[1] - stage.layers[0] - edge for stage, edge in zip(stages, edges, strict=True)]
    assert sizes == blocks


def test_a_domain_keeps_ranks_together():
    cells = {"hidden": 1024, "heads": 16, "dp": 16, "global_batch": 16}
    assert predicted(**cells).parts.data > predicted(**cells, gpus_per_nvlink_domain=72).parts.data


def test_more_tensor_ranks_than_key_heads_hold_one_each():
    assert predicted(kv_heads=2, tp=4, architecture="llama").iteration_s > 0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_copies_of_key_heads_are_not_useful(kv_heads):
    """Three forwards of the row's own heads: two FLOP a weight and token, four a pair and query feature."""
    hidden, ffn, length, layers, tp = 256, 512, 1000, 2, 4
    cells = {"hidden": hidden, "ffn": ffn, "sequence": length, "layers": layers, "heads": 4, "tp": tp}
    found = predicted(**cells, kv_heads=kv_heads, architecture="llama", vocab=1100, vocab_multiple=128)
    weights = 2 * hidden**2 + 2 * hidden * kv_heads * 64 + 3 * hidden * ffn
    padded = 1536  # the vocabulary up to a multiple of 128 x tp
    forward = (
        layers * (2 * weights * length + 2 * hidden * length * (length + 1)) + 2 * hidden * padded * length
    )
    peak = load_profile("A100-80GB").peak("bfloat16")
    assert found.mfu == pytest.approx(3 * 8 * forward / found.iteration_s / tp / peak, rel=1e-12)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"zero_stage": 4}, "zero_stage: want 0 to 3, got 4; nearest: 3"),
        ({"zero_stage": 2, "optimizer": "plain"}, "want it to agree with zero_stage 2, got plain"),
        ({"shard_group": 2, "dp": 2}, "shard_group: want 1 where zero_stage is 0, got 2; nearest: 1"),
        ({"shard_group": 3, "dp": 4, "zero_stage": 3}, "shard_group: must divide dp x cp = 4, got 3"),
        ({"experts": 8, "topk": 9}, "topk: want 1 to experts = 8, got 9; nearest: 8"),
        ({"topk": 2}, "topk: want 0 without experts, got 2; nearest: 0"),
        ({"experts": 8, "topk": 2, "ep": 3}, "ep: must divide experts = 8, got 3; nearest: 2"),
        ({"experts": 8, "topk": 2, "ep": 4, "dp": 2}, "ep: must divide dp x cp x tp = 2, got 4"),
        ({"rope_dim": 64}, "rope_dim: want 0 without kv_lora, got 64; nearest: 0"),
        ({"recompute": "core_attn+mpl"}, "got 'core_attn+mpl'; nearest: mlp"),
        ({"pp": 8}, "pp x virtual_stages: want at most the 4 layers, got 8; nearest: 4"),
        ({"pp": 4, "loss_as_layer": "yes"}, "must divide layers with embedding and loss = 5, got 4"),
        ({"pp": 2, "stage_blocks": "4"}, "want pp x virtual_stages = 2 numbers, got 1: 4; nearest: 2+2"),
        ({"pp": 2, "stage_blocks": "2+3"}, "want numbers that add up to 4 blocks, got 5: 2+3; nearest: 2+2"),
        ({"pp": 3, "stage_blocks": "2+0+2"}, "want a block in every stage between the first and the last"),
        ({"pp": 2, "stage_blocks": "2+2", "loss_as_layer": "yes"}, "want an empty cell with embedding_as_"),
        ({"stage_blocks": "4x1"}, "want whole numbers with + between, got '4x1'; nearest: an empty cell"),
        ({"grad_accum": 3}, "grad_accum: want global_batch / (dp x micro_batch) = 8, got 3; nearest: 8"),
        ({"full_every": 4}, "full_every: want 0 without a window or linear_key_heads, got 4"),
    ],
)
def test_contradictions_name_the_nearest_choice(cells, said):
    with pytest.raises(ValueError) as error:
        row(**cells)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_only_what_matters_is_doubted():
    shares = dict.fromkeys(SHARES, 0.0) | {"products": 0.9, "attention": 0.04}
    doubts = (
        "matmul",
        "matmul: scaled",
        "attention: scaled",
        "inter link: line rate",
        "executor overhead: 0",
    )
    assert relevant_doubts(doubts, shares, row()) == ("matmul: scaled",)
    far = shares | {"data": 0.06}
    assert relevant_doubts(doubts, far, row(dp=16, global_batch=16)) == (
        "inter link: line rate",
        "matmul: scaled",
    )


def test_dropped_tokens_leave_rows_of_a_known_number():
    """A capacity of 1 computes what even routing does, of 2 twice the rows; no host waits."""
    even, full, padded = (row(**MIXTURE, capacity=share) for share in ("", 1, 2))
    routed, once, twice = (model_of(each).modules[0].layers[1].operators for each in (even, full, padded))
    assert routed == once
    for known, more in zip(once, twice, strict=True):
        share = 2 if known.name.startswith("mlp.expert") else 1
        assert getattr(more, "tokens_scale", 1) == share * getattr(known, "tokens_scale", 1)
    waits = (replace(each, fitted=(("host_wait_s", 1e-3),)) for each in (even, full))
    assert [execution_of(each, Execution()).host_wait_s for each in waits] == [1e-3, 0.0]
    with pytest.raises(ValueError, match="capacity: want an empty cell without experts, got 2"):
        row(capacity=2)


def test_exchanges_of_experts_run_beside_passes():
    cells = {"hidden": 4096, "heads": 32, "sequence": 4096, "dp": 8, "global_batch": 8, "ep": 8} | MIXTURE
    ahead, beside = (predicted(**cells, moe_overlap=word) for word in ("no", "yes"))
    assert beside.iteration_s < ahead.iteration_s
    assert beside.parts.in_layers < ahead.parts.in_layers


def test_products_of_a_diffusion_transformer_are_those_of_its_paper():
    """Table 4 counts a product and a sum as one, of an image of 256 x 256: 118.64 Gflops (DiT-XL/2)."""
    cells = {"architecture": "dit", "patch": 2, "sequence": 256, "vocab": 1000}
    given = row(**cells, hidden=1152, layers=28, heads=16)
    work = Work((RowWork(256, 256, 256 * 256),))
    layers = model_of(given).modules[0].layers
    assert sum(layer_flop(layer, work) for layer in layers) / 2 == pytest.approx(118.64e9, rel=0.01)
