"""DeepSeek-V2 and V3 as wholes: their work, ranks that share it, checkpoints, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2

from runtime.models.choose import adapter_of
from runtime.models.deepseek import GroupedRouter
from runtime.models.glm import CORRECTION
from runtime.world.pool import Pool
from tests import paper_models, tiny_models
from tests.language_models import num_weights, refused
from tests.recurrent_cases import assert_recomputed_split, assert_sharded, texts
from tests.test_adapters import build
from tests.test_adapters_decoders import _plain, original  # noqa: F401  (a fixture)
from tests.test_expert_plan import changed_by_a_step, moe_plan
from tests.test_parity import assert_same
from tests.test_tensor_parallel import assert_exported_whole
from workbench.cost.roofline import Grid, RowWork, Work, layer_flop, placed_messages
from workbench.export.decoder import decoder_of
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT
from workbench.plan.check import check
from workbench.plan.plan import KeyExchange, ModuleSettings
from workbench.plan.runnable import check_family

F64 = torch.float64
NAMES = [name for name in paper_models.DECODERS if name.startswith("deepseek")]
MODEL: dict[str, Any] = paper_models.DECODERS["deepseek_v3"]
V2: dict[str, Any] = paper_models.DECODERS["deepseek_v2"]
TOKENS = 12


@pytest.mark.parametrize("name", NAMES)
def test_flop_are_those_that_torch_counts(name: str) -> None:
    """Of the whole model's forward on one sample, with all pairs of its tokens."""
    module = tiny_models.llm(paper_models.DECODERS[name])
    ours, _, data = build(module, F64, *texts(TOKENS))
    theirs = original(name, ours)
    with FlopCounterMode(display=False) as counter:
        theirs(input_ids=data.input_ids[None])
    work = Work((RowWork(TOKENS, TOKENS, TOKENS**2),))
    assert sum(layer_flop(layer, work) for layer in module.layers) == counter.get_total_flops()


@pytest.mark.parametrize(
    "degrees",
    [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 4}, {"dp": 2, "pp": 3}, {"cp": 2, "ep": 2}, {"tp": 2, "cp": 2}],
    ids=str,
)
def test_ranks_train_as_one_process(degrees: dict[str, int], pool: Pool) -> None:
    """Latents are whole on every rank and have a part of the gradient; cp pads values to keys' width."""
    config = V2 if "ep" in degrees else MODEL
    assert_same(moe_plan(**degrees, config=config), pool)


@pytest.mark.parametrize("kind", [KeyExchange.RING, KeyExchange.ALL_TO_ALL])
def test_keys_that_go_another_way(kind: KeyExchange, pool: Pool) -> None:
    settings = ModuleSettings(module="llm", key_exchange=kind)
    assert_same(moe_plan(cp=2, config=MODEL, modules=(settings,)), pool)


def test_recomputed_split_and_sequence_parallel(pool: Pool) -> None:
    assert_recomputed_split(MODEL, pool, dp=1)


def test_sharded_parameters_train_as_one_process(pool: Pool) -> None:
    assert_sharded(MODEL, (5, 9, 6, 7), pool)


def test_an_export_of_cut_weights_is_whole(tmp_path: Path, pool: Pool) -> None:
    assert_exported_whole(moe_plan(tp=2, ep=2, config=MODEL), tmp_path / "out", pool)


def test_transformers_own_checkpoint_is_read_and_written(tmp_path: Path, pool: Pool) -> None:
    """Over two tensor-parallel ranks; a step later every weight has changed, and no correction."""
    names, changed = changed_by_a_step(transformers.DeepseekV3ForCausalLM, MODEL, tmp_path, pool)
    assert changed == {name for name in names if not name.endswith(CORRECTION)}
    assert sum("_a_" in name for name in changed) == 4 * MODEL["num_hidden_layers"], "latents and their norms"


def test_full_sizes_are_counted_as_transformers_builds_them() -> None:
    """DeepSeek-V3's own, which are the defaults; DeepSeek-V2's defaults."""
    second = module_from_config({"model_type": "deepseek_v2"}, name="llm", modality=TEXT)
    module = module_from_config({"model_type": "deepseek_v3"}, name="llm", modality=TEXT)
    assert second.num_parameters == num_weights({"model_type": "deepseek_v2"})
    assert module.num_parameters == num_weights({"model_type": "deepseek_v3"})
    attention = next(op for op in module.layers[1].operators if isinstance(op, Attention))
    assert (attention.head_dim, attention.value_dim, attention.num_kv_heads) == (192, 128, 128)


def test_ranks_enter_an_attention_once_with_the_hidden_state() -> None:
    """Not with the latents: what makes these is inside, on every rank."""
    block = tiny_models.llm(MODEL).layers[1]
    messages = placed_messages(block, Work((RowWork(TOKENS, TOKENS, TOKENS),)), Grid(tp=2), 8)
    hidden = TOKENS * MODEL["hidden_size"] * 8
    assert [num_bytes for _, num_bytes in messages.backward] == [hidden] * 2
    assert [num_bytes for _, num_bytes in messages.forward] == [hidden] * 2
    names = [block.operators[index].name for index, _ in messages.backward]
    assert names == ["q_down_proj", "mlp.gate"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, .* got 5; nearest: 6"),
        ({"v_head_dim": 13}, r"v_head_dim must be at most .* 12 to run, got 13; nearest: 12"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads must be num_attention_heads 4, .* got 2; nearest: 4",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' depends on the longest"),
        ({"n_group": 4}, "n_group must divide 6 experts into groups of 2 or more, got 4; nearest: 1"),
    ],
)
def test_configurations_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    refused(words, lambda: check_family(tiny_models.llm(MODEL | change)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be given to run; nearest: 6"),
        ({"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, got 'noaux_tc'"),
        ({"n_group": 4}, "n_group must divide 6 experts into groups of 1 or more, got 4; nearest: 1"),
        ({"hidden_size": 30}, "hidden width 30 must divide by 4 heads to run"),
    ],
)
def test_configurations_of_the_second_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    refused(words, lambda: check_family(tiny_models.llm(V2 | change)))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3), (2, 2)])
def test_a_router_of_shares_chooses_as_transformers_does(groups: tuple[int, int]) -> None:
    """Bit by bit in float32."""
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=groups[0],
        topk_group=groups[1],
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.5,
    )
    theirs = deepseek_v2.DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    x_TD = torch.randn(200, 32)
    ours, expected = GroupedRouter(theirs)(x_TD), theirs(x_TD)
    assert torch.equal(ours[0], expected[0])
    order, their_order = ours[2].argsort(dim=-1), expected[2].argsort(dim=-1)
    assert torch.equal(ours[2].gather(1, order), expected[2].gather(1, their_order))
    assert torch.equal(ours[1].gather(1, order), expected[1].gather(1, their_order))


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    plan = moe_plan(config=MODEL | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4})
    odd = replace(plan, stages=(replace(plan.stages[0], ranks=((0, 1),)),))
    refused("tp must divide the 3 key/value heads of llm.block.0, got tp = 2", lambda: check(odd))


@pytest.mark.parametrize(("change", "q_rank"), [({}, MODEL["q_lora_rank"]), ({"q_lora_rank": None}, 0)])
def test_exports_read_the_sizes_of_latents(change: dict[str, object], q_rank: int) -> None:
    latent = decoder_of(tiny_models.llm(MODEL | change | {"first_k_dense_replace": 0})).latent
    assert latent is not None
    sizes = (latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert (latent.q_rank, *sizes) == (q_rank, *(MODEL[key] for key in keys))


@pytest.mark.parametrize("dense", [0, 3])
def test_first_blocks_keep_their_mlp(dense: int) -> None:
    module = tiny_models.llm(MODEL | {"first_k_dense_replace": dense})
    adapter = adapter_of(module)
    built = [sum(weight.numel() for weight in adapter.build(i).parameters()) for i in range(5)]
    assert built == [layer.num_parameters for layer in module.layers]
