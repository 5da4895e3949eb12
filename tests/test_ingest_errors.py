"""Recordings that are cut off, something else, or do not belong together: a line each, nothing written."""

import gzip
import json
from pathlib import Path

import pytest

from tests.command_line import accept, refuse
from tests.kineto_files import Shows, document, write_recordings
from tests.test_ingest import planned
from workbench.plan.codec import write_plan
from workbench.trace_files.packed_file import read_packed
from workbench.trace_json import write_trace


@pytest.fixture
def job(tmp_path: Path) -> list[Path]:
    """Recordings of four ranks, beside their plan."""
    plan, simulated = planned("cornstarch")
    write_plan(plan, tmp_path / "plan.json")
    folder = tmp_path / "job"
    folder.mkdir()
    write_recordings([simulated], folder, packed=False)
    return sorted(folder.iterdir())


def refused(words: str, *arguments: object, folder: Path) -> None:
    """In one line, with exit code 2 and nothing written."""
    refuse("ingest", *arguments, "-o", folder / "out.json", words=words, folder=folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(lambda text: text[:-200].encode(), "not JSON, or cut off", id="half"),
        pytest.param(lambda text: b'{"a": 1}', "no recording of torch.profiler", id="another"),
        pytest.param(lambda text: b"[1]", "want a JSON object, got a list", id="list"),
        pytest.param(lambda text: b"[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(lambda text: b"\xff\xfe" * 10, "not UTF-8", id="no-text"),
        pytest.param(
            lambda text: text.replace('"dur":', '"dur": "x", "d":', 1).encode(),
            "want microseconds as dur",
            id="no-number",
        ),
        pytest.param(
            lambda text: gzip.compress(text.encode())[:-400],
            "the gzip file is cut off or damaged",
            id="cut-gzip",
        ),
        pytest.param(
            lambda text: json.dumps(json.loads(text) | {"traceEvents": []}).encode(),
            "record_function(f'PP:{stage}F{microbatch}')|around backwards",
            id="nothing-named",
        ),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, job, content, words):
    other = tmp_path / "other.json"
    other.write_bytes(content(job[0].read_text()))
    refused(f"other.json|{words}", other, folder=tmp_path)


def test_recordings_that_do_not_belong_together_are_refused(tmp_path, job):
    _, simulated = planned("cornstarch")
    other = tmp_path / "other.json"
    text = job[1].read_text()
    other.write_text(text.replace('"world_size": 4', '"world_size": 8'))
    refused(f"{job[0].name}|other.json|world sizes 4 and 8", job[0], other, folder=tmp_path)
    refused(f"{job[1].name}|both are of rank 1", job[1], job[1], folder=tmp_path)
    other.write_text(json.dumps(document([simulated] * 2, 1)))
    refused(f"{job[0].name}|other.json|1 and 2 steps", job[0], other, folder=tmp_path)
    later = document([simulated], 1)
    for event in later["traceEvents"]:
        event["ts"] += 60e6
    other.write_text(json.dumps(later))
    refused(f"{job[0].name}|other.json|step 1 lies 59.", job[0], other, folder=tmp_path)
    other.write_text(text.replace('"rank": 1', '"rank": "one"'))
    refused("other.json|does not say of which rank", job[0], other, folder=tmp_path)


def test_recordings_of_another_plan_are_refused(tmp_path, job):
    _, simulated = planned("cornstarch")
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    refused("rank 3 is missing", *job[:3], "--plan", plan, folder=tmp_path)
    fewer = document([simulated], 3, Shows.WORDS)
    fewer["traceEvents"].remove(next(e for e in fewer["traceEvents"] if e["name"] == "forward"))
    other.write_text(json.dumps(fewer))
    refused("rank 3 recorded 3 F|the plan has 4", *job[:3], other, "--plan", plan, folder=tmp_path)
    refused("pp must be 1 to 4", *job, "--pp", 5, folder=tmp_path)
    refused("--profile is for output of nccl-tests", *job, "--profile", "H100", folder=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("empty|want recordings", empty, folder=tmp_path)
    refused("No such file", tmp_path / "nothing.json", folder=tmp_path)
    simulated_file, out = tmp_path / "plan.sim.json", tmp_path / "own.json"
    accept("ingest", *job, "-o", out)
    write_trace(simulated, simulated_file)
    words = "belongs to no plan; ingest it again"
    refuse("compare", simulated_file, out, words=words, folder=tmp_path)


def test_a_long_file_is_refused_before_it_is_read(tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 10**6))
    with pytest.raises(ValueError, match="want at most 1,000 bytes, this is longer"):
        read_packed(bomb, 1000)
