"""Rows of hybrid models: gated DeltaNet in most blocks, gated attention in the others."""

import pytest

from sim.predict import iteration_s
from tests.test_predict import row
from workbench.cost.profile import load_profile
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_bytes import activation_bytes
from workbench.llm_table.row_model import model_of
from workbench.llm_table.row_plan import plan_of
from workbench.memory.delta_rule import fused_rule_bytes
from workbench.model.families.qwen_hybrid import QWEN3_NEXT
from workbench.model.layer import Attention, DeltaRule, Pointwise
from workbench.plan.lower import lower

LINEAR = {"linear_key_heads": 16, "linear_value_heads": 32, "full_every": 4}
GATED = {"head_dim": 256, "rotary_dim": 64, "qk_norm": "yes", "gated_attention": "yes"}
EXPERTS = {"experts": 512, "topk": 10, "expert_ffn": 512, "shared_expert_ffn": 512}
NEXT = {  # Qwen3-Next-80B-A3B, config.json
    **{"architecture": "llama", "tied": "no", "hidden": 2048, "layers": 48, "heads": 16, "kv_heads": 2},
    **{"vocab": 151936, "sequence": 4096, "shared_expert_gate": "yes"},
    **LINEAR,
    **GATED,
    **EXPERTS,
}
SMALL = {
    **{"architecture": "llama", "hidden": 1024, "heads": 8, "kv_heads": 8, "layers": 4, "sequence": 2048},
    **{"linear_key_heads": 8, "linear_value_heads": 16, "linear_key_dim": 64, "full_every": 4},
    **{"global_batch": 2, "gated_attention": "yes", "qk_norm": "yes"},
}


def test_a_row_with_its_sizes_is_the_family_s_model():
    """Layer by layer: parameters, FLOP, and the same rules and gates; 80 billion in all, as published."""
    layers = model_of(row(**NEXT)).modules[0].layers
    family = QWEN3_NEXT.make({"model_type": "qwen3_next"})
    assert [each.num_parameters for each in layers] == [each.num_parameters for each in family]
    work = Work((RowWork(4096, 4096, 4096 * 4097 // 2),))
    assert [layer_flop(each, work) for each in layers] == [layer_flop(each, work) for each in family]
    for ours, theirs in zip(layers, family, strict=True):
        mixers = [
            [op for op in each.operators if isinstance(op, DeltaRule | Attention)] for each in (ours, theirs)
        ]
        assert mixers[0] == mixers[1]
        moved = [{op for op in each.operators if isinstance(op, Pointwise)} for each in (ours, theirs)]
        assert {op for op in moved[0] if "shared" not in op.name} == {
            op for op in moved[1] if "shared" not in op.name
        }
    assert sum(each.num_parameters for each in layers) == pytest.approx(80e9, rel=5e-3)


@pytest.mark.parametrize(
    ("cells", "kinds"), [({}, "LLLF"), ({"full_every": 2}, "LFLF"), ({"full_every": 0}, "LLLL")]
)
def test_every_nth_block_has_full_attention(cells, kinds):
    blocks = model_of(row(**SMALL | cells)).modules[0].layers[1:-1]
    assert (
        "".join("L" if any(isinstance(op, DeltaRule) for op in b.operators) else "F" for b in blocks) == kinds
    )


def test_a_block_keeps_what_its_rule_reads_in_place_of_what_its_attention_does():
    """Queries of q, keys and values of k features, their norms, the gate, and denominators of the softmax."""
    linear, full = (row(**SMALL | {"full_every": each}) for each in (0, 1))
    kept = [activation_bytes(lower(plan_of(each, load_profile(each.gpu))))[0] for each in (linear, full)]
    rule = next(op for op in model_of(linear).modules[0].layers[1].operators if isinstance(op, DeltaRule))
    of_rule = fused_rule_bytes(rule, 2) + (2 * 2 + 2) * rule.value_width
    q = k = 1024
    of_attention = 2 * (q + k) + 2 * (q + 2 * k) + 4 * 8 + 2 * 2 * q + 2 * q
    assert kept[0] - kept[1] == 2048 * 4 * (of_rule - of_attention)


def test_long_sequences_are_cheaper_where_most_blocks_are_linear():
    long = SMALL | {"sequence": 32768, "gpu": "H100"}
    predictor = RowPredictor(iteration_s)
    hybrid, full = (predictor.predict(row(**long | {"full_every": each})) for each in (4, 1))
    assert hybrid.iteration_s < full.iteration_s
    assert "linear attention: at the rate of products of its chunks" in hybrid.unmeasured
    assert not any("delta" in each for each in full.unmeasured)


@pytest.mark.parametrize("layout", [{"tp": 8}, {"pp": 2}, {"dp": 2, "zero_stage": 3}, {"recompute": "full"}])
@pytest.mark.parametrize("cells", [{}, {"precision": "fp8"}, {"pointwise": "eager"}], ids=str)
def test_rows_are_priced_in_every_layout(layout, cells):
    found = RowPredictor(iteration_s).predict(row(**SMALL | layout | cells | {"gpu": "H100"}))
    assert 0 < found.mfu < 1
    assert found.peak_bytes > 0


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            {"linear_key_heads": 0, "full_every": 0},
            "linear_value_heads: want it with linear_key_heads alone, got 16; nearest: 0",
        ),
        ({"conv_kernel": 0}, "want it with linear_key_heads or Mamba-2 alone, got 0; nearest: 4"),
        (
            {"architecture": "gpt", "gated_attention": ""},
            "linear_key_heads: want 0 without architecture llama",
        ),
        ({"cp": 2}, "cp: want 1 with linear_key_heads, got 2; nearest: 1"),
        ({"window": 64}, "window: want 0 with linear_key_heads, got 64; nearest: 0"),
        ({"linear_value_heads": 12}, "linear_key_heads: must divide linear_value_heads = 12, got 8"),
        ({"linear_key_heads": 2, "tp": 4}, "tp: must divide linear_key_heads = 2, got 4; nearest: 2"),
        ({"rotary_dim": 256}, "rotary_dim: want head_dim 128, or less with architecture llama"),
        ({"shared_expert_gate": "yes"}, "shared_expert_gate: want no without experts and shared_expert_ffn"),
        (
            {"experts": 8, "topk": 2, "shared_expert_gate": "yes"},
            "shared_expert_gate: want no without experts and shared_expert_ffn, got yes; nearest: no",
        ),
    ],
)
def test_contradictions_name_the_nearest_choice(cells, said):
    with pytest.raises(ValueError) as error:
        row(**SMALL | cells)
    assert said in str(error.value)
