"""Videos: frames and sizes as transformers' processors choose them, positions and losses as its models'."""

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import Result

from experiments.doors.families import plan_of, wide_vision_rotations
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import original, whole_model
from runtime.data.batches import SyntheticSource, axes_of, microbatch_data
from runtime.emulation.emulate import emulate
from runtime.models.patch_grid import patches_of
from runtime.run_settings import RunSettings
from tests.command_line import workbench
from tests.examples import examples
from tests.test_tilings import source_of
from workbench.data.corpus import Frame, ItemTokens, Video, fixed_samples, sample_of
from workbench.data.sample import Sample, Segment
from workbench.job.job import load_job
from workbench.job.sample_sizes import sized_batch
from workbench.model.composites.composite import LLM
from workbench.model.families.family import Encoder
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens, video_of
from workbench.model.model_graph import Module
from workbench.plan.codec import dumps, loads
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision

VIDEO, IMAGE = 91, 90
F64 = torch.float64
STEP = 2  # frames
SIDES = st.integers(8, 3000)
theirs = cache(source_of)
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "exaone4_5")


@cache
def tower(kind: str, **said: int) -> Module:
    config = {"model_type": kind, "depth": 1, "num_heads": 2, "hidden_size": 32, "embed_dim": 32}
    config |= {"out_hidden_size": 32, "deepstack_visual_indexes": []}
    return module_from_config(config | said, name="vision", modality="vision", llm_width=32)


def looked_at(kind: str, duration_s: float, native_fps: int) -> int:
    """Frames that transformers' processor takes of a file; rounding may add one to Qwen2-VL's even number."""
    words: dict[str, Any] = {"min_frames": 4, "max_frames": 768, "temporal_patch_size": STEP}
    own = SimpleNamespace(num_frames=None, fps=2, **words)
    total = round(duration_s * native_fps)
    metadata = SimpleNamespace(total_num_frames=total, fps=native_fps)
    indices = theirs(f"{kind}.video_processing_{kind}", "sample_frames").sample_frames(own, metadata, fps=2)
    return len(indices) // STEP * STEP if kind == "qwen2_vl" else len(indices)


@examples(60)
@given(half_seconds=st.integers(3, 1200), height=SIDES, width=SIDES)
def test_qwen2_looks_at_the_frames_that_transformers_does(half_seconds: int, height: int, width: int) -> None:
    duration_s = half_seconds / 2
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="differ by at most 200 times"):
            video_of(tower("qwen2_vl_vision"), height, width, duration_s)
        return
    frames = looked_at("qwen2_vl", duration_s, 24)
    high, wide = theirs("qwen2_vl.video_processing_qwen2_vl", "smart_resize").smart_resize(
        height, width, factor=28, min_pixels=128 * 28**2, max_pixels=768 * 28**2
    )
    patches = high * wide // 14**2
    found = video_of(tower("qwen2_vl_vision"), height, width, duration_s)
    tokens = ItemTokens(patches, patches // 4)
    assert found == Video(tuple(Frame(tokens, (time, time)) for time in range(frames // STEP)))
    assert video_of(tower("exaone4_5_vision", num_key_value_heads=1), height, width, duration_s) == found
    later = video_of(tower("qwen2_5_vl_vision", tokens_per_second=25), height, width, duration_s)
    each_s = torch.tensor([STEP / (frames / duration_s)])
    times = (torch.arange(frames // STEP) * (25 * each_s[0])).long().tolist()
    assert [frame.at for frame in later.frames] == list(enumerate(times))
    assert {frame.tokens for frame in later.frames} == {tokens}


@examples(60)
@given(
    half_seconds=st.integers(3, 1200),
    height=SIDES,
    width=SIDES,
    most=st.sampled_from([768 * 32**2, 24 * 2**20]),
)
def test_qwen3_looks_at_the_frames_that_transformers_does(
    half_seconds: int, height: int, width: int, most: int
) -> None:
    duration_s = half_seconds / 2
    frames = looked_at("qwen3_vl", duration_s, 24)
    module = tower("qwen3_vl_vision", video_max_pixels=most)
    try:
        high, wide = theirs("qwen3_vl.video_processing_qwen3_vl", "smart_resize").smart_resize(
            frames, height, width, factor=32, min_pixels=128 * 32**2, max_pixels=most
        )
    except ValueError:
        with pytest.raises(ValueError, match="differ by at most 200 times"):
            video_of(module, height, width, duration_s)
        return
    found = video_of(module, height, width, duration_s).frames
    patches = high * wide // 16**2
    assert {frame.tokens for frame in found} == {ItemTokens(patches, patches // 4)}
    assert {frame.at for frame in found} == {(0, 0)}
    assert len(found) == -(-frames // STEP)


@pytest.mark.parametrize(("kind", "is_of_frame"), [("qwen2_5_vl_vision", True), ("qwen3_vl_vision", False)])
def test_the_note_of_a_tower_without_a_processor_has_the_area_that_its_videos_get(
    kind: str, is_of_frame: bool
) -> None:
    """A video of large frames comes close to it: in Qwen3-VL all frames share about what one has before."""
    family = ARCHITECTURES[kind]
    assert isinstance(family, Encoder)
    [most] = map(int, re.findall(r"looked at, at (\d+) pixels at most", family.unprocessed))
    patch_px = 14 if is_of_frame else 16
    frames = video_of(tower(kind), 2160, 3840, 2.0).frames
    pixels = [STEP * frame.tokens.tokens_in * patch_px**2 for frame in frames]
    area = max(pixels) / STEP if is_of_frame else sum(pixels)
    assert 0.9 * most < area <= most


def test_qwen3_says_the_second_of_every_step() -> None:
    """21 frames of 10.5 s, the last one twice: <0.3 seconds>, <1.3 seconds>, ..., <10.5 seconds>."""
    frames = video_of(tower("qwen3_vl_vision"), 64, 64, 10.5).frames
    assert [frame.text_tokens for frame in frames] == [6, *(8,) * 9, 9]


def test_a_frame_counts_as_an_image_of_its_size() -> None:
    module = tower("qwen2_vl_vision")
    (size,) = {frame.tokens for frame in video_of(module, 448, 672, 4.0).frames}
    assert size == image_tokens(module, 448, 672)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"video_max_pixels": 10}, "video_min_pixels must be <= video_max_pixels 10"),
        ({"video_min_frames": 800}, "want 2 <= least frames <= most frames, got 800 and 768"),
        ({"video_max_frames": 0}, "video_max_frames must be a whole number >= 1"),
    ],
)
def test_bad_words_of_videos_are_named(said: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        video_of(tower("qwen2_vl_vision", **said), 100, 100, 10.0)


def test_a_tower_without_a_rule_says_who_has_one() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    module = module_from_config(
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14} | config,
        name="eyes",
        modality="vision",
        llm_width=32,
    )
    with pytest.raises(ValueError, match=r"'eyes': no rule says which frames .* Qwen2-VL vision, Qwen2.5-VL"):
        video_of(module, 100, 100, 10.0)


def test_text_goes_around_a_video_and_not_into_it() -> None:
    video = Video(tuple(Frame(ItemTokens(16, 4), (time, 5 * time)) for time in range(3)))
    (sample,) = fixed_samples(1, text_tokens=9, items={"vision": [video]})
    assert [(each.modality, each.tokens_out, each.frame) for each in sample.segments] == [
        ("text", 4, None),
        *(("vision", 4, (time, 5 * time)) for time in range(3)),
        ("text", 5, None),
    ]


@pytest.mark.parametrize(
    "before",
    [
        Segment("text", 0, 4, 4),
        Segment("vision", 0, 16, 4),
        Segment("vision", 0, 16, 4, (2, 8), frame=(0, 0)),
        Segment("vision", 0, 32, 8, frame=(0, 0)),
    ],
)
def test_a_later_frame_wants_an_earlier_one_in_front_of_it(before: Segment) -> None:
    with pytest.raises(
        ValueError, match=r"vision\[1\] is frame 1 of a video at time 2; want frame 0 of as many"
    ):
        Sample(0, (before, Segment("vision", 1, 16, 4, frame=(1, 2))))


@pytest.mark.parametrize("last", [(3, 1), (4, 2), (2, 2)])
def test_numbers_of_a_videos_frames_go_up_and_times_do_not_go_down(last: tuple[int, int]) -> None:
    frames = [Segment("vision", k, 16, 4, frame=at) for k, at in enumerate(((0, 0), (1, 2), (2, 2), last))]
    assert Sample(0, tuple(frames[:3]))
    with pytest.raises(ValueError, match=r"vision\[3\] is frame . of a video at time"):
        Sample(0, tuple(frames))
    with pytest.raises(ValueError, match=r"0 at 0, got \(0, 3\)"):
        Segment("vision", 0, 16, 4, frame=(0, 3))


def seen(kind: str, grids: list[tuple[int, int, int]], interval: float) -> Sample:
    """Text, then a video of (steps, rows, columns) and text again, and so on; Qwen3-VL's with text inside."""
    inside = 3 if kind.startswith("qwen3") else 0
    items = []
    for steps, rows, columns in grids:
        tokens = ItemTokens(rows * columns, rows * columns // 4)
        places = [(0, 0) if inside else (step, int(step * interval)) for step in range(steps)]
        items.append(("vision", Video(tuple(Frame(tokens, at, inside) for at in places))))
    sample = sample_of(0, [5] * (len(grids) + 1), items)
    sides = iter([grid[1:] for grid in grids for _ in range(grid[0])])
    return Sample(
        0,
        tuple(
            part
            if part.modality == "text"
            else Segment("vision", part.k, part.tokens_in, part.tokens_out, next(sides), part.frame)
            for part in sample.segments
        ),
    )


def said_to(sample: Sample, grids: list[tuple[int, int, int]], each_s: float) -> dict[str, Tensor]:
    """What transformers' processors say of the sample's videos."""
    kinds = [2 * (part.modality != "text") for part in sample.segments for _ in range(part.tokens_out)]
    said = {"mm_token_type_ids": torch.tensor(kinds)[None], "video_grid_thw": torch.tensor(grids)}
    return said | {"second_per_grid_ts": torch.full((len(grids),), each_s, dtype=F64)}


GRID = st.tuples(st.integers(1, 4), *(st.integers(1, 4).map(lambda side: 2 * side),) * 2)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@settings(deadline=None, max_examples=20)
@given(grids=st.lists(GRID, min_size=1, max_size=3), interval=st.integers(1, 36).map(lambda n: n / 4))
def test_positions_are_those_of_transformers(
    kind: str, grids: list[tuple[int, int, int]], interval: float
) -> None:
    whole, per_second = original_of(kind)
    sample = seen(kind, grids, 1 if kind == "qwen2_vl" else interval)
    said = said_to(sample, grids, interval / per_second)
    if kind != "qwen2_5_vl":
        del said["second_per_grid_ts"]
    ids = torch.where(said["mm_token_type_ids"] == 0, 1, VIDEO)
    wanted, _ = whole.model.get_rope_index(ids, **said)
    assert torch.equal(axes_of(planned(kind).model.modules, [sample]), wanted[:, 0])


@cache
def original_of(kind: str) -> tuple[Any, int]:
    whole: Any = original({**CONFIGS[kind], "video_token_id": VIDEO})
    return whole, getattr(whole.config.vision_config, "tokens_per_second", 1)


@cache
def planned(kind: str) -> Plan:
    return plan_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Given pixels of two videos, from its own patches, towers and positions to its loss."""
    grids, interval = [(3, 4, 6), (2, 6, 4)], 4
    sample = seen(kind, grids, 1 if kind == "qwen2_vl" else interval)
    plan = plan_of(kind, sample)
    with wide_vision_rotations():
        torch.manual_seed(1)
        model = whole_model({**CONFIGS[kind], "video_token_id": VIDEO, "image_token_id": IMAGE})
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.05)
        model.save_pretrained(tmp_path)
        run = RunSettings(steps=1, warmup=0, weights=tmp_path, precision=Precision.FLOAT64)
        ours = emulate(lower(plan), run).losses[0]
        whole = loss_of(model, plan, said_to(sample, grids, interval / per_second(model)))
    assert abs(ours - whole) <= 1e-10 * abs(whole)


def per_second(model: Any) -> int:
    return getattr(model.config.vision_config, "tokens_per_second", 1)


def loss_of(model: Any, plan: Plan, said: dict[str, Tensor]) -> float:
    """Of the whole model, over the targets that the plan has."""
    first, last = (stages[0] for stages in (plan.stages, plan.stages[::-1]))
    raw = [
        step
        for each in plan.microbatches
        if each.module == first.module
        for step in microbatch_data(plan, first, each, SyntheticSource(0), dtype=F64).raw
    ]
    assert {tuple(step.shape[:2]) for step in raw} == {(3, STEP)}
    config = model.config.vision_config
    patches = [patches_of(step, config.patch_size, config.spatial_merge_size, STEP) for step in raw]
    llm = next(stage for stage in plan.stages if stage.module == LLM)
    own = [each for each in plan.microbatches if each.module == LLM]
    ids = microbatch_data(plan, llm, own[0], SyntheticSource(0), dtype=F64).input_ids
    labels = microbatch_data(plan, last, own[0], SyntheticSource(0), dtype=F64).labels
    assert ids is not None
    assert labels is not None
    if "qwen2_5" not in model.config.model_type:
        del said["second_per_grid_ts"]
    logits = model(
        input_ids=torch.where(ids < 0, VIDEO, ids)[None], pixel_values_videos=torch.cat(patches), **said
    ).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, labels).detach())


ROWS = (
    {"text_tokens": 30, "video_width": 1280, "video_height": 720, "video_seconds": 10.0},
    {"text_tokens": 30, "video_width": [64, 640], "video_height": [80, 480], "video_seconds": [3, 4.5]},
    {"text_tokens": 30, "image_width": 640, "image_height": 480},
    {"text_tokens": 30},
)


def drafted(folder: Path, kind: str, *, processor: dict[str, Any] | None = None) -> Result:
    """`init` of a model with videos among its data."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    (folder / "sizes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS * 4))
    if processor is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(processor))
    words = ("--gpus", "4xH100", "--data", str(folder / "sizes.jsonl"), "-o", str(folder / "job.yaml"))
    return workbench("init", str(folder), *words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_drafted_and_sized_from_data_with_videos(kind: str, tmp_path: Path) -> None:
    said = {"fps": 1, "max_frames": 8, "size": {"shortest_edge": 4096, "longest_edge": 65_536}}
    done = drafted(tmp_path, kind, processor=said)
    assert done.exit_code == 0, done.output
    job = load_job(tmp_path / "job.yaml")
    module = job.model.module("vision")
    drawn = {segment.tokens_in for sample in job.batch for segment in sample.of("vision")}
    sizes = [(720, 1280, 10.0), (80, 64, 3.0), (480, 640, 4.5)]
    videos = [video_of(module, *size) for size in sizes]
    assert drawn <= {frame.tokens.tokens_in for video in videos for frame in video.frames} | {
        image_tokens(module, 480, 640).tokens_in
    }
    assert len(videos[0].frames) == 8 // STEP
    sized = sized_batch(job.model, len(ROWS), str(tmp_path / "sizes.jsonl"))
    assert [len(sample.of("vision")) for sample in sized] == [
        len(videos[0].frames),
        len(videos[1].frames) + len(videos[2].frames),
        1,
        0,
    ]
    assert sized[2].of("vision")[-1].frame is None


def test_a_model_without_a_rule_for_videos_is_not_drafted_for_them(tmp_path: Path) -> None:
    done = drafted(tmp_path, "llava")
    assert done.exit_code == 2
    assert "no rule says which frames of a video it sees" in done.stderr
    assert not (tmp_path / "job.yaml").exists()


def test_a_job_names_its_videos(tmp_path: Path) -> None:
    """Each sample's in one piece, and equal work for the encoder as from that many images."""
    text = """
name: named
model:
  modules:
    vision: {config: config.json, modality: vision}
    llm: {config: config.json, modality: text}
cluster: {device: H100, nodes: 1, ranks_per_node: 4}
batch: {samples: 4, fixed: {text_tokens: 9, items: {vision: {videos: [[56, 84, 4.0], [84, 56, 3]]}}}}
profile: H100
"""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2_vl"]))
    (tmp_path / "named.yaml").write_text(text)
    sample = load_job(tmp_path / "named.yaml").batch[0]
    kinds = [part.modality if part.frame is None else part.frame[0] for part in sample.segments]
    assert kinds == ["text", 0, 1, 2, 3, "text", 0, 1, 2, "text"]
    (tmp_path / "both.yaml").write_text(text.replace("videos:", "tokens: [4, 1], videos:"))
    with pytest.raises(
        ValueError, match="want at most one of 'images' with 'videos', 'seconds' and 'tokens'"
    ):
        load_job(tmp_path / "both.yaml")


def test_a_plan_with_videos_is_read_back_as_it_was_written() -> None:
    plan = plan_of("qwen2_5_vl", seen("qwen2_5_vl", [(3, 4, 6)], 5))
    assert loads(dumps(plan)) == plan
