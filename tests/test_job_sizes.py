"""Samples of a job from files and corpora, warnings below b_min, and what the search over degrees refuses."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runtime.frontend.callbacks import AnyRes
from tests.command_line import accept, workbench
from tests.test_data_strategies import skewed_job
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import anyres_grid
from workbench.job.first_rows import SizesRead, unlike_rows
from workbench.job.job import Job, load_job
from workbench.job.sample_sizes import Tiling, sized_batch, with_sizes
from workbench.job.step_batches import step_batches
from workbench.planner.stable_batch import stable_batch_samples, too_small
from workbench.strategies import entrain_search

VALM = Path("examples/valm.yaml")
COST = CostModel(load_profile("A40"))


def valm() -> Job:
    return load_job(VALM)


@given(st.integers(1, 60), st.integers(1, 60))
def test_tiles_are_those_that_the_callback_cuts(height: int, width: int):
    blocks = AnyRes(block_px=8).blocks(torch.zeros(1, height, width))
    rows, columns = anyres_grid(height, width, tile_px=8)
    assert len(blocks) == 1 + rows * columns


@pytest.mark.parametrize("tiling", Tiling)
def test_a_corpus_through_the_encoders_rules(tiling: Tiling):
    job = with_sizes(valm(), "coco-captions", seed=1, tiling=tiling)
    images = [sample.of("vision") for sample in job.batch]
    assert len(job.batch) == 24
    assert {segment.tokens_in for of in images for segment in of} == {729}
    assert {of[0].tokens_out for of in images} == {729}
    assert all(segment.tokens_out == 729 for of in images for segment in of) is (tiling is Tiling.NONE)
    assert {len(of) for of in images} == (
        {1} if tiling is Tiling.NONE else {3, 4, 5} & {len(x) for x in images}
    )
    assert len({sample.num_tokens for sample in job.batch}) > 1


def test_clips_become_windows(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text_tokens": 7, "audio_seconds": 45.0}\n' * 24)
    job = with_sizes(valm(), str(file))
    assert {len(sample.of("audio")) for sample in job.batch} == {2}
    assert not any(sample.of("vision") for sample in job.batch)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"text_tokens": 20, "image_width": 640, "image_height": 0}', "row 1: an image must have sides"),
        ('{"text_tokens": -1}', "row 1: want >= 1 text token"),
        ('{"text_tokens": 0}', "row 1: want >= 1 text token"),
        ('{"text_tokens": null}', "row 1: text_tokens: want one number"),
        ('{"text_tokens": 5}', "has 1 rows, the job wants 24 samples"),
        (
            '{"text_tokens": 5, "video_width": 640, "video_height": 480}',
            "row 1: want as many widths as heights and seconds of videos, got 1, 1 and 0",
        ),
        (
            '{"text_tokens": 5, "video_width": 640, "video_height": 0, "video_seconds": 3}',
            "row 1: a video must have sides >= 1 px",
        ),
        (
            '{"text_tokens": 5, "video_width": 640, "video_height": 480, "video_seconds": -1}',
            "row 1: a video must last > 0 s",
        ),
    ],
)
def test_bad_rows_are_one_line_and_exit_code_2(row: str, words: str, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(row + "\n")
    result = workbench("plan", str(VALM), "--sizes", str(file), "-o", str(tmp_path / "p.json"))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("device", "is_told"), [("A100", True), ("a40-48gb", False), ("toys", True)])
def test_a_profile_of_another_device_is_told(device: str, is_told: bool, tmp_path: Path):
    job, plan = tmp_path / "job.yaml", tmp_path / "p.json"
    job.write_text(VALM.read_text().replace("device: A40", f"device: {device}"))
    told = f"cluster.device is {device}, but times are those of A40"
    assert (told in accept("plan", str(job), "-o", str(plan)).stderr) is is_told


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("llava-150", "is no file and no corpus; the corpora are"),
        ("here/a.jsonl", "there is no file here/a.jsonl"),
    ],
)
def test_an_unknown_source_is_named(source: str, words: str):
    with pytest.raises(ValueError, match=words):
        with_sizes(valm(), source)


def test_a_batch_below_b_min_is_warned_of_by_name():
    job = skewed_job("everything")
    least = stable_batch_samples(job, COST, 4)
    assert least > len(job.batch)
    assert f"a batch of {len(job.batch)} samples is below b_min, {least}:" in str(too_small(job, COST, 4))
    larger = [replace(s, id=s.id + 100 * n) for n in range(1 + least // len(job.batch)) for s in job.batch]
    assert too_small(replace(job, batch=tuple(larger)), COST, 4) is None


def test_the_command_warns_and_plans(tmp_path: Path):
    job, plan = tmp_path / "job.yaml", tmp_path / "p.json"
    text = VALM.read_text().replace("samples: 24", "samples: 4")
    job.write_text(text.replace("{tp: 2}", "{pp: 1, tp: 2}").replace("llm: {tp: 2", "llm: {pp: 10, tp: 2"))
    arguments = ["plan", str(job), "--strategy", "entrain", "--sizes", "laion-interleaved-like"]
    result = accept(*arguments, "-o", str(plan))
    assert plan.is_file()
    idle, small = result.stderr.splitlines()[:2]
    assert idle.startswith(
        "workbench: warning: no sample of laion-interleaved-like in the batch has an item for"
    )
    assert small.startswith("workbench: warning: job 'valm': a batch of 4 samples is below b_min")


def test_equal_samples_need_no_more_than_one():
    assert stable_batch_samples(valm(), COST, 24) == 1
    assert too_small(valm(), COST, 24) is None


def test_given_degrees_get_their_ranks():
    """Frozen encoders have so little work that their shares would be below their tp of 2."""
    found = entrain_search.configurations(valm(), COST)
    assert found
    assert {layout.tp for each in found for layout in each.layouts} == {2}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"microbatch_samples": 5}, "nearest: 20 or 25 samples"),
        ({"max_ranks": 4}, "nearest: 6 ranks, the fewest that the layouts need"),
    ],
)
def test_no_configuration_names_the_nearest_job(changed, words: str):
    with pytest.raises(ValueError, match=words):
        entrain_search.configurations(replace(valm(), **changed), COST)


def test_a_job_says_how_its_images_are_cut(tmp_path: Path):
    """`batch.tiling` does what `--tiling` does, in the job's own batch and in later ones."""
    spec = yaml.safe_load(VALM.read_text())
    (tmp_path / "sizes.jsonl").write_text(
        '{"text_tokens": 7, "image_width": 800, "image_height": 600}\n' * 24
    )
    file = tmp_path / "job.yaml"
    del spec["batch"]["fixed"]
    spec["batch"] |= {"sizes": "sizes.jsonl", "tiling": "anyres"}
    file.write_text(yaml.safe_dump(spec))
    job = load_job(file)
    sizes = str(tmp_path / "sizes.jsonl")
    assert job.batch == with_sizes(job, sizes, tiling=Tiling.ANYRES).batch
    assert job.batch != with_sizes(job, sizes).batch
    for batch in step_batches(file, job, 2):
        assert [sample.segments for sample in batch] == [sample.segments for sample in job.batch]
    spec["batch"] |= {"fixed": {"text_tokens": 9}, "sizes": None}
    file.write_text(yaml.safe_dump(spec))
    with pytest.raises(ValueError, match="'tiling' belongs to 'sizes'"):
        load_job(file)


def test_a_tiling_without_sizes_is_refused(tmp_path: Path):
    done = workbench("plan", VALM, "-o", tmp_path / "plan.json", "--tiling", "anyres")
    assert done.exit_code == 2
    assert "--tiling anyres cuts images of --sizes; want --sizes, or no --tiling" in done.output


def test_a_batch_of_sorted_rows_is_told(tmp_path: Path):
    """Of 240 rows of 1 to 240 tokens, which have 120.5 on average, the first 24 have 12.5 or 228.5."""
    job, file, plan = tmp_path / "a.yaml", tmp_path / "a.jsonl", tmp_path / "plan.json"
    spec = yaml.safe_load(VALM.read_text())
    lengths = list(range(1, 241))

    def told(batch: dict[str, object], *flags: object) -> list[str]:
        job.write_text(yaml.safe_dump({**spec, "batch": {"samples": 24, **batch}}))
        stderr = accept("plan", job, "-o", plan, *flags).stderr
        return [line for line in stderr.splitlines() if "first 24 rows" in line]

    for rows in (lengths, lengths[::-1]):
        file.write_text("".join(f'{{"text_tokens": {tokens}}}\n' for tokens in rows))
        (line,) = told({"sizes": "a.jsonl"})
        assert f"of {file}, which have {12 if rows == lengths else 228} tokens on average, rows drawn" in line
        assert told({"fixed": {"text_tokens": 16}}, "--sizes", file) == [line]
    random.Random(0).shuffle(lengths)
    file.write_text("".join(f'{{"text_tokens": {tokens}}}\n' for tokens in lengths))
    assert told({"sizes": "a.jsonl"}) == told({"sizes": "coco-captions"}) == []


def test_few_rows_of_unequal_lengths_differ_by_chance(tmp_path: Path):
    """One row in eight is long: of four in random order none is, as of other fours."""
    file = tmp_path / "a.jsonl"
    lengths = [10, 20, 10, 20, 10, 20, 10, 400] * 30
    file.write_text("".join(f'{{"text_tokens": {tokens}}}\n' for tokens in lengths))
    batch = sized_batch(valm().model, 4, str(file))
    assert unlike_rows(valm().model, batch, SizesRead(str(file), Tiling.NONE)) == ""
