"""Encoders whose images and clips are shared by several ranks: the step is that of one process."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.world.pool import Pool
from tests.plans import cluster, disjoint_plan
from tests.test_context_parallel_step import DISTRIBUTIONS
from tests.test_parity import MIXES, assert_parity, assert_same, execute, mixed
from tests.tiny_models import CLIP, SIGLIP, WHISPER, WIDTH, encoder, llm
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.projector import ProjectorStep
from workbench.plan.build import with_programs
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.token_shards import Scope, token_shards
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.timing.accept import accept

Cut = tuple[int, Sequence[int]]  # ranks of every stage, and its stages' numbers of layers


def shared(model: ModelGraph, batch: Sequence[Sample], cuts: dict[str, Cut]) -> Plan:
    """Every stage on ranks of its own; an LLM microbatch per sample, a row per item."""
    grids = {name: (cp, 1) for name, (cp, _) in cuts.items()}
    return disjoint_plan(model, batch, {name: counts for name, (_, counts) in cuts.items()}, grids=grids)


BOTH: dict[str, Cut] = {"vision": (2, (2, 3)), "audio": (2, (4,)), "llm": (1, (6,))}


@pytest.mark.parametrize("mix", MIXES)
def test_encoders_alone(mix: str, pool: Pool) -> None:
    assert_same(shared(mixed(mix), tiny_batch(), BOTH), pool)


@pytest.mark.parametrize("mix", ["projectors-and-llm", "everything"])
def test_everything_on_two_ranks_each(mix: str, pool: Pool) -> None:
    cuts: dict[str, Cut] = {"vision": (2, (5,)), "audio": (2, (4,)), "llm": (2, (3, 3))}
    assert_same(shared(mixed(mix), tiny_batch(), cuts), pool)


def test_four_ranks_of_an_encoder(pool: Pool) -> None:
    cuts: dict[str, Cut] = {"vision": (4, (5,)), "audio": (1, (4,)), "llm": (1, (6,))}
    assert_same(shared(mixed("everything"), tiny_batch(), cuts), pool)


def test_an_image_smaller_than_the_group(pool: Pool) -> None:
    """One token for three ranks: two hold padding, and the pass still goes through all of them."""
    text = Segment("text", 0, 4, 4)
    batch = (Sample(0, (text, Segment("audio", 0, 1, 1))), Sample(1, (Segment("audio", 0, 3, 3), text)))
    cuts: dict[str, Cut] = {"vision": (1, (5,)), "audio": (3, (2, 2)), "llm": (1, (6,))}
    assert_same(shared(mixed("everything"), batch, cuts), pool)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_owners_and_packed_items(distribution: str, pool: Pool) -> None:
    """Several images in one row, split into blocks that end inside them."""
    plan = shared(mixed("everything"), tiny_batch((2, 3, 0, 1), (2, 0, 1, 2)), BOTH)
    packed = tuple(m if m.module == "llm" else replace(m, rows=(tuple(m.items),)) for m in plan.microbatches)
    plan = with_programs(replace(plan, microbatches=packed, programs=()))
    shards = tuple(
        shard
        for module in ("vision", "audio")
        for shard in token_shards(plan, module, DISTRIBUTIONS[distribution], block_tokens=2, scope=Scope.ROW)
    )
    assert_same(replace(plan, token_shards=shards), pool)


def images(vision: Module, tokens_in: int, tokens_out: Sequence[int]) -> tuple[ModelGraph, list[Sample]]:
    """One image per sample, shrunk to so many tokens."""
    text = Segment("text", 0, 5, 5)
    batch = [Sample(i, (Segment("vision", 0, tokens_in, n), text)) for i, n in enumerate(tokens_out)]
    return connect("images", (vision, llm())), batch


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize(
    ("config", "tokens_in", "tokens_out"),
    [
        pytest.param(SIGLIP, 12, (12, 4, 6), id="pooled"),
        pytest.param(CLIP, 13, (12, 4, 6), id="class-token"),
        pytest.param(SIGLIP, 16, (2, 8, 1), id="runs-across-borders"),
    ],
)
def test_tokens_shrink_whoever_holds_them(
    config: dict[str, object], tokens_in: int, tokens_out: Sequence[int], cp: int, pool: Pool
) -> None:
    model, batch = images(encoder(config, "vision"), tokens_in, tokens_out)
    cuts: dict[str, Cut] = {"vision": (cp, (1, 3) if cp < 4 else (4,)), "llm": (1, (4,))}
    plan = shared(model, batch, cuts)
    assert_same(plan, pool)
    odd = token_shards(plan, "vision", DISTRIBUTIONS["random"], block_tokens=1, scope=Scope.ROW)
    assert_same(replace(plan, token_shards=odd), pool)


def assert_heard(audio: Module, batch: Sequence[Sample], cp: int, pool: Pool) -> None:
    """Whoever holds which tokens."""
    plan = shared(connect("heard", (audio, llm())), batch, {"audio": (cp, (2, 2)), "llm": (1, (4,))})
    odd = token_shards(plan, "audio", DISTRIBUTIONS["random"], block_tokens=1, scope=Scope.ROW)
    assert_same(replace(plan, token_shards=odd), pool)


@pytest.mark.parametrize("cp", [2, 3])
def test_an_odd_token_of_a_window_is_left_out_whoever_holds_it(cp: int, pool: Pool) -> None:
    config = WHISPER | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 10}
    text, audio = Segment("text", 0, 5, 5), encoder(config, "audio")
    batch = [Sample(0, (Segment("audio", 0, 10, 5), Segment("audio", 1, 7, 3), text))]
    batch.append(Sample(1, (Segment("audio", 0, 5, 2), text)))
    assert_heard(audio, batch, cp, pool)


@pytest.mark.parametrize("cp", [2, 3])
def test_chunks_of_clips_are_cut_anywhere(cp: int, pool: Pool) -> None:
    """Qwen3-Omni's: 13 tokens of a whole chunk, fewer of a clip's last one."""
    config = WHISPER | {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "max_source_positions": 13,
        "downsample_hidden_size": 6,
    }
    text, audio = Segment("text", 0, 5, 5), encoder(config, "audio")
    batch = [Sample(0, (Segment("audio", 0, 17, 17), text)), Sample(1, (Segment("audio", 0, 26, 26), text))]
    assert_heard(audio, batch, cp, pool)


@pytest.mark.parametrize("cp", [2, 3])
def test_a_projector_of_steps_without_a_merge_takes_the_tokens_that_a_rank_holds(cp: int, pool: Pool) -> None:
    steps = (ProjectorStep(linear=16), ProjectorStep(act="gelu"), ProjectorStep(linear_out=True))
    vision = module_from_config(SIGLIP, name="vision", modality="vision", projector=steps, llm_width=WIDTH)
    model, batch = images(vision, 9, (9, 9))
    plan = shared(model, batch, {"vision": (cp, (2, 2)), "llm": (1, (4,))})
    assert_same(plan, pool)


def test_recompute_and_float32(pool: Pool) -> None:
    plan = shared(mixed("everything"), tiny_batch(), BOTH)
    modules = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    settings = Settings(precision=Precision.FLOAT32, modules=modules)
    assert_same(replace(plan, settings=settings), pool)
    assert_same(plan, pool, Precision.FLOAT32)


STRATEGIES = {
    "cornstarch": cornstarch.plan,
    "encoders-colocated": encoders_colocated.plan,
    "encoders-replicated": encoders_replicated.plan,
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_with_shared_encoders(name: str, pool: Pool) -> None:
    """Also encoders-replicated, whose copies stand on the language model's ranks."""
    layouts = tuple(
        ModuleLayout(module=module, pp=pp, cp=2) for module, pp in (("vision", 1), ("audio", 1), ("llm", 2))
    )
    job = Job(
        name="cp",
        model=mixed("projectors-and-llm"),
        cluster=cluster(8),
        batch=tiny_batch(),
        microbatch_samples=2,
        layouts=layouts,
        settings=Settings(precision=Precision.FLOAT32),
        profile="A40",
    )
    plan = STRATEGIES[name](job, CostModel(load_profile("A40")))
    assert {stage.cp for stage in plan.stages} == {2}
    accept(plan)
    result, reference = execute(plan, pool)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def test_squares_of_patches_that_ranks_share_become_one(pool: Pool) -> None:
    """They do not stand one after the other: each rank asks for those that its outputs are made of."""
    steps = (ProjectorStep(merge=4), ProjectorStep(linear_out=True))
    config = SIGLIP | {"image_size": 16}
    vision = module_from_config(config, name="vision", modality="vision", projector=steps, llm_width=WIDTH)
    model, batch = images(vision, 16, (4, 4))
    plan = shared(model, batch, {"vision": (2, (2, 2)), "llm": (1, (4,))})
    odd = token_shards(plan, "vision", DISTRIBUTIONS["random"], block_tokens=1, scope=Scope.ROW)
    assert_same(plan, pool)
    assert_same(replace(plan, token_shards=odd), pool)
