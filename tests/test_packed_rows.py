"""Rows that pack samples: the packer against brute force; prices and losses against each sample alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime.data.batches import SyntheticSource
from runtime.reference import reference_step
from runtime.world.pool import Pool
from sim.predict import predict_within
from tests.command_line import accept, answered, refuse
from tests.test_parity import assert_same
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpora import CORPORA
from workbench.data.packing import packed_steps
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.packed_rows import row_of
from workbench.job.sample_sizes import sized_batch, sized_batches
from workbench.job.step_batches import step_batches
from workbench.masks.patterns import document_lengths
from workbench.plan.plan import Plan
from workbench.plan.runnable import count_targets
from workbench.plan.work import attention_area
from workbench.report.packed_rows import packed_record
from workbench.strategies import cornstarch
from workbench.timing.accept import accept as accepted

VALM = Path("examples/valm.yaml")
MOST = st.shared(st.integers(1, 12), key="most")
LENGTHS = MOST.flatmap(lambda most: st.lists(st.integers(1, most), max_size=9))


def fewest_rows(lengths: Sequence[int], most: int, rows: tuple[int, ...] = ()) -> int:
    """By trying every row for every sample."""
    if not lengths:
        return len(rows)
    first, *rest = lengths
    tried = [
        fewest_rows(rest, most, (*rows[:index], row + first, *rows[index + 1 :]))
        for index, row in enumerate(rows)
        if row + first <= most
    ]
    return min([*tried, fewest_rows(rest, most, (*rows, first))])


def naive_steps(lengths: Sequence[int], most: int, num_rows: int) -> list[tuple[tuple[int, ...], ...]]:
    """Best fit by looking at all rows for each sample."""
    steps: list[list[list[int]]] = []
    for number, length in enumerate(lengths):
        sums = [sum(lengths[each] for each in row) for row in steps[-1]] if steps else []
        fitting = [(-total, row) for row, total in enumerate(sums) if total + length <= most]
        if not fitting:
            steps.append([[] for _ in range(num_rows)])
        steps[-1][min(fitting)[1] if fitting else 0].append(number)
    return [tuple(map(tuple, step)) for step in steps]


@given(LENGTHS, MOST, st.integers(1, 4))
def test_steps_are_those_of_best_fit(lengths: list[int], most: int, num_rows: int):
    assert list(packed_steps(lengths, most, num_rows)) == naive_steps(lengths, most, num_rows)


@given(LENGTHS, MOST)
def test_rows_are_at_most_1_7_times_the_fewest(lengths: list[int], most: int):
    """All samples in one step of as many rows as best fit opens; `fewest_rows` tries all packings."""
    step = next(packed_steps(lengths, most, len(lengths) + 1), ())
    rows = [row for row in step if row]
    fewest = fewest_rows(lengths, most)
    assert fewest <= len(rows) <= 17 * fewest / 10
    assert all(sum(lengths[number] for number in row) <= most for row in rows)
    assert sorted(chain.from_iterable(rows)) == list(range(len(lengths)))


@given(LENGTHS, MOST, st.integers(1, 3))
def test_a_step_ends_at_the_first_sample_that_no_row_can_take(lengths: list[int], most: int, num_rows: int):
    """So steps have consecutive samples, and rows of a full one are emptier than that sample is long."""
    steps = list(packed_steps(lengths, most, num_rows))
    taken = [sorted(chain.from_iterable(step)) for step in steps]
    assert list(chain.from_iterable(taken)) == list(range(len(lengths)))
    for step, following in zip(steps, taken[1:], strict=False):
        assert all(sum(lengths[each] for each in row) + lengths[following[0]] > most for row in step)


def test_samples_that_no_row_holds_are_refused():
    with pytest.raises(ValueError, match="want samples of 1 to 4 tokens, sample 1 has 5"):
        list(packed_steps([4, 5], 4, 2))


@pytest.fixture(scope="module")
def valm() -> Job:
    return load_job(VALM)


@pytest.mark.parametrize("name", [corpus.name for corpus in CORPORA])
def test_rows_hold_the_first_samples_of_a_corpus_and_are_nearly_full(valm: Job, name: str):
    """Documents are the samples, segment by segment; less than 5 % of the rows is empty."""
    rows = sized_batch(valm.model, 8, name, seed=3, pack_tokens=32_768)
    packed = [length for row in rows for length in document_lengths(row)]
    alone = sized_batch(valm.model, len(packed), name, seed=3)
    assert sorted(packed) == sorted(sample.num_tokens for sample in alone)
    kinds = sorted(
        (segment.modality, segment.tokens_in, segment.tokens_out) for s in alone for segment in s.segments
    )
    assert kinds == sorted((s.modality, s.tokens_in, s.tokens_out) for row in rows for s in row.segments)
    assert [row.id for row in rows] == list(range(8))
    assert (
        0
        <= packed_record(rows, 32_768)["empty_fraction"]
        < (0.3 if name == "laion-interleaved-like" else 0.05)
    )
    assert max(row.num_tokens for row in rows) <= 32_768


def test_rows_have_the_pairs_of_their_samples_and_not_of_their_square(valm: Job):
    alone = sized_batch(valm.model, 40, "coco-captions")
    row = row_of(0, alone)
    assert attention_area(row) == sum(map(attention_area, alone))
    assert attention_area(row) < row.num_tokens**2 / 2 / 30


def plan_of(batch: Sequence[Sample], size: int) -> Plan:
    job = load_job(Path("examples/masks.yaml"))
    return cornstarch.plan(replace(job, batch=tuple(batch), microbatch_samples=size), COST, lambda *_: None)


COST = CostModel(load_profile("examples/elastic-cpu.json"))
SHAPES = ((4, 7), (9, 1), (2, 16), (30,), (5, 6), (8, 2))


def samples() -> list[Sample]:
    """Text, or text around an image."""
    return [
        Sample(
            number,
            (Segment("text", 0, first, first),)
            if not rest
            else (
                Segment("text", 0, first, first),
                Segment("vision", 0, 9, 9),
                Segment("text", 1, rest[0], rest[0]),
            ),
        )
        for number, (first, *rest) in enumerate(SHAPES)
    ]


class Moved(SyntheticSource):
    """The data of samples that packed rows hold: a row's segments are those of its samples in turn."""

    def __init__(self, rows: Sequence[Sequence[Sample]]) -> None:
        super().__init__(3)
        self._places = {
            (number, segment.modality, index): (sample.id, segment)
            for number, row in enumerate(rows)
            for modality in ("text", "vision")
            for index, (sample, segment) in enumerate(
                (sample, segment) for sample in row for segment in sample.of(modality)
            )
        }

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        return super().raw(*self._places[sample, segment.modality, segment.k], shape)

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        return super().token_ids(*self._places[sample, segment.modality, segment.k], vocab_size)


def test_packed_rows_train_as_their_samples_do_alone():
    """Loss and gradients in float64, up to rotary angles: float32, and other ones behind other samples."""
    alone = samples()
    groups = [alone[:3], alone[3:]]
    rows = [row_of(number, group) for number, group in enumerate(groups)]
    assert sum(map(count_targets, rows)) == sum(map(count_targets, alone))
    step = partial(reference_step, seed=1, dtype=torch.float64)
    packed = step(plan_of(rows, 1), source=Moved(groups))
    single = step(plan_of(alone, 3), source=SyntheticSource(3))
    assert packed.loss == pytest.approx(single.loss, rel=1e-9)
    for name, gradient in single.gradients.items():
        torch.testing.assert_close(packed.gradients[name], gradient, rtol=1e-6, atol=1e-9)


def test_packed_rows_run_on_ranks_as_in_one_process(pool: Pool):
    alone = samples()
    assert_same(plan_of([row_of(0, alone[:3]), row_of(1, alone[3:])], 1), pool)


def test_a_packed_step_takes_the_time_of_its_samples_side_by_side(valm: Job):
    """The same samples as rows of one sample each, or as samples of one microbatch."""
    cost = CostModel(load_profile("A40"))
    alone = sized_batch(valm.model, 24, "coco-captions")
    rows = [row_of(number, alone[6 * number : 6 * number + 6]) for number in range(4)]
    seconds = []
    for batch, size in ((alone, 6), (rows, 1)):
        job = replace(valm, batch=tuple(batch), microbatch_samples=size, replicas=1)
        plan = cornstarch.plan(job, cost, lambda *_: None)
        seconds.append(predict_within(*accepted(plan), cost).iteration_s)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def rows_file(folder: Path, num: int = 400) -> Path:
    """Short texts, which differ by their number."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f'{{"text_tokens": {4 + number * 7 % 23}}}\n' for number in range(num)))
    return file


def packed_job(folder: Path, **batch: object) -> Path:
    spec = yaml.safe_load(Path("examples/masks.yaml").read_text())
    spec["batch"] = {"samples": 4, "sizes": rows_file(folder).name, "pack_tokens": 96, **batch}
    spec["profile"] = str(Path("examples/elastic-cpu.json").resolve())
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def test_a_job_of_packed_rows_is_planned_and_simulated_with_its_rates(tmp_path: Path):
    job, plan = packed_job(tmp_path), tmp_path / "plan.json"
    record = answered("plan", job, "-o", plan)["packed"]
    rows = load_job(job).batch
    content = [length for row in rows for length in document_lengths(row)]
    assert record == {
        "rows": 4,
        "row_tokens": 96,
        "samples": len(content),
        "tokens": sum(content),
        "empty_fraction": 1 - sum(content) / 384,
    }
    assert len(content) > 4
    figures = answered("simulate", plan, "--profile", "examples/elastic-cpu.json")
    assert figures["samples_per_s"] * figures["iteration_s"] == pytest.approx(len(content))
    assert figures["tokens_per_s"] * figures["iteration_s"] == pytest.approx(sum(content))
    told = " ".join(accept("simulate", plan, "--profile", "examples/elastic-cpu.json").stdout.split())
    assert f"packed: {len(content)} samples with {sum(content)} tokens in 4 rows a step" in told
    flags = ("--sizes", tmp_path / "rows.jsonl", "--pack", 96)
    stated = packed_job(tmp_path, sizes="coco-captions", pack_tokens=2048)
    accept("plan", stated, "-o", tmp_path / "by_flags.json", *flags)
    assert (tmp_path / "by_flags.json").read_bytes() == plan.read_bytes()


def test_later_batches_are_packed_too(tmp_path: Path):
    """Of a file, rows drawn anew; of a corpus, the samples behind those of the batch before."""
    job = packed_job(tmp_path)
    first, second = step_batches(job, load_job(job), 2)
    assert [row.id for row in (*first, *second)] == list(range(8))
    assert document_lengths(first[0]) != document_lengths(second[0])
    assert all(row.num_tokens <= 96 and len(document_lengths(row)) > 1 for row in (*first, *second))
    job = packed_job(tmp_path, sizes="librispeech", pack_tokens=4096)
    model = load_job(VALM).model
    batches = sized_batches(model, 2, "librispeech", num_batches=2, pack_tokens=4096)
    alone = sized_batch(model, sum(len(document_lengths(row)) for row in chain(*batches)), "librispeech")
    packed = [length for row in chain(*batches) for length in document_lengths(row)]
    assert sorted(packed) == sorted(sample.num_tokens for sample in alone)


def test_a_drafted_job_packs_its_data(tmp_path: Path):
    data, job = rows_file(tmp_path, 3000), tmp_path / "job.yaml"
    command = ("init", "llama-3.2-1b", "--gpus", "2xH100", "--data", data, "-o", job)
    told = " ".join(accept(*command, "--pack", 512).stdout.split())
    assert yaml.safe_load(job.read_text())["batch"]["pack_tokens"] == 512
    rows = load_job(job).batch
    content = [length for row in rows for length in document_lengths(row)]
    assert f"packed: {len(content):,} samples with {sum(content):,} tokens in {len(rows)} rows" in told


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"pack_tokens": 20}, "sample 4 of {folder}/rows.jsonl has 25 tokens, more than a packed row; want"),
        (
            {"samples": 90},
            "the 400 rows of {folder}/rows.jsonl pack into 63 rows of 96 tokens, the job wants 90",
        ),
        ({"mask": "gemma"}, "packed samples have mask causal, got 'gemma'"),
        ({"mask": ["causal", "full"]}, "packed samples have mask causal, got 'full'"),
        ({"pack_tokens": 0}, "pack_tokens"),
        ({"samples": 99_999, "pack_tokens": 1001}, "nearest: 99,900 rows"),
        ({"sizes": None, "fixed": {"text_tokens": 8}}, "'pack_tokens' packs samples of 'sizes'"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(tmp_path: Path, batch: dict[str, object], words: str):
    job = packed_job(tmp_path, **batch)
    refuse("plan", job, "-o", tmp_path / "a.json", words=words.format(folder=tmp_path), folder=tmp_path)


def test_flags_that_pack_nothing_are_refused(tmp_path: Path):
    job, output = packed_job(tmp_path), tmp_path / "a.json"
    flagged = partial(refuse, "plan", job, "-o", output, folder=tmp_path)
    flagged(
        "--pack", 96, words="--pack 96 packs samples of --sizes; want --sizes, or pack_tokens in the batch"
    )
    flagged("--pack", 0, "--sizes", tmp_path / "rows.jsonl", words="--pack: want >= 1 token, got 0")
    drafted = ("init", "llama-3.2-1b", "--gpus", "2xH100", "-o", output, "--pack", 96)
    refuse(*drafted, words="--pack 96 packs samples of --data; want both", folder=tmp_path)


def test_models_whose_samples_would_see_each_other_are_refused(tmp_path: Path):
    spec = yaml.safe_load(Path("examples/cross_attention.yaml").read_text())
    spec["batch"] = {"samples": 2, "sizes": rows_file(tmp_path).name, "pack_tokens": 96}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    words = "reads images by cross-attention (edge vision>llm), in which a packed sample would see the images"
    refuse("plan", tmp_path / "job.yaml", "-o", tmp_path / "a.json", words=words, folder=tmp_path)
