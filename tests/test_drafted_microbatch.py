"""The microbatch of a job drafted from data: enough tokens, what fits, what the data has rows for."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from sim.predict import predict
from tests.command_line import accept, refuse
from workbench.data.sample import Sample, Segment
from workbench.job.draft import Train, draft, machines_of
from workbench.job.drafted_layout import drafted_layout
from workbench.job.drafted_microbatch import FULL_TOKENS, DraftedMicrobatch, drafted_microbatch
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.memory.account import fullest_bytes
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept as accept_plan

GPU_BYTES = 80 * 10**9


def texts(lengths: Sequence[int]) -> list[Sample]:
    return [
        Sample(id=number, segments=(Segment("text", 0, tokens, tokens),))
        for number, tokens in enumerate(lengths)
    ]


def chosen(
    lengths: Sequence[int], *, most: int = 1 << 20, memory_bytes: int = GPU_BYTES
) -> DraftedMicrobatch:
    machines = machines_of("8xH100", None)
    graph = draft("llama-3.2-1b", machines, train=Train.ALL).model
    layout = drafted_layout(graph, texts(lengths), gpus=8, per_node=8, memory_bytes=GPU_BYTES)
    return drafted_microbatch(graph, layout, texts(lengths), most=most, memory_bytes=memory_bytes)


@pytest.mark.parametrize("tokens", [1, 31, 300, 511, 1024, 4096, 6000, 50_000])
def test_no_other_power_of_two_is_nearer_to_full(tokens: int) -> None:
    def factor(samples: int) -> float:
        return max(samples * tokens / FULL_TOKENS, FULL_TOKENS / (samples * tokens))

    samples = chosen([tokens] * 64).samples
    assert factor(samples) == pytest.approx(min(factor(2**power) for power in range(13)), rel=1e-9)


def test_what_the_data_has_no_rows_for_is_not_taken_and_said() -> None:
    assert chosen([256] * 64).samples == 16
    few = chosen([256] * 64, most=7)
    assert few.samples == 4
    assert few.rule.endswith("; not 16, as the data has no more rows for 8")


def test_what_memory_does_not_hold_is_not_taken_and_said() -> None:
    """Of equal samples, half the memory holds half; long ones count, not the mean."""
    by_memory = [chosen([256] * 2000, memory_bytes=GPU_BYTES >> halves).samples for halves in range(8)]
    assert by_memory == sorted(by_memory, reverse=True)
    assert by_memory[0] == 16
    assert 1 <= by_memory[-1] < 16
    small = GPU_BYTES >> 4
    equal, skewed = (
        chosen([256] * 2000, memory_bytes=small),
        chosen([16] * 1800 + [2416] * 200, memory_bytes=small),
    )
    assert skewed.samples < equal.samples
    assert "not 16, as the activations of" in skewed.rule


@pytest.mark.parametrize("text_tokens", [64, 300, 4096])
@pytest.mark.parametrize("samples", [16, 48, 512, 4096])
def test_samples_of_a_step_are_kept_and_cut_into_full_equal_microbatches(
    tmp_path: Path, samples: int, text_tokens: int
) -> None:
    """Also without data, where equal samples are drafted with one sample a microbatch otherwise."""
    file, gpus = tmp_path / "job.yaml", ("--gpus", "16xH100")
    told = accept(
        "init", "llama-3.2-1b", *gpus, "--text-tokens", text_tokens, "--samples", samples, "-o", file
    )
    job = load_job(file)
    assert len(job.batch) == samples
    size, of_replica = job.microbatch_samples, samples // job.replicas
    assert of_replica % size == 0
    assert size == 1 or of_replica // size >= 8
    wanted = min(
        (2**power for power in range(13)), key=lambda n: abs(math.log(n * text_tokens / FULL_TOKENS))
    )
    if size < wanted:
        assert of_replica % (2 * size) or of_replica // (2 * size) < 8
        assert f"not {wanted}, as {samples} samples a step are too few for {2 * size}" in " ".join(
            told.output.split()
        )
    accept("plan", file, "-o", tmp_path / "plan.json")


def test_samples_that_replicas_do_not_share_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    accept("init", "llama-3.2-1b", "--gpus", "16xH100", "-o", file)
    replicas = load_job(file).replicas
    wanted, words = 5 * replicas + 1, f"got {5 * replicas + 1}; nearest: {5 * replicas}"
    other = ("init", "llama-3.2-1b", "--gpus", "16xH100", "--samples", wanted, "-o", tmp_path / "other.yaml")
    refuse(*other, words=f"want a multiple of the {replicas} replicas", folder=tmp_path)
    refuse(*other, words=words, folder=tmp_path)


def drafted(folder: Path, model: str, rows: Sequence[dict[str, int]]) -> tuple[Job, Job, str]:
    """The job of `init --data`, the same with one sample a microbatch, and what was printed."""
    sizes, file = folder / "sizes.jsonl", folder / "job.yaml"
    sizes.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = accept("init", model, "--gpus", "16xH100", "--data", sizes, "-o", file).output
    job = load_job(file)
    single = folder / "single.yaml"
    said = f"microbatch_samples: {job.microbatch_samples}, replicas"
    text = file.read_text()
    assert said in text
    single.write_text(text.replace(said, "microbatch_samples: 1, replicas"))
    return job, load_job(single), told


@pytest.mark.parametrize(("model", "times"), [("llama-3.2-1b", 6.5), ("llama-3.1-8b", 2.0)])
def test_short_samples_train_faster_than_one_by_one_and_fit(tmp_path: Path, model: str, times: float) -> None:
    """Of the same batch."""
    rng = random.Random(0)
    rows = [{"text_tokens": max(16, min(2048, int(rng.lognormvariate(5.5, 0.6))))} for _ in range(3000)]
    job, single, told = drafted(tmp_path, model, rows)
    rule = next(
        line for line in told.splitlines() if line.startswith("microbatch_samples: 16, the power of two")
    )
    assert f"# {rule}" in (tmp_path / "job.yaml").read_text()
    cost = cost_of(job, None, None)

    def samples_per_s(each: Job) -> float:
        plan = PLANNERS["cornstarch"](each, cost, lambda *_: None)
        assert fullest_bytes(plan) <= min(node.memory_bytes for node in plan.cluster.nodes)
        return len(each.batch) / predict(*accept_plan(plan), cost).iteration_s

    assert samples_per_s(job) > times * samples_per_s(single)
