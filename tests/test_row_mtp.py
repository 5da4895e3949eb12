"""Rows with multi-token prediction: published sizes, where the modules are, what they hold and take."""

from itertools import pairwise

import pytest

from sim.predict import iteration_s
from sim.step.sweep import Sweep
from tests.test_predict import of_all_replicas, row
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import standing_for
from workbench.llm_table.row_bytes import held_bytes
from workbench.llm_table.row_model import model_of
from workbench.llm_table.row_mtp import PROJECTION
from workbench.llm_table.row_plan import plan_of, stages_of
from workbench.model.experts import expert_index, is_of_expert
from workbench.model.layer import Layer, Matmul
from workbench.model.model_graph import num_weights
from workbench.plan.lower import lower
from workbench.timing.price import price

V3 = {  # DeepSeek-V3, config.json
    **{"architecture": "llama", "tied": "no", "hidden": 7168, "layers": 61, "heads": 128, "ffn": 18432},
    **{"vocab": 129280, "q_lora": 1536, "kv_lora": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
    **{"experts": 256, "topk": 8, "expert_ffn": 2048, "shared_expert_ffn": 2048, "first_dense_layers": 3},
}
SMALL = {"architecture": "llama", "hidden": 64, "ffn": 128, "layers": 4, "vocab": 1024, "tied": "no"}


def active(layer: Layer, topk: int) -> int:
    """Weights of products that a token runs through."""
    products = (op for op in layer.operators if isinstance(op, Matmul))
    used = (op for op in products if not is_of_expert(op) or expert_index(op) < topk)
    return sum(op.in_features * op.out_features for op in used)


def test_deepseek_v3_has_its_published_parameters():
    """deepseek-ai/DeepSeek-V3, README_WEIGHTS.md: 671 B, 36.6 B of them active with the head's 0.9 B; the
    module has 11.5 B of its own, and 1.5 B active ones with the head. Both are without its projection.
    """
    plain, further = (model_of(row(**V3, mtp_layers=num)).modules[0].layers for num in (0, 1))
    assert num_weights(plain) == pytest.approx(671e9, rel=1e-3)
    projection = 2 * 7168**2
    own = num_weights(further) - num_weights(plain)
    assert own - projection == pytest.approx(11.5e9, rel=2e-3)
    assert sum(active(each, 8) for each in plain) == pytest.approx(36.6e9, rel=0.01)
    module = [each for each in further if each.name.startswith("mtp")]
    assert sum(active(each, 8) for each in module) - projection == pytest.approx(1.5e9, rel=0.01)


def test_a_module_s_flop_are_a_block_a_projection_and_a_head():
    work = Work((RowWork(4096, 4096, 4096 * 4097 // 2),))
    layers = {each.name: each for each in model_of(row(**V3, mtp_layers=1)).modules[0].layers}
    flop = {name: layer_flop(each, work) for name, each in layers.items()}
    assert flop["mtp.0.block"] == flop["block.60"]
    assert flop["mtp.0.head"] == flop["head"]
    assert flop["mtp.0.projection"] == 2 * 4096 * 2 * 7168**2
    assert sum(op.name == PROJECTION for op in layers["mtp.0.projection"].operators) == 1


@pytest.mark.parametrize(("cells", "sizes"), [({"pp": 2}, [3, 2 + 6 + 1]), ({"pp": 4}, [2, 1, 1, 1 + 6 + 1])])
def test_modules_are_on_the_last_stage(cells, sizes):
    stages = stages_of(row(**SMALL, mtp_layers=2, **cells))
    assert [stage.layers[1] - stage.layers[0] for stage in stages] == sizes


@pytest.mark.parametrize("tied", ["no", "yes"])
def test_ranks_hold_table_and_head_once(tied: str):
    """18 bytes an element: the module's own; on a last stage apart from the first also the table."""

    def held(rank: int, **cells: object) -> int:
        llm = row(**SMALL | {"tied": tied}, **cells)
        return held_bytes(lower(plan_of(llm, load_profile(llm.gpu))), llm, rank)

    layers = model_of(row(**SMALL, mtp_layers=1)).modules[0].layers
    table = 1024 * 64
    own = sum(each.num_parameters for each in layers if each.name.startswith("mtp")) - 2 * table
    assert held(0, mtp_layers=1) - held(0) == 18 * own
    assert held(0, pp=2, mtp_layers=1) == held(0, pp=2)
    copied = 0 if tied == "yes" else table
    assert held(1, pp=2, mtp_layers=1) - held(1, pp=2) == 18 * (own + copied)


@pytest.mark.parametrize("tied", ["no", "yes"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 4, 2)])
def test_one_replica_stands_for_all(tp: int, pp: int, dp: int, tied: str):
    llm = row(**SMALL | {"tied": tied}, mtp_layers=1, tp=tp, pp=pp, dp=dp, gpus_per_node=16)
    cost = CostModel(load_profile(llm.gpu))
    whole = lower(of_all_replicas(llm))
    alone = standing_for(lower(plan_of(llm, cost.profile)), num_replicas=dp, stride=tp)
    expected, found = price(whole, cost), price(alone, cost)
    assert iteration_s(alone, found) == pytest.approx(
        Sweep(whole).iteration_s(expected.duration_s, expected.step_s), rel=1e-12
    )


def test_ends_of_a_pipeline_add_up_the_table_s_gradients():
    plain, further = (
        lower(plan_of(row(**SMALL, pp=2, mtp_layers=num), load_profile("H100"))) for num in (0, 1)
    )
    assert not any(len(group.ranks) > 1 for group in plain.groups)
    (shared,) = (group for group in further.groups if len(group.ranks) > 1)
    assert (shared.ranks, shared.num_elements) == ((0, 1), 1024 * 64)


def predicted(llm: LlmRow):
    return RowPredictor(iteration_s).predict(llm)


LAYOUTS = [
    {},
    {"pp": 2, "virtual_stages": 2},
    {"dp": 4, "zero_stage": 3},
    {"tp": 2},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_module_takes_longer_and_more_memory(layout):
    found = [
        predicted(row(**SMALL | {"hidden": 512, "heads": 8, "sequence": 512}, mtp_layers=num, **layout))
        for num in (0, 1, 2)
    ]
    assert all(a.iteration_s < b.iteration_s and a.peak_bytes < b.peak_bytes for a, b in pairwise(found))
    assert all(0 < each.mfu < 1 for each in found)


@pytest.mark.parametrize("cells", [{"architecture": "gpt"}, {"lora_rank": 4}, {"architecture": "t5"}])
def test_other_models_have_none(cells):
    with pytest.raises(ValueError, match="mtp_layers: want 0 with adapters, or without architecture llama"):
        row(**SMALL | cells, mtp_layers=1)
