"""Images of several tiles, put together as LLaVA-NeXT and LLaVA-OneVision do: tokens, losses, gradients."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import ID_KEYS, IMAGE, known_keys, modules_of, whole_model
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.emulation.emulate import emulate
from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from tests.command_line import accept
from tests.examples import examples
from tests.plans import disjoint_plan
from tests.split_programs import split, weights_last
from tests.test_parity import assert_same
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.data.corpus import ItemTokens, Tiled, sample_of
from workbench.data.sample import Sample, Segment
from workbench.explain.sensitivity import sensitivities
from workbench.export.mimo_limits import lacking
from workbench.job.sample_sizes import sized_batch
from workbench.masks.tiles import area
from workbench.model.composites.composite import LLM, Parts, name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.projector import ProjectorStep
from workbench.plan.build import with_programs
from workbench.plan.codec import dumps, loads
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.plan.runnable import check_runnable
from workbench.plan.runnable_items import check_segment
from workbench.plan.work import row_mask, work_of

F64 = torch.float64
SIDE_PX, ALONG = 16, 4  # of a tile: pixels, features
GRIDS = {
    "llava_next": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
    "llava_onevision": [[16 * rows, 16 * columns] for rows in range(1, 7) for columns in range(1, 7)],
}
PROCESSORS = {"llava_next": LlavaNextProcessor, "llava_onevision": LlavaOnevisionProcessor}
SIZES = {  # (height, width) in px
    "landscape": ((20, 31),),
    "portrait": ((40, 17),),
    "square": ((32, 32),),
    "very tall": ((60, 9),),
    "very wide": ((5, 60),),
    "padded either way": ((30, 21), (21, 30)),
    "beyond nine tiles": ((96, 90),),
    "beyond nine tiles, and two more": ((70, 96), (12, 60), (16, 16)),
}


def config_of(kind: str) -> dict[str, Any]:
    ids = {key: IMAGE for key in ID_KEYS if key in known_keys(kind)}
    return {**CONFIGS[kind], **ids, "image_grid_pinpoints": GRIDS[kind]}


@cache
def parts_of(kind: str) -> Parts:
    return take_apart(config_of(kind))


@cache
def graph_of(kind: str) -> ModelGraph:
    made = modules_of(dict(parts_of(kind).modules))
    return connect(kind, [made["vision"], made[LLM]])


def vision(kind: str) -> Module:
    return graph_of(kind).module("vision")


def said_sample(kind: str, sizes: tuple[tuple[int, int], ...]) -> Sample:
    items = [("vision", image_tokens(vision(kind), *size)) for size in sizes]
    return sample_of(0, [3, *([4] * (len(items) - 1)), 9], items)


def planned(kind: str, *batch: Sample, **grids: tuple[int, int]) -> Plan:
    """Tower and LLM on two stages each, of one rank or of a grid."""
    model = graph_of(kind)
    cuts = {"vision": (2, len(vision(kind).layers) - 2), LLM: (2, len(model.module(LLM).layers) - 2)}
    return disjoint_plan(model, batch, cuts, grids=grids)


@cache
def whole(kind: str, folder: Path) -> Any:
    """transformers' own model, and its checkpoint."""
    torch.manual_seed(1)
    model = whole_model(config_of(kind))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def theirs(kind: str, folder: Path, plan: Plan, sizes: tuple[tuple[int, int], ...], **said: Tensor) -> Tensor:
    """The whole model's loss, from pixels and sizes of images."""
    source, model = SyntheticSource(0), whole(kind, folder / kind)
    first = {stage.module: stage for stage in reversed(plan.stages)}
    own = {each.module: each for each in plan.microbatches}
    raw = microbatch_data(plan, first["vision"], own["vision"], source, dtype=F64).raw
    assert [item.shape[-3:] for item in raw] == [(3, SIDE_PX, SIDE_PX)] * len(sizes)
    raw = tuple(item.reshape(-1, *item.shape[-3:]) for item in raw)
    pixels = torch.nn.utils.rnn.pad_sequence(list(raw), batch_first=True)
    ids = microbatch_data(plan, first[LLM], own[LLM], source, dtype=F64).input_ids
    labels = microbatch_data(plan, plan.stages[-1], own[LLM], source, dtype=F64).labels
    assert ids is not None
    assert labels is not None
    ids = torch.where(ids < 0, IMAGE, ids)[None]
    logits = model(input_ids=ids, pixel_values=pixels, image_sizes=torch.tensor(sizes), **said).logits[0]
    loss: Tensor = torch.nn.functional.cross_entropy(logits, labels)
    return loss


def run(kind: str, folder: Path, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the composite's names."""
    how = RunSettings(
        steps=1,
        warmup=0,
        weights=folder / kind,
        precision=Precision.FLOAT64,
        collect=Collect.GRADIENTS,
    )
    done = emulate(lower(plan), how)
    parts = parts_of(kind).modules
    found = {
        name_in_composite(parts[module], name): gradient
        for state in done.states
        for (module, name), gradient in state.gradients.items()
    }
    return done.losses[0], found


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", GRIDS)
def test_losses_and_gradients_are_those_of_the_whole_model(
    kind: str, sizes: tuple[tuple[int, int], ...], folder: Path
) -> None:
    plan = planned(kind, said_sample(kind, sizes))
    check_runnable(plan)
    expected = theirs(kind, folder, plan, sizes)
    model = whole(kind, folder / kind)
    model.zero_grad()
    expected.backward()
    loss, gradients = run(kind, folder, plan)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
    assert "model.image_newline" in gradients
    asked = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    assert gradients.keys() == asked.keys()
    largest = max(float(gradient.abs().max()) for gradient in asked.values())
    for name, gradient in asked.items():
        own = (
            largest if name.endswith("k_proj.bias") else float(gradient.abs().max())
        )  # moves all scores alike
        assert (gradients[name] - gradient).abs().max() <= 1e-10 * own, name


def test_images_that_share_a_sample_are_a_tile_each_in_onevision(folder: Path, tmp_path: Path) -> None:
    """And the token that ends a row, which a single tile does not have before LLaVA-NeXT."""
    row = {"text_tokens": 9, "image_width": [20, 30], "image_height": [70, 20]}
    (tmp_path / "sizes.jsonl").write_text(json.dumps(row))
    (several,) = sized_batch(graph_of("llava_next"), 1, str(tmp_path / "sizes.jsonl"))
    assert [part.num_tiles for part in several.of("vision")] == [4, 5]
    kind = "llava_onevision"
    (sample,) = sized_batch(graph_of(kind), 1, str(tmp_path / "sizes.jsonl"))
    assert [(part.tokens_in, part.tokens_out) for part in sample.of("vision")] == [(16, 17)] * 2
    plan = planned(kind, sample)
    check_runnable(plan)
    expected = theirs(kind, folder, plan, ((70, 20), (20, 30)), batch_num_images=torch.tensor([2]))
    assert run(kind, folder, plan)[0] == pytest.approx(float(expected.detach()), rel=1e-10)


@given(
    kind=st.sampled_from(sorted(GRIDS)),
    height=st.integers(1, 400),
    width=st.integers(1, 400),
)
@examples(150)
def test_an_image_has_as_many_tokens_as_its_processor_says(kind: str, height: int, width: int) -> None:
    said = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=GRIDS[kind]),
        num_image_tokens=ALONG**2,
        patch_size=SIDE_PX // ALONG,
        num_additional_image_tokens=0,
        vision_aspect_ratio="anyres_max_9",
    )
    processor = PROCESSORS[kind]
    said._get_unpadded_features = lambda *given: processor._get_unpadded_features(said, *given)
    tokens = processor._get_number_of_features(said, height, width, SIDE_PX, SIDE_PX)
    rows, columns = (px // SIDE_PX for px in select_best_resolution((height, width), GRIDS[kind]))
    left, _ = processor._get_unpadded_features(said, height, width, ALONG, ALONG, rows, columns)
    if not left:
        with pytest.raises(
            ValueError, match=r"no feature of its . x . tiles reaches the LLM; nearest: sides"
        ):
            image_tokens(vision(kind), height, width)
        return
    found = image_tokens(vision(kind), height, width)
    assert isinstance(found, Tiled)
    assert found.tokens.tokens_out == tokens
    inside = ALONG**2 + (kind == "llava_next")
    assert found.tokens.tokens_in == inside * (1 + found.grid[0] * found.grid[1])


def two_samples(kind: str) -> tuple[Sample, ...]:
    """Images of many tiles, one of few, and text alone."""
    sizes = SIZES["beyond nine tiles, and two more"], SIZES["landscape"]
    text = sample_of(2, [6], [])
    return (*(replace(said_sample(kind, each), id=index) for index, each in enumerate(sizes)), text)


SHARED = {
    "one rank a stage": {},
    "tower of tp 2": {"vision": (1, 2)},
    "LLM of cp 2": {LLM: (2, 1)},
    "both of tp 2": {"vision": (1, 2), LLM: (1, 2)},
}


@pytest.mark.parametrize("how", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("grids", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("kind", GRIDS)
def test_ranks_train_as_one_process_does(
    kind: str, grids: dict[str, tuple[int, int]], how: Recompute, pool: Pool
) -> None:
    """Where tensor-parallel ranks compute layers again, they divide tokens too."""
    plan = planned(kind, *two_samples(kind), **grids)
    for module in ("vision", LLM):
        divides = how is Recompute.FULL and grids.get(module, (1, 1))[1] > 1
        said = ModuleSettings(module=module, recompute=how, sequence_parallel=divides)
        plan = with_programs(replace(plan, settings=plan.settings.with_module(said), programs=()))
    check_runnable(plan)
    assert_same(plan, pool)


def test_replicas_that_shard_weights_train_as_one_process_does(pool: Pool) -> None:
    kind = "llava_onevision"
    batch = two_samples(kind)
    cuts = {"vision": (len(vision(kind).layers),), LLM: (len(graph_of(kind).module(LLM).layers),)}
    plan = disjoint_plan(graph_of(kind), (*batch, replace(batch[0], id=3)), cuts, replicas=2)
    for module in ("vision", LLM):
        said = ModuleSettings(module=module, sharding=Sharding.PARAMETERS)
        plan = with_programs(replace(plan, settings=plan.settings.with_module(said), programs=()))
    check_runnable(plan)
    assert_same(plan, pool)


def test_a_split_backward_trains_as_one_process_does(pool: Pool) -> None:
    """The token that ends rows is no product's weight."""
    assert_same(split(planned("llava_next", *two_samples("llava_next")), weights_last), pool)


def test_a_job_of_single_tiles_reads_the_same_checkpoint(folder: Path) -> None:
    """As those did that were drafted before tiles were put together."""
    kind = "llava_next"
    whole(kind, folder / kind)
    part = parts_of(kind).modules["vision"]
    config = {key: value for key, value in part.config.items() if key != "image_newline"}
    tower = modules_of({**parts_of(kind).modules, "vision": replace(part, config=config)})["vision"]
    for module, has_token in ((tower, False), (vision(kind), True)):
        read = weights_of(folder / kind, adapter_of(module))
        assert ("image_newline" in read.stored) is has_token


def test_systems_that_cannot_put_tiles_together_say_so() -> None:
    plan = planned("llava_next", said_sample("llava_next", SIZES["square"]))
    part = lacking(replace(plan, settings=replace(plan.settings, precision=Precision.FLOAT32)))
    assert part == "tiles of images that 'vision' combines"


def test_larger_images_have_more_tiles() -> None:
    """How `explain` varies sizes: by whole tiles."""
    plan = planned("llava_next", said_sample("llava_next", SIZES["square"]))
    seen: set[tuple[int, int]] = set()

    def step_s(lowered: Lowered, cost: CostModel) -> float:
        del cost
        (image,) = lowered.plan.batch[0].of("vision")
        seen.add((image.num_tiles, image.tile_tokens))
        return 1.0

    found = {each.about: each for each in sensitivities(lower(plan), CostModel(ideal_profile()), step_s)}
    assert not found["vision tokens"].refusal
    assert seen == {(4, 17), (5, 17), (6, 17)}


TILES = Segment("vision", 0, 5 * 16, 16 + 6 * 9, grid=(2, 2), unpadded=(6, 8))


def test_such_an_image_can_be_run() -> None:
    check_segment(vision("llava_onevision"), TILES)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"tokens_out": 71}, "its projector makes 70 tokens, got 71"),
        ({"unpadded": (6, 9)}, "want 6 x 9 unpadded features within 8 x 8, as much padding on both sides"),
        ({"unpadded": (5, 8)}, "want 5 x 8 unpadded features within 8 x 8, as much padding on both sides"),
        ({"tokens_in": 5 * 17}, "want tiles of 16 tokens, got 17"),
        ({"tokens_in": 5 * 15}, "want tiles of 16 tokens, got 15"),
        ({"grid": None, "unpadded": None, "tokens_in": 16}, "do not shrink evenly to 70"),
    ],
)
def test_an_image_that_cannot_be_put_together_is_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_segment(vision("llava_onevision"), replace(TILES, **said))


def test_other_towers_put_nothing_together() -> None:
    tower = modules_of(dict(take_apart(CONFIGS["llava, mistral, no bias"]).modules))["vision"]
    with pytest.raises(ValueError, match="its tiles are put together, and its encoder has no image_newline"):
        check_segment(tower, TILES)
    for kind in ("pixtral", "aimv2_vision_model", "whisper"):
        config = {"model_type": kind, "image_newline": True}
        with pytest.raises(ValueError, match=f"{kind} puts no tiles together; leave out image_newline"):
            module_from_config(config, name="eyes", modality="vision", llm_width=16)
    merging = (ProjectorStep(merge=4), ProjectorStep(linear_out=True))
    config = dict(parts_of("llava_next").modules["vision"].config)
    with pytest.raises(ValueError, match="tiles are put together unmerged; want a projector without a merge"):
        module_from_config(config, name="eyes", modality="vision", llm_width=16, projector=merging)


@pytest.mark.parametrize("said", [{"grid": None}, {"unpadded": (0, 8)}, {"tokens_in": 81}])
def test_tiles_of_a_segment_are_equally_long(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="want an overview and a grid of tiles of equally many tokens"):
        replace(TILES, **said)


def test_ranks_that_would_share_tokens_of_tiles_are_refused() -> None:
    plan = planned("llava_next", said_sample("llava_next", SIZES["square"]), vision=(2, 1))
    with pytest.raises(ValueError, match="'vision': tiles are put together on one rank; want cp 1, got 2"):
        check_runnable(plan)


def test_attention_within_tiles_is_priced_and_nothing_else() -> None:
    plan = planned("llava_onevision", said_sample("llava_onevision", SIZES["beyond nine tiles"]))
    (microbatch,) = (each for each in plan.microbatches if each.module == "vision")
    (row,) = work_of(plan, microbatch).rows
    assert (row.tokens_in, row.attention_area) == (37 * 16, 37 * 16**2)
    mask = row_mask(plan, vision("llava_onevision"), microbatch.items)
    assert area(mask, mask) == 37 * 16**2


def test_a_plan_with_tiles_is_read_back_as_it_was_written() -> None:
    plan = planned("llava_next", *two_samples("llava_next"))
    assert loads(dumps(plan)) == plan


@pytest.mark.parametrize("kind", GRIDS)
def test_drafts_plans_and_checks_count_alike(kind: str, tmp_path: Path) -> None:
    """`init --data` says sizes, `plan` makes the tokens of them that `plan --sizes` does."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    row = {"text_tokens": 9, "image_width": 31, "image_height": 20}
    (tmp_path / "sizes.jsonl").write_text("\n".join([json.dumps(row)] * 64))
    job, sizes = tmp_path / "job.yaml", str(tmp_path / "sizes.jsonl")
    accept("init", str(tmp_path), "--gpus", "2xH100", "--data", sizes, "-o", str(job))
    expected = image_tokens(vision(kind), 20, 31)
    for name, more in (("own", ()), ("sized", ("--sizes", sizes)), ("cut", ("--sizes", sizes, *CUT))):
        file = tmp_path / f"{name}.json"
        accept("plan", str(job), "-o", str(file), *more)
        accept("check", str(file))
        found = {
            Tiled(ItemTokens(part.tokens_in, part.tokens_out), part.grid, part.unpadded)
            for sample in loads(file.read_text()).batch
            for part in sample.of("vision")
        }
        assert found == {expected}


CUT = ("--tiling", "anyres")
