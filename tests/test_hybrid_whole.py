"""Whole models of Qwen3.5: images before linear attention, against transformers and over ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, saved
from experiments.doors.whole_sizes import TEXT
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.launch import run_local
from runtime.models.adapter import NO_TARGET
from runtime.models.norm import widen_norms
from runtime.models.patch_grid import patches_of
from runtime.run_settings import Collect, RunSettings
from runtime.state.weights_export import finish_export, start_export, write_part
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_composites_weights import tensors_of
from tests.test_hybrid import DENSE
from tests.test_multimodal import assert_parity as assert_user_parity
from tests.test_multimodal import spec_of
from tests.test_multimodal_images import QWEN, ids, images, patched
from tests.test_multimodal_images import VISION as VISION_ID
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM, VISION, name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.model.model_graph import TEXT as TEXT_MODALITY
from workbench.model.model_graph import connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.plan import Plan, Precision

F64 = torch.float64


def whole_plan(name: str, trained: Trainable, *, tp: int = 1) -> Plan:
    """A composite on two stages of each module, with images between texts."""
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    tower, image = with_trainable(modules[VISION], trained), Segment(VISION, 0, 24, 6)
    llm = modules[LLM] if trained is Trainable.ALL else with_trainable(modules[LLM], Trainable.NONE)
    batch = tuple(
        Sample(k, (Segment(TEXT_MODALITY, 0, 4, 4), image, Segment(TEXT_MODALITY, 1, n, n)))
        for k, n in enumerate((7, 66))
    )
    cuts = {VISION: (2, len(tower.layers) - 2), LLM: (2, len(llm.layers) - 2)}
    grids = {VISION: (1, tp), LLM: (1, tp)}
    return disjoint_plan(connect("whole", (tower, llm)), batch, cuts, grids=grids)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("trained", [Trainable.ALL, Trainable.PROJECTOR])
def test_a_whole_model_over_ranks(name: str, trained: Trainable, pool: Pool) -> None:
    """A frozen language model passes gradients through its rules to the tower's merger."""
    assert_same(whole_plan(name, trained), pool)
    assert_same(whole_plan(name, trained, tp=2), pool)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_loss_and_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, pool: Pool) -> None:
    """transformers is given tokens and pixels, one sample at a time."""
    model, plan = saved(name, tmp_path), whole_plan(name, Trainable.ALL)
    settings = RunSettings(
        steps=1, warmup=0, weights=tmp_path, precision=Precision.FLOAT64, collect=Collect.STATE
    )
    result = run_local(plan, settings, pool=pool)
    towers = [each for each in plan.microbatches if each.module == VISION]
    stages = {name: plan.chain[name, 0] for name in (VISION, LLM)}
    losses, count = [], 0
    for index, microbatch in enumerate(each for each in plan.microbatches if each.module == LLM):
        seen, read, head = (
            microbatch_data(plan, stage, each, SyntheticSource(settings.seed), dtype=F64)
            for stage, each in (
                (stages[VISION][0], towers[index]),
                (stages[LLM][0], microbatch),
                (stages[LLM][-1], microbatch),
            )
        )
        unused = next(token for token in range(TEXT["vocab_size"]) if token not in read.input_ids)
        model.config.image_token_id = unused
        tokens = torch.where(read.input_ids < 0, unused, read.input_ids)[None]
        grids = [[1, image.shape[1] // 4, image.shape[2] // 4] for image in seen.raw]
        logits = model(
            input_ids=tokens,
            pixel_values=torch.cat([patches_of(image, 4, 2, 2) for image in seen.raw]),
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(tokens == unused).int(),
        ).logits[0]
        losses.append(functional.cross_entropy(logits, head.labels, ignore_index=NO_TARGET, reduction="sum"))
        count += int((head.labels != NO_TARGET).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    assert result.losses[0] == pytest.approx(loss.item(), rel=1e-10)
    parts, theirs = take_apart(CONFIGS[name]).modules, dict(model.named_parameters())
    scale = torch.stack([weight.grad.norm() for weight in theirs.values()]).norm()
    compared = set()
    for state in result.states:
        for (module, key), gradient in state.gradients.items():
            whole_name = name_in_composite(parts[module], key)
            assert (gradient - theirs[whole_name].grad).norm() <= 1e-10 * scale, whole_name
            compared.add(whole_name)
    assert compared == set(theirs)


def test_users_own_models_train_as_in_one_process() -> None:
    """Images by patches and grids, positions of three axes, and a language model with linear attention."""
    tower_config = qwen3_5.Qwen3_5VisionConfig(
        **QWEN, hidden_size=32, intermediate_size=40, out_hidden_size=TEXT["hidden_size"]
    )
    torch.manual_seed(5)
    tower = qwen3_5.Qwen3_5VisionModel(tower_config).double()
    llm = qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**{**DENSE, "vocab_size": 64}))
    widen_norms(llm, qwen3_5.Qwen3_5RMSNorm, 1.0)
    vision = ModalityModule(tower, "merger")
    model = MultimodalModule({"vision": vision}, llm.double(), token_ids={"vision": VISION_ID})
    batch = {"input_ids": ids(), **patched(images())}
    assert_user_parity(model, spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)


def test_a_head_that_predicts_several_tokens_is_kept_in_files(tmp_path: Path) -> None:
    """transformers does not build it; an export copies it."""
    origin, target = tmp_path / "whole", tmp_path / "again"
    saved("qwen3_5", origin)
    more = {"mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 3)}
    save_file(tensors_of(origin) | more, origin / "model.safetensors", metadata={"format": "pt"})
    plan = whole_plan("qwen3_5", Trainable.ALL)
    start_export(target, plan.model)
    for stage in plan.stages:
        module = build_stage_module(plan, stage, seed=0, dtype=F64, weights=origin)
        write_part(target, stage.module, stage.layers[0], module.owned_weights())
    finish_export(target, plan.model, origin)
    after = tensors_of(target)
    assert after.keys() == tensors_of(origin).keys()
    assert all(torch.equal(weight, after[name]) for name, weight in tensors_of(origin).items())
