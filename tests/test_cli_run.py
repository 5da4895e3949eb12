"""What users hand to long commands: numbers, places to write to, weights to go on from."""

import json
from pathlib import Path

import pytest

from runtime.data.scenes import make
from runtime.launch import RunResult, prepare, run_lowered
from runtime.run_settings import RunSettings
from runtime.step.optimizer import OptimizerSettings, RateSchedule
from runtime.world.pool import Pool
from tests.command_line import JOB, accept, answered, refuse
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.job.run_options import RunOptions
from workbench.plan.codec import read_plan
from workbench.plan.following import next_plan
from workbench.plan.lower import lower
from workbench.strategies.next_step import next_step
from workbench.trace_json import read_trace


def test_training_goes_on_from_exported_weights(plan: Path):
    folder = plan.parent
    run = ("run", plan, "--local", "--warmup", 0)
    first = accept(*run, "--steps", 3, "--export", folder / "trained")
    assert "step 3" in first.stdout
    assert "loss by step  1: " in first.stdout
    straight = answered(*run, "--steps", 4)["losses"]
    assert sorted(straight, reverse=True) == straight
    on = answered(*run, "--weights", folder / "trained")["losses"]
    assert on == straight[3:]
    words = "trained exists already"
    refuse(*run, "--export", folder / "trained", words=words, folder=folder)


def test_the_optimizer_is_that_of_the_flags(plan: Path, pool: Pool):
    """The rate of the first step is half of the stated one, which the second step's loss shows."""
    flags = ("--learning-rate", 0.02, "--rate-warmup", 2, "--weight-decay", 0, "--clip-norm", 0.5)
    losses = answered("run", plan, "--local", "--warmup", 0, "--steps", 3, *flags)["losses"]
    settings = RunSettings(
        steps=3,
        optimizer=OptimizerSettings(
            learning_rate=0.02,
            weight_decay=0.0,
            clip_norm=0.5,
            schedule=RateSchedule(warmup_steps=2, decay_steps=None),
        ),
    )
    lowered = lower(read_plan(plan))
    assert losses == list(run_lowered(lowered, settings, pool=pool).losses)
    usual = run_lowered(lowered, RunSettings(steps=3), pool=pool).losses
    assert losses[0] == usual[0]
    assert losses[1] != usual[1]
    refuse(
        "run", plan, "--local", "--learning-rate", 0, words="learning rate must be > 0", folder=plan.parent
    )


def test_a_watched_run_says_what_ranks_held(plan: Path):
    folder = plan.parent
    run = ("run", plan, "--local", "--warmup", 0, "--trace")
    accept(*run, folder / "a.run.json")
    assert read_trace(folder / "a.run.json").memory == ()
    accept(*run, folder / "b.run.json", "--watch-memory")
    watched = read_trace(folder / "b.run.json")
    assert {sample.rank for sample in watched.memory} == set(read_plan(plan).ranks)
    assert min(sample.num_bytes for sample in watched.memory) > 0


def test_places_that_cannot_be_written_are_refused_before_the_work(plan: Path, job: Path):
    folder = plan.parent
    (folder / "file").touch()
    places = [(folder, "this is a folder"), (folder / "file" / "x.json", "no folder")]
    if Path("/proc/self").exists():
        places.append((Path("/proc/x.json"), "no folder"))  # although its permissions allow it to root
    for index, words in places:
        refuse("run", plan, "--local", "--trace", index, words=words, folder=folder)
        refuse("simulate", plan, "--trace", index, words=words, folder=folder)
        refuse("plan", job, "-o", index, words=words, folder=folder)
        refuse("calibrate", job, "-o", index, words=words, folder=folder)
        refuse("demo", "--out", folder / "demo", "--json", index, words=words, folder=folder)
        refuse("calibrate", job, "-o", folder / "p.json", "--rows", index, words=words, folder=folder)


def folder_of_masks(folder: Path) -> Path:
    """A data folder whose examples differ in mask."""
    make(folder, num_samples=14, seed=2)
    index = folder / "data.jsonl"
    masks = ("causal", "multimodal", "gemma", "multimodal_items")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    masked = (line | {"mask": masks[number // 4]} for number, line in enumerate(lines))
    index.write_text("".join(json.dumps(line) + "\n" for line in masked))
    return folder


def test_steps_go_through_a_folder(job: Path):
    """Four ranks, the language model's tokens on two of them; every step has other lengths and masks."""
    folder = folder_of_masks(job.with_name("data"))
    job.write_text(JOB.replace("llm: {pp: 2}", "llm: {pp: 1, cp: 2}"))
    plan = job.with_name("plan.json")
    accept("plan", job, "--strategy", "cornstarch", "--data", folder, "-o", plan)
    run = ("run", plan, "--local", "--warmup", 0, "--data", folder, "--json")
    ahead = json.loads(accept(*run, "--steps", 4, "--next-samples").stdout.splitlines()[-1])
    assert len(set(ahead["losses"])) == 4
    again = json.loads(accept(*run, "--steps", 2).stdout.splitlines()[-1])["losses"]
    assert ahead["losses"][0] == again[0]
    assert ahead["losses"][1] != again[1]
    words = "--next-samples reads a data folder"
    refuse("run", plan, "--local", "--next-samples", words=words, folder=job.parent)


def test_data_of_another_batch_are_refused_before_anything_starts(job: Path):
    """Texts of as many bytes in all: read as one row, tokens of one sample would be the next one's."""
    plan = job.with_name("plan.json")
    for name, lengths in (("even", (6, 6, 6, 6)), ("uneven", (9, 3, 9, 3))):
        job.with_name(name).mkdir()
        lines = (json.dumps({"id": i, "segments": [{"text": "x" * num}]}) for i, num in enumerate(lengths))
        (job.with_name(name) / "data.jsonl").write_text("\n".join(lines))
    job.write_text(JOB.replace("  samples: 4\n", "  samples: 4\n  microbatch_samples: 2\n"))
    accept("plan", job, "--strategy", "cornstarch", "--data", job.with_name("even"), "-o", plan)
    for how in ("--local", "--emulate"):
        run = ("run", plan, how, "--data")
        words = "uneven: sample 0 has text[0] of 11 tokens, in the plan text[0] of 8 tokens"
        refuse(*run, job.with_name("uneven"), words=words, folder=job.parent)


def test_a_run_goes_on_with_its_own_data_alone(job: Path):
    """Examples, the batches behind the first, and the rule that groups them; what no step reads is free."""
    folder, saves, plan = (
        folder_of_masks(job.with_name("data")),
        job.with_name("saves"),
        job.with_name("p.json"),
    )
    accept("plan", job, "--strategy", "cornstarch", "--data", folder, "-o", plan)
    lines = (folder / "data.jsonl").read_text().splitlines()
    run = ("run", plan, "--local", "--warmup", 0, "--checkpoint", saves)
    mine = ("--data", folder, "--next-samples")
    first = answered(*run, *mine, "--steps", 2)["losses"]
    again, own = (*run, "--steps", 3, "--resume"), "is of data examples "
    refuse(*again, words=f"{own}|this run of random", folder=job.parent)
    refuse(*again, "--data", folder, words=own, folder=job.parent)
    refuse(*again, *mine, "--job", job, words=f"{own}|grouped by job", folder=job.parent)
    for number, part in ((4, "id"), (5, "segments"), (13, "id")):
        (folder / "data.jsonl").write_text("\n".join(changed(lines, number, part)))
        if number < 12:  # three batches of four are read
            refuse(*again, *mine, words=own, folder=job.parent)
    straight = answered(*run[:-2], *mine, "--steps", 3)["losses"]
    assert answered(*again, *mine)["losses"] == straight
    assert straight[:2] == first


def changed(lines: list[str], number: int, part: str) -> list[str]:
    """The lines of a data folder with one example's id or one letter of its last text changed."""
    line = json.loads(lines[number])
    if part == "id":
        line["id"] += 1000
    else:
        text = next(each for each in reversed(line["segments"]) if "text" in each)
        text["text"] = text["text"][:-1] + "#"
    return [json.dumps(line) if index == number else each for index, each in enumerate(lines)]


def test_key_exchange_is_a_layout_of_the_job(job: Path):
    job.write_text(JOB.replace("llm: {pp: 2}", "llm: {pp: 1, cp: 2, key_exchange: ring}"))
    plan = job.with_name("plan.json")
    accept("plan", job, "--strategy", "cornstarch", "-o", plan)
    assert "ring attention" in accept("simulate", plan, "--profile", "H100", "--json").stdout
    losses = answered("run", plan, "--local")["losses"]
    job.write_text(JOB.replace("llm: {pp: 2}", "llm: {pp: 1, cp: 2}"))
    gathering = job.with_name("gathering.json")
    accept("plan", job, "--strategy", "cornstarch", "-o", gathering)
    gathered = answered("run", gathering, "--local")["losses"]
    assert losses == pytest.approx(gathered, rel=1e-5)
    job.write_text(JOB.replace("llm: {pp: 2}", "llm: {pp: 1, cp: 2, key_exchange: all-to-all}"))
    words = "cp must divide the 1 key/value heads"
    refuse("plan", job, "--strategy", "cornstarch", "-o", plan, words=words, folder=job.parent)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", 10**30),
        ("--steps", 0),
        ("--warmup", 10**18),
        ("--warmup", -1),
        ("--repetitions", 10**9),
        ("--timeout", 1e300),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
        ("--timeout", 0),
    ],
)
def test_numbers_out_of_bounds(plan: Path, option: str, value: object):
    words = f"{option.removeprefix('--')} must be"
    refuse("run", plan, "--local", option, value, words=words, folder=plan.parent)


def test_next_samples_are_grouped_as_the_strategy_groups_them(job: Path, pool: Pool):
    """As `search --batches` judges the plan; without its job, each stands where one of the first stood."""
    folder = folder_of_masks(job.with_name("data"))
    job.write_text(JOB.replace("precision: float32", "precision: float64"))
    file = job.with_name("plan.json")
    accept("plan", job, "--strategy", "entrain", "--data", folder, "-o", file)
    plan, loaded = read_plan(file), load_job(job)
    of_both: list[RunResult] = []
    for named in (job, None):
        options = RunOptions(data=str(folder), next_samples=True, job=named, steps=3)
        settings, source = prepare(options, plan)
        of_both.append(run_lowered(lower(plan), settings, source=source, pool=pool))
    grouped, placed = of_both
    cost = cost_of(loaded, None, None)
    batches = [step.plan.batch for step in placed.plans]
    assert [step.plan.batch for step in grouped.plans] == batches
    ruled = [next_step(plan, batch, loaded, cost) for batch in batches[1:]]
    assert [step.plan for step in grouped.plans][1:] == ruled
    assert [step.plan for step in placed.plans][1:] == [next_plan(plan, batch) for batch in batches[1:]]
    assert grouped.plans[1].plan.microbatches != placed.plans[1].plan.microbatches
    for one, other in zip(grouped.losses, placed.losses, strict=True):
        assert abs(one - other) <= 1e-10 * abs(one)


def test_the_job_that_groups_samples_has_to_be_the_plans(job: Path, plan: Path):
    folder = folder_of_masks(job.with_name("data"))
    run = ("run", plan, "--local", "--data", folder, "--job", job)
    refuse(*run, words="--job groups the next samples; want --next-samples", folder=job.parent)
    job.write_text(JOB.replace("memory_gib: 1", "memory_gib: 2"))
    words = "its cluster is not the plan's; want the job that the plan was made of"
    refuse(*run, "--next-samples", words=words, folder=job.parent)
