"""Training on batches that a server prepared, and the commands around it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.data.scenes import make
from runtime.preprocess.connection import SILENT_S
from runtime.preprocess.images import SquareRule
from runtime.preprocess.source import rule_of
from tests.command_line import JOB, accept, answered, refuse, workbench
from tests.preprocess_service import WAIT_S, break_image, serving
from workbench.job.job import load_job

NUM = 14
AUDIO_LINES = slice(JOB.index("    audio:\n"), JOB.index("    llm:\n"))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A vision-language model on three ranks."""
    text = JOB[: AUDIO_LINES.start] + JOB[AUDIO_LINES.stop :]
    text = text.replace(", audio: {each: 1}", "").replace("  audio: {pp: 1}\n", "")
    (tmp_path / "job.yaml").write_text(text)
    make(tmp_path / "data", num_samples=NUM, seed=2, kinds=("image",))
    return tmp_path / "job.yaml"


def losses(*arguments: object) -> list[float]:
    return answered(*arguments)["losses"]


def test_served_batches_train_like_those_of_the_folder(job: Path) -> None:
    """To the last bit, over more steps than the folder has batches."""
    folder, plan = job.with_name("data"), job.with_name("plan.json")
    accept("plan", job, "--strategy", "cornstarch", "--data", folder, "-o", plan)
    run = ("run", plan, "--local", "--warmup", 0, "--steps", 5, "--next-samples", "--data")
    rule = rule_of(load_job(job).model)
    assert rule == SquareRule(image_px=32, patch_px=8)
    own = losses(*run, folder)
    with serving(folder, rule=rule) as server:
        assert losses(*run, server.address) == own
    assert len(own) == 5  # three whole batches of four, and on with the first
    with serving(folder, rule=SquareRule(image_px=16, patch_px=8)) as server:
        words = "the encoder reads images of (3, 32, 32), the server makes (3, 16, 16)"
        refuse(*run, server.address, words=words, folder=job.parent)
    words = "--data-keys are for a preprocessing server"
    refuse(*run, folder, "--data-keys", "x.json", words=words, folder=job.parent)


def test_serve_run_status(job: Path) -> None:
    folder = job.with_name("data")
    example = next(n for n in range(NUM) if (folder / "images" / f"{n:05d}-0.png").exists())
    broken = break_image(folder, example)
    keys = job.with_name("keys")
    accept("preprocess", "keys", keys)
    options = [
        "--image-px",
        32,
        "--patch-px",
        8,
        "--batch-size",
        7,
        "--malformed",
        "skip",
        "--keys",
        keys / "server.json",
    ]
    command = ["-c", "from workbench.cli.app import main; main()", "preprocess", "serve", folder, *options]
    with subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        client = ("--keys", keys / "trainer.json", "--json")
        ran = accept("preprocess", "run", address, "--batches", 2, "--name", "t", *client, "--step-ms", 1)
        found = json.loads(ran.stdout)
        assert (found["first_position"], found["examples"]) == (0, NUM - 1)
        assert found["skipped"] == [[example, str(broken)]]
        assert 0 < found["stall_ms_p50"] <= found["stall_ms_p99"] < 1000 * WAIT_S
        on = accept("preprocess", "run", address, "--batches", 1, "--name", "t", *client[:2])
        assert "left out" in on.stdout
        status = json.loads(accept("preprocess", "status", address, *client).stdout)
        assert (status["producers"], status["lost"]) == (1, 0)
        assert status["skipped"][0][0] == example
        (producer,) = status["local"].values()
        server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S) == 0
    assert not Path(f"/proc/{producer}/stat").exists()


def test_a_server_that_read_a_job_ends_without_a_word(job: Path) -> None:
    """Libraries that it loaded for the job list no objects of theirs on stderr."""
    command = [
        "-c",
        "from workbench.cli.app import main; main()",
        "preprocess",
        "serve",
        job.with_name("data"),
    ]
    options = ["--job", job, "--seconds", 0.5, "--open"]
    done = subprocess.run(
        [sys.executable, *map(str, (*command, *options))], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("serving ")
    assert done.stderr == ""


def test_a_silent_server_is_named_before_the_wait_ends(job: Path) -> None:
    folder, limit = job.with_name("data"), SILENT_S + 0.2
    address = "tcp://127.0.0.1:9"
    for asked in (
        ("status", address, "--timeout", limit),
        ("run", address, "--timeout", limit),
        ("produce", address, "--data", folder, "--silence", limit),
    ):
        done = workbench("preprocess", *asked)
        told, error = done.stderr.splitlines()
        assert told == (
            f"workbench: waiting for the server at {address}, at most {limit:g} s; "
            "a server with keys answers nobody without --keys"
        )
        assert error.startswith(f"workbench: error: no server at {address}: ")
        assert done.exit_code == 2


def test_odd_options_are_refused(job: Path) -> None:
    folder = job.with_name("data")
    serve = ("preprocess", "serve", folder, "--seconds", 5)  # refused at once, or found out in 5 s
    keys = job.with_name("keys")
    accept("preprocess", "keys", keys)
    for options, words in (
        (("--reorder", "all"), "--reorder must be one of none, within, both, got 'all'"),
        (("--malformed", "ignore"), "--malformed must be one of fatal, skip, got 'ignore'"),
        (("--batch-size", NUM + 1), f"batch size: want 1 to {NUM}, the folder's examples"),
        (("--window", 0), "window: want >= 1"),
        (("--image-px", 8), "want a patch of 1 to 8 px"),
        (("--image-px", 28, "--max-pixels", 10), "exclude each other"),
        (("--host", "0.0.0.0"), "want keys"),
        (("--host", "203.0.113.7", "--keys", folder / "data.jsonl"), "no JSON object"),
        (("--lease", 0), "want 0 < lease_s"),
        (("--lease", "nan"), "want 0 < lease_s"),
        (("--producers", -1), "producers: want 0 to 1024"),
        (("--seconds", "nan"), "--seconds must be > 0"),
        (("--host", "203.0.113.7", "--keys", keys / "server.json"), "cannot listen there"),
        (("--port", 99_999), "port: want 1 to 65535"),
    ):
        refuse(*serve, *options, words=words, folder=job.parent)
    for verb in ("run", "status"):
        for address in ("nowhere", "tcp://", "http://x:1"):
            refuse("preprocess", verb, address, words="want tcp://HOST:PORT", folder=job.parent)
        refuse(
            "preprocess", verb, "tcp://127.0.0.1:9", "--timeout", 0.1, words="no server", folder=job.parent
        )
    (folder / "data.jsonl").write_text('{"id": 1, "segments": [{"text": "a"}, {"audio": "x.wav"}]}\n')
    refuse(*serve, "--batch-size", 1, words="clips are not preprocessed here", folder=job.parent)
