"""GLM's models as wholes: gradients, routers, layouts, refusals; published sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_features import qwen_features
from experiments.doors.whole_models import modules_of, saved
from experiments.doors.whole_sizes import GLM_EXPERTS, GLM_TEXT
from runtime.launch import run_local
from runtime.models.choose import adapter_of
from runtime.models.glm import CORRECTION, CorrectedRouter
from runtime.models.norm import widen_norms
from runtime.models.weights import weights_of
from runtime.run_settings import RunSettings
from runtime.state.checkpoint import Begin, checkpoints_in
from runtime.state.checkpoint_files import identity_of
from runtime.step.stage_module import StageInput
from runtime.world.pool import Pool
from tests import tiny_models
from tests.encoder_cases import CASES, module_of, samples_of, widen_vision_rotations
from tests.test_adapters import build, relative
from tests.test_composites_weights import plan_of, tensors_of
from tests.test_expert_parallel import moe_plan
from tests.test_parity import assert_same
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import video_of
from workbench.model.model_graph import TEXT
from workbench.plan.plan import ModuleSettings, Precision
from workbench.plan.runnable import check_family

F64 = torch.float64
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
MOE = tiny_models.LLAMA | EXPERTS | {"model_type": "glm4_moe", "num_hidden_layers": 3, "head_dim": 8}


def test_the_tower_of_glm_45v_is_that_of_glm_41v(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers' own classes for it, and biases of queries, keys and values."""
    widen_vision_rotations(monkeypatch)
    case = CASES["glm-4v"]
    config = case.config | {"model_type": "glm4v_moe_vision", "attention_bias": True}
    case = case._replace(config=config)
    ours, _, data = build(module_of(case), F64, *samples_of(case, "vision"))
    theirs = glm4v_moe.Glm4vMoeVisionModel(glm4v_moe.Glm4vMoeVisionConfig.from_dict(config)).double()
    widen_norms(theirs, glm4v_moe.Glm4vMoeRMSNorm)
    theirs.double().load_state_dict({key: value.detach() for key, value in ours.named_weights()})
    expected = torch.cat([qwen_features(theirs, image) for image in data.raw])
    assert relative(ours(StageInput(None, data)), expected) <= 1e-10


@pytest.mark.parametrize("sums_to_one", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 4), (2, 1)])
def test_a_router_chooses_as_transformers_does(groups: tuple[int, int], sums_to_one: bool) -> None:
    """Bit by bit in float32, with a correction that changes what is chosen."""
    torch.manual_seed(0)
    config = glm4_moe.Glm4MoeConfig(
        hidden_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=sums_to_one,
        routed_scaling_factor=2.5,
    )
    theirs = glm4_moe.Glm4MoeTopkRouter(config)
    nn.init.normal_(theirs.weight)
    ours, x_TD = CorrectedRouter(theirs), torch.randn(200, 16)
    plain = theirs(x_TD)[2].sort(dim=-1).values
    for router in (ours, theirs):
        router.get_buffer(CORRECTION).copy_(torch.linspace(-0.3, 0.3, 8))
    (logits, shares, experts), expected = ours(x_TD), theirs(x_TD)
    assert torch.equal(logits, expected[0])
    order, their_order = experts.argsort(dim=-1), expected[2].argsort(dim=-1)
    assert torch.equal(experts.gather(1, order), expected[2].gather(1, their_order))
    torch.testing.assert_close(shares.gather(1, order), expected[1].gather(1, their_order), rtol=1e-6, atol=0)
    assert not torch.equal(experts.gather(1, order), plain), "the correction changes nothing"


def corrections_of(folder: Path) -> dict[str, Tensor]:
    return {key: each for key, each in tensors_of(folder).items() if key.endswith(CORRECTION)}


def test_corrections_stay_in_float32_and_are_written_as_they_were(tmp_path: Path, pool: Pool) -> None:
    """Trained in bfloat16, whose steps are wider than differences of corrections."""
    saved("glm4v_moe", tmp_path / "whole")
    settings = RunSettings(
        steps=2,
        warmup=0,
        weights=tmp_path / "whole",
        export=tmp_path / "again",
        precision=Precision.BFLOAT16,
    )
    run_local(plan_of("glm4v_moe"), settings, pool=pool)
    before, after = corrections_of(tmp_path / "whole"), corrections_of(tmp_path / "again")
    assert len(before) == 2
    assert all(each.dtype == torch.float32 and each.any() for each in before.values())
    assert all(torch.equal(each, after[key]) for key, each in before.items())
    assert tensors_of(tmp_path / "again")["lm_head.weight"].dtype == torch.bfloat16


def test_a_resumed_run_has_the_corrections_without_the_weights(tmp_path: Path, pool: Pool) -> None:
    saved("glm4v_moe", tmp_path / "whole")
    plan = plan_of("glm4v_moe")
    identity = identity_of(plan, F64, 0)

    def losses(steps: int, weights: Path | None, begin: Begin) -> tuple[float, ...]:
        checkpoints = checkpoints_in(tmp_path / "checkpoints", 1, begin, identity)
        settings = RunSettings(
            steps=steps, warmup=0, weights=weights, precision=Precision.FLOAT64, checkpoints=checkpoints
        )
        return tuple(run_local(plan, settings, pool=pool).losses)

    first = losses(1, tmp_path / "whole", Begin.ANEW)
    resumed = losses(2, None, Begin.LATEST)
    whole = RunSettings(steps=2, warmup=0, weights=tmp_path / "whole", precision=Precision.FLOAT64)
    assert first == resumed[:1]
    assert resumed == tuple(run_local(plan, whole, pool=pool).losses)


def test_a_block_that_predicts_further_tokens_is_copied(tmp_path: Path, pool: Pool) -> None:
    """Of a whole model's checkpoint; it has as many blocks as the configuration says, and one more."""
    origin, target = tmp_path / "whole", tmp_path / "again"
    saved("glm4v_moe", origin)
    (file,) = origin.glob("*.safetensors")
    ahead = {"model.language_model.layers.3.eh_proj.weight": torch.randn(4, 8)}
    save_file(tensors_of(origin) | ahead, file, metadata={"format": "pt"})
    settings = RunSettings(steps=1, warmup=0, weights=origin, export=target, precision=Precision.FLOAT64)
    run_local(plan_of("glm4v_moe"), settings, pool=pool)
    after = tensors_of(target)
    assert after.keys() == tensors_of(origin).keys()
    assert all(torch.equal(after[name], each) for name, each in ahead.items())
    further = {"model.language_model.layers.4.eh_proj.weight": torch.randn(4, 8)}
    save_file(tensors_of(origin) | further, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors model\.language_model\.layers\.4\.eh_proj"):
        weights_of(origin, adapter_of(plan_of("glm4v_moe").model.module(LLM)))


@pytest.mark.parametrize(
    "degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str
)
def test_experts_of_a_text_model_on_several_ranks(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees, config=MOE), pool)
    divided = (ModuleSettings(module="llm", sequence_parallel=True),)
    if "tp" in degrees:
        assert_same(moe_plan(**degrees, config=MOE, modules=divided), pool)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}}, "add up to 6, half of a"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"add up to 3, half of a head's rotated part"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' depends on the longest"),
        ({"head_dim": 16}, "head_dim must be 12, hidden_size over num_attention_heads, got 16; nearest: 12"),
    ],
)
def test_rotations_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "glm4v_text", **GLM_TEXT, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="llm", modality=TEXT))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 4}, "n_group must divide 6 experts into groups of 2 or more, got 4; nearest: 1"),
        ({"n_group": 6}, "n_group must divide 6 experts into groups of 2 or more, got 6; nearest: 1"),
        ({"topk_group": 1}, "so many groups have the 3 experts of a token, got 1; nearest: 3"),
        ({"topk_group": 4}, "topk_group must be at most n_group 3"),
    ],
)
def test_groups_of_experts_without_enough_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "glm4v_moe_text", **GLM_TEXT, **GLM_EXPERTS, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="llm", modality=TEXT))


def test_first_blocks_keep_their_mlp() -> None:
    """As many as the configuration says, none if it says 0."""
    for dense in (0, 1, 2):
        module = tiny_models.llm(MOE | {"first_k_dense_replace": dense})
        adapter = adapter_of(module)
        built = [sum(weight.numel() for weight in adapter.build(i).parameters()) for i in range(5)]
        assert built == [layer.num_parameters for layer in module.layers]
        kinds = [any(op.name == "mlp.router" for op in layer.operators) for layer in module.layers[1:-1]]
        assert kinds == [index >= dense for index in range(3)]


def test_what_a_tower_cannot_do_is_refused_in_one_line() -> None:
    tower = modules_of(dict(take_apart(CONFIGS["glm4v"]).modules))[VISION]
    with pytest.raises(ValueError, match="module 'vision': no rule says which frames of a video it sees"):
        video_of(tower, 64, 64, 2.0)
    config = take_apart(CONFIGS["glm4v"]).modules[VISION].config
    with pytest.raises(ValueError, match="gives features of width 48, want an LLM as wide, got 32"):
        module_from_config(config, name=VISION, modality=VISION, llm_width=32)
    other = {**CONFIGS["glm46v"], "text_config": {"model_type": "llama"}}
    with pytest.raises(ValueError, match=r"text_config\.model_type must be glm4v_text or glm4v_moe_text"):
        take_apart(other)
