"""Features of several blocks of a tower enter several layers of the LLM, as Qwen3-VL's do (DeepStack)."""

from dataclasses import replace

import pytest

from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.test_parity import assert_same
from tests.test_tensor_parallel import sequence_parallel
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, Edge, ModelGraph, Module, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction
from workbench.plan.plan import ModuleSettings, Plan, Recompute

WIDTH, INSIDE, MERGED = 48, 24, 4  # of the LLM and the tower; patches that become one token
VISION = {
    "model_type": "qwen3_vl_vision",
    "depth": 3,
    "hidden_size": INSIDE,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
LANGUAGE = {
    "model_type": "qwen3_vl_text",
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
}


def tower(**changes: object) -> Module:
    return module_from_config(VISION | changes, name="vision", modality="image", llm_width=WIDTH)


def language() -> Module:
    return module_from_config(LANGUAGE, name="llm", modality=TEXT)


def model(vision: Trainable = Trainable.ALL, llm: Trainable = Trainable.ALL) -> ModelGraph:
    return connect("stacked", (with_trainable(tower(), vision), with_trainable(language(), llm)))


def batch() -> tuple[Sample, ...]:
    """Images of two sizes, two in one sample, and text alone."""
    words = (Segment(TEXT, 0, 5, 5), Segment(TEXT, 1, 6, 6))
    small, wide = Segment("image", 0, 16, 4), Segment("image", 1, 24, 6)
    return (
        Sample(0, (words[0], small, words[1])),
        Sample(1, (words[0], small, wide, words[1])),
        Sample(2, words),
    )


DEEP = {"vision": (2, 1, 2), "llm": (2, 1, 3)}  # both are cut between features


def plan_of(graph: ModelGraph | None = None, **layout: object) -> Plan:
    return disjoint_plan(graph or model(), batch(), **{"cuts": DEEP, **layout})  # type: ignore[arg-type]


def test_what_enters_where() -> None:
    graph = model()
    (edge,) = graph.edges
    assert edge.entered == (0, 2, 3), "tokens, and what is added behind the first two blocks"
    vision = graph.module("vision")
    beside = WIDTH // MERGED
    inside = [INSIDE, INSIDE + beside, *[INSIDE + 2 * beside] * 2]
    assert [layer.out_width for layer in vision.layers] == [*inside, 3 * WIDTH]
    assert [layer.stacked for layer in vision.layers] == [1, 1, 1, 1, 3]


def test_every_stage_that_reads_a_feature_gets_all_and_gives_all_back() -> None:
    """And what travels inside the tower is as wide as its states and what stands beside them."""
    lowered = lower(plan_of())
    crossing = [row for row in lowered.transfers if row.edge == "vision>llm"]
    first = [row for row in crossing if len(row.slices) == 1 and row.num_tokens == MERGED]
    readers = {(row.consumer.stage, row.num_bytes) for row in first if row.direction is Direction.FORWARD}
    num_bytes = lowered.plan.settings.precision.num_bytes
    assert readers == {(stage, 4 * 3 * WIDTH * num_bytes) for stage in (3, 4, 5)}
    assert sum(row.direction is Direction.BACKWARD for row in crossing) == len(crossing) // 2
    inside = {row.consumer.stage: row.width for row in lowered.transfers if row.edge == "vision"}
    beside = WIDTH // MERGED
    assert inside == {0: INSIDE + beside, 1: INSIDE + 2 * beside, 2: INSIDE + 2 * beside}


def test_stages_between_features(pool: Pool) -> None:
    assert_same(plan_of(), pool)


@pytest.mark.parametrize(
    ("vision", "llm"), [(Trainable.NONE, Trainable.ALL), (Trainable.PROJECTOR, Trainable.NONE)]
)
def test_frozen_parts(vision: Trainable, llm: Trainable, pool: Pool) -> None:
    assert_same(plan_of(model(vision, llm)), pool)


def test_two_replicas(pool: Pool) -> None:
    samples = (*batch(), Sample(3, batch()[0].segments))
    assert_same(disjoint_plan(model(), samples, {"vision": (5,), "llm": (3, 3)}, replicas=2), pool)


@pytest.mark.parametrize("divides", [False, True], ids=["whole", "tokens divided"])
def test_tensor_parallel(divides: bool, pool: Pool) -> None:
    grids = {"vision": (1, 2), "llm": (1, 2)}
    plan = plan_of(cuts={"vision": (5,), "llm": (6,)}, grids=grids)
    assert_same(sequence_parallel(plan) if divides else plan, pool)


def test_context_parallel_language_model(pool: Pool) -> None:
    assert_same(plan_of(cuts={"vision": (5,), "llm": (2, 4)}, grids={"llm": (2, 1)}), pool)


def test_recomputed(pool: Pool) -> None:
    settings = [ModuleSettings(module=name, recompute=Recompute.FULL) for name in ("vision", "llm")]
    plan = plan_of(cuts={"vision": (2, 3), "llm": (6,)})
    assert_same(replace(plan, settings=replace(plan.settings, modules=tuple(settings))), pool)


def test_refusals() -> None:
    (edge,) = model().edges
    with pytest.raises(ValueError, match=r"3 features are stacked in it, want as many layers .* got \[0\]"):
        replace(model(), edges=(replace(edge, also_before=()),))
    plain = replace(tower().layers[-1], stacked=1)
    vision = replace(tower(), layers=(*tower().layers[:-1], plain))
    with pytest.raises(ValueError, match="only cross-attention layers read one output several times"):
        ModelGraph(name="m", modules=(vision, language()), edges=(edge,))
    short = replace(language(), layers=language().layers[:3])
    with pytest.raises(ValueError, match=r"llm has layers 0\.\.2, got 3"):
        connect("m", (tower(), short))
    with pytest.raises(ValueError, match="features of width 48, want an LLM as wide, got 32"):
        module_from_config(VISION, name="v", modality="image", llm_width=32)
    with pytest.raises(ValueError, match="it has no feature_layer, got -2"):
        module_from_config(VISION, name="v", modality="image", llm_width=WIDTH, feature_layer=-2)
    with pytest.raises(ValueError, match=r"blocks 0 to 2 once each, got \[1, 3\]"):
        tower(deepstack_visual_indexes=[1, 3])
    with pytest.raises(ValueError, match="multiple of the 4 patches that merge, got 46"):
        module_from_config(VISION | {"out_hidden_size": 46}, name="v", modality="image", llm_width=46)
    with pytest.raises(ValueError, match="want stacked features that divide out_width 144, got 5"):
        replace(tower().layers[-1], stacked=5)


def test_without_features_of_blocks_it_is_a_plain_tower(pool: Pool) -> None:
    graph = connect("plain", (tower(deepstack_visual_indexes=[]), language()))
    assert graph.edges == (Edge(source="vision", target="llm", after_layer=4, before_layer=0),)
    assert_same(disjoint_plan(graph, batch(), {"vision": (2, 3), "llm": (6,)}), pool)
