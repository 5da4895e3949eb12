"""Rows whose blocks are one mixer each: Mamba-2, attention, an MLP or experts, as in Nemotron-H."""

import pytest

from sim.predict import iteration_s
from tests.test_nemotron_h_plan import NEMOTRON_3_NANO, NEMOTRON_H_8B
from tests.test_predict import row
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_model import model_of
from workbench.model.families.nemotron_h import NEMOTRON_H
from workbench.model.layer import StateScan

DENSE = {
    **{"architecture": "llama", "gated_mlp": "no", "tied": "no", "hidden": 4096, "layers": 52, "heads": 32},
    **{"kv_heads": 8, "head_dim": 128, "ffn": 21504, "vocab": 131072, "sequence": 4096, "mamba_heads": 128},
    "pattern": NEMOTRON_H_8B["hybrid_override_pattern"],
}
SPARSE = {
    **{"architecture": "llama", "gated_mlp": "no", "tied": "no", "hidden": 2688, "layers": 52, "heads": 32},
    **{"kv_heads": 2, "head_dim": 128, "vocab": 131072, "sequence": 4096, "mamba_heads": 64},
    **{"experts": 128, "topk": 6, "expert_ffn": 1856, "shared_expert_ffn": 3712},
    "pattern": NEMOTRON_3_NANO["hybrid_override_pattern"],
}
SMALL = {
    **{"architecture": "llama", "gated_mlp": "no", "hidden": 1024, "heads": 8, "layers": 4, "sequence": 2048},
    **{"global_batch": 4, "pattern": "M-M*"},
}


@pytest.mark.parametrize(
    ("cells", "config", "published"), [(DENSE, NEMOTRON_H_8B, 8.1e9), (SPARSE, NEMOTRON_3_NANO, 31.6e9)]
)
def test_a_row_with_its_sizes_is_the_family_s_model(cells, config, published):
    """Layer by layer: parameters and FLOP, and the same scans."""
    layers, family = model_of(row(**cells)).modules[0].layers, NEMOTRON_H.make(config)
    assert [each.num_parameters for each in layers] == [each.num_parameters for each in family]
    work = Work((RowWork(4096, 4096, 4096 * 4097 // 2),))
    assert [layer_flop(each, work) for each in layers] == [layer_flop(each, work) for each in family]
    scans = [
        [op for each in them for op in each.operators if isinstance(op, StateScan)]
        for them in (layers, family)
    ]
    assert scans[0] == scans[1]
    assert len(scans[0]) == cells["pattern"].count("M")
    assert sum(each.num_parameters for each in layers) == pytest.approx(published, rel=5e-3)


def test_more_letters_take_longer_and_are_cut():
    predictor, large = RowPredictor(iteration_s), SMALL | {"hidden": 4096, "heads": 32, "sequence": 8192}
    longer = {"pattern": "M-M*M", "layers": 5}
    cells = (large, large | {"tp": 2}, large | {"pp": 2}, large | longer)
    whole_s, *cut_s, longer_s = (predictor.predict(row(**each)).iteration_s for each in cells)
    assert max(cut_s) < whole_s < longer_s


@pytest.mark.parametrize(
    "more", [{"zero_stage": 3, "dp": 2}, {"recompute": "full"}, {"virtual_stages": 2, "pp": 2}]
)
def test_rows_of_mixers_are_planned_as_others(more):
    assert RowPredictor(iteration_s).predict(row(**SMALL, **more)).iteration_s > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pattern": "MX-*"}, "pattern: want M or * or - or E for each block, got 'X'; nearest: M"),
        ({"layers": 5}, "layers: want as many as the pattern has letters, got 5; nearest: 4"),
        ({"pattern": "ME-*"}, "experts: want them with E in the pattern alone, got 0; nearest: 8"),
        ({"pattern": "", "mamba_heads": 8}, "mamba_heads: want it with M in the pattern alone, got 8"),
        ({"pattern": "--**", "mamba_heads": 8}, "want it with M in the pattern alone, got 8; nearest: 0"),
        ({"mamba_groups": 0}, "mamba_groups: want it with M in the pattern alone, got 0; nearest: 1"),
        ({"mamba_head_dim": 0}, "mamba_head_dim: want it with M in the pattern alone, got 0; nearest: 64"),
        ({"architecture": "gpt"}, "pattern: want it with architecture llama alone, got gpt; nearest: llama"),
        ({"cp": 2}, "cp: want 1 with M in the pattern, got 2; nearest: 1"),
        ({"window": 64}, "window: want 0 with a pattern, got 64; nearest: 0"),
        ({"mamba_groups": 5}, "mamba_groups: must divide mamba_heads = 32, got 5"),
        ({"mamba_groups": 2, "tp": 4}, "tp: must divide mamba_groups = 2, got 4; nearest: 2"),
        (
            {"conv_kernel": 0},
            "conv_kernel: want it with linear_key_heads or Mamba-2 alone, got 0; nearest: 4",
        ),
    ],
)
def test_contradictions_name_the_nearest_choice(change, said):
    with pytest.raises(ValueError) as error:
        row(**SMALL | change)
    assert said in str(error.value)
