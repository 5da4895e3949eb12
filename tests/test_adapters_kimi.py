"""Kimi K2.5 as a whole: gradients, ranks, sizes of images, refusals; and DeepSeek-V3 as users hand it in."""

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, owner_of
from experiments.doors.whole_sizes import KIMI_SEEN
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.glm import CORRECTION, CorrectedRouter
from runtime.models.norm import replace_parts, widen_norms
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests import paper_models, user_models
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.plans import disjoint_plan, finish
from tests.test_adapters_encoders import widen_vision_rotations
from tests.test_adapters_glm import images_and_texts
from tests.test_composites_weights import plan_of
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images
from tests.test_parity import assert_same
from tests.user_models import VISION as VISION_ID
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.plan.plan import ModuleSettings
from workbench.plan.runnable import check_family
from workbench.plan.stage import Stage

torch.set_num_threads(1)
F64 = torch.float64
NAMES = ("kimi_k25", "kimi_k25, tied")


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, pool: Pool) -> None:
    """Of every weight, the tower's and the language model's, on a stage each and two."""
    ours, theirs = gradients_of_both(name, plan_of(name), tmp_path / "whole", pool)
    assert ours.keys() - theirs.keys() <= {"lm_head.weight"}  # where it is the table
    assert theirs.keys() <= ours.keys()
    assert_same_gradients(ours, theirs, theirs)


def whole() -> ModelGraph:
    modules = modules_of(dict(take_apart(CONFIGS["kimi_k25"]).modules))
    return connect("whole", (modules[VISION], modules[LLM]))


def cuts_of(graph: ModelGraph) -> dict[str, tuple[int, int]]:
    return {module.name: (2, len(module.layers) - 2) for module in graph.modules}


def test_two_ranks_of_a_tower_and_of_a_language_model_split_tokens(pool: Pool) -> None:
    graph = whole()
    tower = len(graph.modules[0].layers)
    divided = tuple(ModuleSettings(module=module.name, sequence_parallel=True) for module in graph.modules)
    cuts = {VISION: (tower,), LLM: cuts_of(graph)[LLM]}
    plan = disjoint_plan(graph, images_and_texts(), cuts, grids={VISION: (1, 2), LLM: (1, 2)})
    assert_same(replace(plan, settings=replace(plan.settings, modules=divided)), pool)


def test_context_parallel_replicas_and_stages(pool: Pool) -> None:
    graph = whole()
    assert_same(disjoint_plan(graph, images_and_texts(), cuts_of(graph), grids={LLM: (2, 1)}), pool)
    assert_same(disjoint_plan(graph, images_and_texts()[:2], cuts_of(graph), replicas=2), pool)


def test_experts_over_two_ranks_behind_a_tower(pool: Pool) -> None:
    graph = whole()
    stages = [
        Stage(id=i, module=module.name, replica=0, layers=(0, len(module.layers)), ranks=ranks, ep=ep)
        for i, (module, ranks, ep) in enumerate(zip(graph.modules, (((0,),), ((1, 2),)), (1, 2), strict=True))
    ]
    assert_same(finish(graph, images_and_texts(), stages), pool)


def test_full_sizes_are_counted_as_transformers_builds_them() -> None:
    config = transformers.AutoConfig.for_model("kimi_k25")
    parts = take_apart(config.to_dict())
    with torch.device("meta"):
        model = transformers.Kimi_K25ForConditionalGeneration(config)
    modules = modules_of(dict(parts.modules))
    sizes = dict.fromkeys(modules, 0)
    for name, weight in model.named_parameters():
        sizes[owner_of(parts, name)] += weight.numel()
    assert sizes == {name: module.num_parameters for name, module in modules.items()}


@cache
def transformers_resize() -> Callable[..., Any]:
    """Its rule alone: its module wants torchvision."""
    spec = find_spec("transformers.models.kimi_k25")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name("image_processing_kimi_k25.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    rule = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "navit_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(rule, []), path, "exec"), names)
    resize: Callable[..., Any] = names["navit_resize"]
    return resize


@cache
def limited(limits: tuple[tuple[str, int], ...]) -> Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1} | dict(limits)
    part = take_apart({"model_type": "kimi_k25", "vision_config": sizes, "projection_hidden_size": 64})
    tower = part.modules[VISION]
    return module_from_config(
        tower.config, name=VISION, modality=VISION, projector=tower.projector, llm_width=8
    )


@given(
    height=st.integers(1, 9000),
    width=st.integers(1, 9000),
    limits=st.sampled_from([{}, {"max_patches": 256}, {"max_side_patches": 20}]),
)
def test_images_are_as_large_as_the_processor_makes_them(
    height: int, width: int, limits: dict[str, int]
) -> None:
    most, side = limits.get("max_patches", 16_384), limits.get("max_side_patches", 512)
    _, padded = transformers_resize()(height, width, 14, 2, most, side)
    num = padded[0] * padded[1] // 14**2
    assert image_tokens(limited(tuple(limits.items())), height, width) == (num, num // 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pos_emb_width": 5}, "pos_emb_width must be pos_emb_height 6, got 5; nearest: 6"),
        ({"num_attention_heads": 4}, "want a multiple of 4, got 6 of a head; nearest: 8"),
    ],
)
def test_towers_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "kimi_k25_vision", **KIMI_SEEN, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="v", modality=VISION, llm_width=48))


def test_other_norms_and_squares_are_refused() -> None:
    config = CONFIGS["kimi_k25"]
    with pytest.raises(ValueError, match="projection_hidden_size must be the tower's hidden_size 24, got 25"):
        take_apart(config | {"projection_hidden_size": 25})
    oblong = config["vision_config"] | {"merge_kernel_size": [2, 1]}
    with pytest.raises(ValueError, match=r"merge_kernel_size must be a whole number >= 1, got \[2, 1\]"):
        take_apart(config | {"vision_config": oblong})


def test_a_tower_does_not_share_tokens_over_ranks() -> None:
    graph = whole()
    cuts = {module.name: (len(module.layers),) for module in graph.modules}
    plan = disjoint_plan(graph, images_and_texts()[:2], cuts, grids={VISION: (2, 1)})
    with pytest.raises(
        ValueError, match="kimi_k25_vision does not share tokens over ranks; want cp 1, got 2"
    ):
        build_stage_module(plan, plan.stages[0], seed=0, dtype=F64)


def mixture() -> PreTrainedModel:
    """DeepSeek-V3, small, whose corrections change the experts that are chosen."""
    torch.manual_seed(5)
    sizes = {key: value for key, value in paper_models.DEEPSEEK.items() if key != "model_type"}
    model: PreTrainedModel = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    widen_norms(model, deepseek_v3.DeepseekV3RMSNorm)
    replace_parts(model, deepseek_v3.DeepseekV3TopkRouter, CorrectedRouter)
    for router in (each for each in model.modules() if isinstance(each, CorrectedRouter)):
        torch.nn.init.normal_(router.weight)
        router.get_buffer(CORRECTION).copy_(torch.linspace(0.6, -0.6, sizes["n_routed_experts"]))
    model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


def test_a_users_tower_and_language_model() -> None:
    """Images of any size, as they are."""
    torch.manual_seed(5)
    tower = kimi.Kimi_K25VisionModel(kimi.Kimi_K25VisionConfig(**KIMI_SEEN)).double()
    vision = {"vision": ModalityModule(tower, "mlp")}
    first, *others = images()
    given_images = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = MultimodalModule(vision, user_models.llama(), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
    model = MultimodalModule(vision, mixture(), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
