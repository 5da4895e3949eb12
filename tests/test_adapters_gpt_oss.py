"""gpt-oss as a whole: sinks, experts with biases, checkpoints, layouts; published sizes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from runtime.models import attention, attention_mask
from runtime.models.attention import pack, packed_sdpa
from runtime.models.choose import adapter_of
from runtime.models.gpt_oss import ClampedExperts
from runtime.models.grouped import Groups
from runtime.world.pool import Pool
from tests import tiny_models
from tests.interpreter import INTERPRETED
from tests.language_models import assert_read_by_transformers, model_of, num_weights
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_trains_checkpoint
from workbench.model.checkpoint import check_weights
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind

F64 = torch.float64
TINY: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "swiglu_limit": 0.05,
    "pad_token_id": None,
}
SEED = 3


def saved(folder: Path) -> transformers.PreTrainedModel:
    """transformers' model with large sinks and biases, as a checkpoint of the module `llm`."""
    torch.manual_seed(7)
    model = model_of(TINY).double()
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder / "llm")
    return model


SHARDED = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, recompute=Recompute.FULL)
DIVIDED = ModuleSettings(module="llm", sequence_parallel=True)


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"tp": 2, "pp": 2}, ModuleSettings(module="llm", recompute=Recompute.FULL)),
        ({"tp": 2, "dp": 2}, DIVIDED),
        ({"cp": 2, "ep": 2}, ModuleSettings(module="llm")),
        ({"tp": 2, "cp": 2, "ep": 4}, DIVIDED),
        ({"tp": 2, "dp": 2}, SHARDED),
        ({"cp": 2, "ep": 2, "dp": 2}, SHARDED),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_layouts_train_a_checkpoint_as_one_process(
    degrees: dict[str, int], settings: ModuleSettings, tmp_path: Path, pool: Pool
) -> None:
    """With biases of experts and sinks that are not zero, and activations at their limits."""
    saved(tmp_path)
    plan = moe_plan(**degrees, config=TINY, modules=(settings,))
    assert_trains_checkpoint(plan, tmp_path, pool, seed=SEED)


def test_a_split_backward(tmp_path: Path, pool: Pool) -> None:
    saved(tmp_path)
    plan = moe_plan(pp=2, config=TINY)
    split = with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1))
    assert any(action.kind is Pass.W for action in split.program_actions)
    assert_trains_checkpoint(split, tmp_path, pool, seed=SEED)


def test_an_export_is_what_transformers_reads(tmp_path: Path) -> None:
    """Its tensors, bit by bit, behind a reading of them."""
    assert_read_by_transformers(saved(tmp_path / "in"), moe_plan(config=TINY), tmp_path)


def test_quantized_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    """As gpt-oss is published; its configuration can be planned."""
    saved(tmp_path)
    check_weights(tmp_path, ["llm"])
    file = tmp_path / "llm" / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"llm: they are quantized \(mxfp4\), and training wants plain ones"):
        check_weights(tmp_path, ["llm"])
    planned = module_from_config(config, name="llm", modality=TEXT)
    assert planned.layers == tiny_models.llm(TINY).layers
    assert adapter_of(planned).num_blocks == TINY["num_hidden_layers"]


@pytest.mark.parametrize(("blocks", "num_experts"), [(24, 32), (36, 128)])
def test_published_sizes_are_counted_as_transformers_builds_them(blocks: int, num_experts: int) -> None:
    """gpt-oss-20b and gpt-oss-120b, with sliding windows in every other block."""
    config = {"model_type": "gpt_oss", "num_hidden_layers": blocks, "num_local_experts": num_experts}
    module = module_from_config(config, name="llm", modality=TEXT)
    assert module.num_parameters == num_weights(config)
    attentions = [op for layer in module.layers for op in layer.operators if isinstance(op, Attention)]
    assert [each.window for each in attentions] == [128, None] * (blocks // 2)
    assert all(each.has_sinks for each in attentions)


def attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """Of items of 5, 6 and 5 tokens."""
    packing = pack((5, 6, 5), "cpu")
    y, _ = packed_sdpa(nn.Identity(), q, k, v, packing, is_causal=True, sliding_window=window, s_aux=sinks)
    return y


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_a_further_key_without_a_value(window: int | None) -> None:
    """With a key of its own in front of every item that all its tokens see: outputs and gradients."""
    torch.manual_seed(0)
    shapes = ((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8), (4,))
    q, k, v, sinks = leaves = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
    ours = attended(q, k, v, sinks, window)
    outputs = []
    for rows in (slice(0, 5), slice(5, 11), slice(11, 16)):
        back = torch.arange(rows.stop - rows.start)[:, None] - torch.arange(rows.stop - rows.start)
        seen = (back >= 0) & (back < (window or 9))
        scores = q[0, :, rows] @ k[0, :, rows].repeat_interleave(2, 0).mT / 8**0.5
        scores = torch.cat(
            [scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(4, len(back), 1)], -1
        )
        outputs.append(scores.softmax(-1)[..., :-1] @ v[0, :, rows].repeat_interleave(2, 0))
    theirs = torch.cat(outputs, 1).transpose(0, 1)[None]
    dy = torch.randn_like(theirs)
    for mine, other in zip(
        (ours, *torch.autograd.grad(ours, leaves, dy)),
        (theirs, *torch.autograd.grad(theirs, leaves, dy)),
        strict=True,
    ):
        assert (mine - other).norm() <= 1e-13 * other.norm()


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_far_below_all_scores_changes_nothing(window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 16, 8, dtype=F64) for heads in (4, 2, 2))
    plain = attended(q, k, v, None, window)
    sunk = attended(q, k, v, torch.full((4,), -50.0, dtype=F64), window)
    assert (sunk - plain).norm() <= 1e-13 * plain.norm()


def test_bfloat16_rounds_no_more_than_transformers_does() -> None:
    """Error against float64 at most twice that of transformers' own attention in the same type."""
    torch.manual_seed(0)
    shapes = ((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8), (4,))
    exact = [torch.randn(shape, dtype=torch.bfloat16).double() for shape in shapes]
    narrow = [x.bfloat16() for x in exact]
    packing, hidden = pack((16,), "cpu"), torch.full((16, 16), -torch.inf).triu(1)
    truth, ours = (
        packed_sdpa(nn.Identity(), *x[:3], packing, is_causal=True, s_aux=x[3])[0] for x in (exact, narrow)
    )
    layer = SimpleNamespace(num_key_value_groups=2, sinks=narrow[3], training=False)
    theirs, _ = gpt_oss.eager_attention_forward(layer, *narrow[:3], hidden.bfloat16(), scaling=8**-0.5)
    assert ours.dtype is torch.bfloat16
    assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize("window", [None, 20])
def test_the_kernels_take_sinks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of both, where the kernels run in Triton's interpreter."""
    torch.manual_seed(0)
    shapes = ((1, 4, 80, 32), (1, 2, 80, 32), (1, 2, 80, 32), (4,))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    packing, rule = pack((48, 32), "cpu"), {"is_causal": True, "sliding_window": window}
    q, k, v, sinks = leaves
    dense, _ = packed_sdpa(nn.Identity(), q, k, v, packing, s_aux=sinks, **rule)
    for module in (attention, attention_mask):
        monkeypatch.setattr(module, "uses_kernels", lambda device: True)
    tiled, _ = packed_sdpa(nn.Identity(), q, k, v, packing, s_aux=sinks, **rule)
    dy = torch.randn_like(dense)
    expected = (dense, *torch.autograd.grad(dense, leaves, dy))
    for ours, theirs in zip((tiled, *torch.autograd.grad(tiled, leaves, dy)), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 99))
def test_experts_compute_as_transformers_does(counts: list[int], seed: int) -> None:
    """Rows of each expert on their own, where some have none."""
    torch.manual_seed(seed)
    theirs = gpt_oss.GptOssExperts(transformers.GptOssConfig(**TINY)).double()
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.3)
    x_RD = torch.randn(sum(counts), TINY["hidden_size"], dtype=F64)
    groups = Groups(torch.tensor(counts).cumsum(0, dtype=torch.int32))
    expert_R1 = torch.arange(4).repeat_interleave(torch.tensor(counts))[:, None]
    expected = theirs(x_RD, expert_R1, torch.ones_like(expert_R1, dtype=F64))
    ours = ClampedExperts(theirs)(x_RD, groups)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
