"""Files made to do harm: paths out of their folder, damaged tables, YAML that is more than values."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from tests.command_line import JOB, accept, refuse, workbench
from tests.tiny_models import two_encoders
from workbench.bounded_file import entry_in, read_bounded
from workbench.data.size_files import read_sizes
from workbench.llm_table.csv_file import inert
from workbench.plain_text import plain
from workbench.plain_yaml import parse_yaml

NUM_DAMAGED = 300


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("../outside.safetensors", "is not inside it", id="above"),
        pytest.param("a/../../outside.safetensors", "is not inside it", id="above-below"),
        pytest.param("ABSOLUTE", "is not inside it", id="absolute"),
        pytest.param("pipe", "is no regular file in it", id="pipe"),
        pytest.param("missing", "is no regular file in it", id="missing"),
        pytest.param(5, "want names of files, got 5", id="number"),
        pytest.param("x\0y", "want names of files", id="zero"),
    ],
)
def test_weights_named_outside_their_folder_are_not_opened(tmp_path, name, message):
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "llm"
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, outside)
    os.mkfifo(folder / "pipe")
    entry = str(outside) if name == "ABSOLUTE" else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": entry}}))
    adapter = adapter_of(two_encoders().module("llm"))
    with pytest.raises(ValueError, match=message) as refused:
        weights_of(tmp_path, adapter)
    assert "unexpected tensors" not in str(refused.value)


def test_entries_in_their_folder_are_found_through_links(tmp_path):
    """As Hugging Face's cache has them."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (tmp_path / "blob").write_text("x")
    (folder / "link").symlink_to("../blob")
    assert entry_in(folder, "link").read_text() == "x"


def saved_data_set(folder: Path) -> Path:
    folder.mkdir()
    pairs = [[8, 16]] * 20 + [None] * 20
    table = pa.table(
        {
            "text_tokens": range(1, 41),
            "image_width": pairs,
            "image_height": pairs,
            "name": ["x" * n for n in range(40)],
        }
    )
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder / "data.arrow"


def codes_of(acts: Iterable[Callable[[], object]]) -> list[int]:
    """How each of them goes in one child process: 0 done, 2 refused, 3 another exception.

    A signal ends the child: it is the last one then, below 0.
    """
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        for act in acts:
            code = 3
            try:
                act()
                code = 0
            except ValueError as error:
                code = 2 if "\n" not in str(error) else 3
            except Exception:
                code = 3
            os.write(far, bytes([code]))
        os._exit(0)
    os.close(far)
    with os.fdopen(near, "rb") as told:
        codes = list(told.read())
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [*codes, end] if end else codes


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_damaged_arrow_file_is_read_or_refused_and_never_crashes(tmp_path):
    """One byte of each, and cut off; on the commit before, 38 of 1,500 ended by SIGBUS or SIGSEGV."""
    file = saved_data_set(tmp_path / "set")
    good, rng = file.read_bytes(), random.Random(0)

    def damaged(number: int) -> None:
        content = bytearray(good)
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        file.write_bytes(content[: rng.randrange(len(content))] if number % 5 == 0 else content)
        read_sizes(file.parent)

    codes = codes_of(partial(damaged, number) for number in range(NUM_DAMAGED))
    assert len(codes) == NUM_DAMAGED, f"file {len(codes) - 1} ended the process by signal {-codes[-1]}"
    assert set(codes) == {0, 2}


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_crash_is_seen():
    """By the process that the damaged files are read in."""
    acts = (lambda: None, lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: None)
    assert codes_of(acts) == [0, -signal.SIGSEGV]


@pytest.mark.parametrize(
    "state",
    ['{"_data_files":[{"filename": 5}]}', "[" * 5000, '{"_data_files":[{"filename":"../../etc/passwd"}]}'],
)
def test_a_data_set_whose_state_is_odd_is_refused(tmp_path, state):
    file = saved_data_set(tmp_path / "set")
    (file.parent / "state.json").write_text(state)
    with pytest.raises(ValueError, match=r"not a saved data set, its state\.json"):
        read_sizes(file.parent)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: !!bool x", "job: line 1: 'x' is no bool", id="bool"),
        pytest.param("a: 1\nb: !!int ''", "job: line 2: '' is no int", id="int"),
        pytest.param("a: !!float x", "job: line 1: 'x' is no float", id="float"),
        pytest.param("a: !!timestamp x", "want plain values, got 'timestamp'", id="timestamp"),
        pytest.param("a: !!python/object/apply:os.system [id]", "want plain values", id="python"),
        pytest.param("a: !!binary aGk=", "want plain values, got 'binary'", id="binary"),
        pytest.param(BOMB, "more than 200000 values", id="aliases"),
        pytest.param("a: &a [*a]", "a value holds itself", id="loop"),
        pytest.param("[" * 200 + "]" * 200, "nested more than 64 deep", id="nested"),
        pytest.param("a: 1\nb: 010", "job: line 2: '010' is 8 in YAML 1.1 only; want a plain", id="octal"),
        pytest.param("a: -0_7", "job: line 1: '-0_7' is -7 in YAML 1.1 only", id="octal-underscored"),
        pytest.param("a: 1:30", "job: line 1: '1:30' is 90 in YAML 1.1 only", id="base-60"),
        pytest.param("a: [0:1.5]", "job: line 1: '0:1.5' is 1.5 in YAML 1.1 only", id="base-60-float"),
        pytest.param('a: "\\e]0;x"', "control characters in", id="escape"),
        pytest.param("a: 1\na: 2", "line 2: key 'a' stands twice", id="twice"),
        pytest.param("? [a]\n: b", "job: unhashable type", id="list-as-key"),
    ],
)
def test_yaml_is_plain_values(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        parse_yaml(text, where="job")
    assert "\n" not in str(refused.value)


def test_dates_are_texts_and_aliases_are_values():
    assert parse_yaml("a: ['010', '1:30', 0, 0.5, -10, 0x10]", where="job") == {
        "a": ["010", "1:30", 0, 0.5, -10, 16]
    }
    assert parse_yaml("a: 2020-13-45\nb: &x [1, 2.5, true, null]\nc: *x", where="job") == {
        "a": "2020-13-45",
        "b": [1, 2.5, True, None],
        "c": [1, 2.5, True, None],
    }


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("\t=1", "'\t=1"),
        ("-3.5", "-3.5"),
        ("-1e-7", "-1e-7"),
        ("+4", "+4"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_texts_that_a_spreadsheet_would_run_are_made_inert(cell, shown):
    assert inert(cell) == shown


@given(st.text(max_size=2000))
def test_what_is_printed_is_one_short_printable_line(text):
    assert len(plain(text)) <= 300
    assert plain(text).isprintable()
    if text.isprintable() and len(text) <= 300:
        assert plain(text) == " ".join(text.split())


def test_endless_files_are_read_no_further_than_their_limit():
    with pytest.raises(ValueError, match="/dev/zero: want at most 1000 bytes"):
        read_bounded(Path("/dev/zero"), 1000)


def test_control_characters_of_a_plan_or_job_do_not_reach_the_terminal(job, plan):
    job.write_text(JOB.replace("name: small", 'name: "\\e[2Jsmall"'))
    refuse("plan", job, "-o", job.with_name("new.json"), words="control characters", folder=job.parent)
    text = plan.read_text()
    plan.write_text(text.replace('"vision"', '"vis\\u001bion"'))
    result = workbench("check", plan)
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    accept("check", "--help")


def test_lines_of_error_are_at_most_300_characters(job):
    job.write_text(JOB + "\n" + "x" * 5000 + ": 1\n")
    result = workbench("plan", job, "-o", job.with_name("new.json"))
    assert result.exit_code == 2
    assert len(result.stderr.rstrip("\n")) <= len("workbench: error: ") + 300
    assert str(job)[:40] in result.stderr
