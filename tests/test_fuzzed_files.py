"""Whatever bytes stand in a file, a command takes them or says in one line what is wrong."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.command_line import JOB, accept, refuse, workbench
from tests.plans import sealed
from tests.test_fit import ALL
from workbench.calibrate.measurement import read_measurement, write_measurement
from workbench.cost.profile import load_profile, write_profile

MANY_TREES = 45
FEW = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
DEEP = 100_000  # brackets
CSV = (
    b"hidden,layers,heads,sequence,global_batch,tp,gpu\n1024,4,16,512,8,2,A100-80GB\n2048,2,16,512,8,1,H100\n"
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values of a JSON document."""
    if path:
        yield path
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in members:
        yield from places(value, (*path, key))


def assert_spoken(*arguments: object) -> None:
    """Taken, or refused in one line."""
    result = workbench(*arguments)
    if result.exit_code != 0:
        assert result.exit_code == 2, repr(result.exception)
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < 1000, result.stderr


@dataclass(frozen=True)
class Kind:
    """A kind of file: a good one, and what reads it. `take` gets the folder and the damaged file."""

    name: str
    good: str
    take: Callable[[Path, Path], None]
    is_tree: bool = True


def _plan(folder: Path, path: Path) -> None:
    del folder
    assert_spoken("simulate", path, "--profile", "H100")


def _job(folder: Path, path: Path) -> None:
    assert_spoken("plan", path, "-o", folder / "new.json")


def _trace(folder: Path, path: Path) -> None:
    assert_spoken("compare", path, folder / "trace.json")
    assert_spoken("compare", folder / "trace.json", path)


def _profile(folder: Path, path: Path) -> None:
    assert_spoken("simulate", folder / "plan.json", "--profile", path)


def _table(folder: Path, path: Path) -> None:
    assert_spoken("predict", path, "-o", folder / "out.csv")


def _rows(folder: Path, path: Path) -> None:
    """No command reads rows without measuring first."""
    del folder
    with suppress(ValueError):
        read_measurement(path)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("plan", "plan.json", _plan),
        Kind("job", "job.yaml", _job),
        Kind("trace", "trace.json", _trace),
        Kind("profile", "profile.json", _profile),
        Kind("rows", "rows.jsonl", _rows, is_tree=False),
        Kind("table", "table.csv", _table, is_tree=False),
    )
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("good")
    (made / "job.yaml").write_text(JOB)
    accept("plan", made / "job.yaml", "-o", made / "plan.json")
    accept("simulate", made / "plan.json", "--profile", "H100", "--trace", made / "trace.json")
    write_profile(load_profile("H100"), made / "profile.json")
    write_measurement(ALL, made / "rows.jsonl")
    (made / "table.csv").write_bytes(CSV)
    return made


def _flipped(text: bytes, draw: st.DrawFn) -> bytes:
    at = draw(st.integers(0, len(text) - 1))
    return text[:at] + bytes([text[at] ^ draw(st.integers(1, 255))]) + text[at + 1 :]


def _cut(text: bytes, draw: st.DrawFn) -> bytes:
    return text[: draw(st.integers(0, len(text) - 1))]


def _inserted(text: bytes, draw: st.DrawFn) -> bytes:
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.binary(min_size=1, max_size=8)) + text[at:]


def _removed(text: bytes, draw: st.DrawFn) -> bytes:
    at = draw(st.integers(0, len(text) - 1))
    return text[:at] + text[at + draw(st.integers(1, 200)) :]


def _doubled(text: bytes, draw: st.DrawFn) -> bytes:
    """A line, and so its keys, twice."""
    lines = text.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    return b"".join((*lines[: at + 1], *lines[at:]))


def _number(text: bytes, draw: st.DrawFn) -> bytes:
    """A digit becomes a number that nobody expects."""
    digits = [at for at, byte in enumerate(text) if chr(byte).isdigit()]
    at = draw(st.sampled_from(digits))
    wild = draw(st.sampled_from([b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 5000, b"0x10", b"1e308"]))
    return text[:at] + wild + text[at + 1 :]


@FEW
@given(st.data())
@pytest.mark.parametrize("name", KINDS)
def test_damaged_bytes(folder: Path, name: str, data: st.DataObject):
    kind = KINDS[name]
    damage = data.draw(st.sampled_from([_flipped, _cut, _inserted, _removed, _doubled, _number]))
    text = damage((folder / kind.good).read_bytes(), data.draw)
    path = folder / f"damaged-{kind.good}"
    path.write_bytes(text)
    kind.take(folder, path)


WILD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**30, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["nan", "\x00", "\ud800", "0F0", "STEP", "llm", "../..", "vision>llm"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _change(tree: Any, draw: st.DrawFn) -> None:
    """One value becomes another, or goes, or stands twice."""
    *above, last = draw(st.sampled_from(list(places(tree))))
    for key in above:
        tree = tree[key]
    match draw(st.sampled_from(["another", "another", "none", "twice"])):
        case "another":
            tree[last] = draw(WILD)
        case "none":
            del tree[last]
        case "twice" if isinstance(tree, list):
            tree.append(tree[last])
        case _:
            tree[f"{last}x"] = tree[last]


@settings(FEW, max_examples=MANY_TREES)
@given(st.data())
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.is_tree])
def test_other_values(folder: Path, name: str, data: st.DataObject):
    """Up to three changes; a plan gets its hash anew, as from a program that writes plans and has a bug."""
    kind = KINDS[name]
    text = (folder / kind.good).read_text()
    is_yaml = kind.good.endswith("yaml")
    tree = yaml.safe_load(text) if is_yaml else json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        if list(places(tree)):
            _change(tree, data.draw)
    if name == "plan" and isinstance(tree.get("plan"), dict | list):
        tree = sealed(tree)
    made = yaml.dump(tree) if is_yaml else json.dumps(tree)
    path = folder / f"damaged-{kind.good}"
    path.write_bytes(made.encode("utf-8", "surrogatepass"))
    kind.take(folder, path)


@FEW
@given(st.data())
def test_damaged_measured_rows(folder: Path, data: st.DataObject):
    """Every line is a tree of its own."""
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    line = data.draw(st.sampled_from(lines))
    _change(line, data.draw)
    path = folder / "damaged-rows.jsonl"
    text = "\n".join(map(json.dumps, lines))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _rows(folder, path)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00" * 100, id="zeros"),
        pytest.param(b"\xff\xfe" + "{}".encode("utf-16-le"), id="utf-16"),
        pytest.param(b'\xef\xbb\xbf{"a": 1}', id="byte order mark"),
        pytest.param('{"a": "\xe9"}'.encode("latin-1"), id="latin-1"),
        pytest.param(b"[" * DEEP, id="deep lists"),
        pytest.param(b'{"a":' * DEEP + b"1" + b"}" * DEEP, id="deep objects"),
        pytest.param(b"9" * 10_000, id="huge number"),
        pytest.param(b'{"a": 1, "a": 2}', id="key twice"),
        pytest.param(b"a: &a [*a, *a]", id="an alias of itself"),
        pytest.param(b'"' + b"x" * 100_000, id="no end of text"),
    ],
)
def test_files_of_nothing(folder: Path, name: str, text: bytes):
    path = folder / f"nothing-{KINDS[name].good}"
    path.write_bytes(text)
    KINDS[name].take(folder, path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model_type: llama", "model_type: {a: 1}", "unknown model_type"),
        ("image_size: 32", "image_size: 4", "as large as a patch"),
        ("num_hidden_layers: 2", "num_hidden_layers: 9000000000000000000000", "at most 4096"),
        ("samples: 4", "samples: 2147483648", "less than or equal to 100000"),
        ("memory_gib: 1", "memory_gib: .inf", "less than or equal to"),
    ],
)
def test_numbers_beyond_any_model(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in JOB
    (tmp_path / "job.yaml").write_text(JOB.replace(old, new))
    refuse("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json", words=words, folder=tmp_path)


def test_negative_sizes_in_a_plan(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["plan"]["model"]["modules"][0]["layers"][1]["operators"][0]["width"] = -1
    (tmp_path / "plan.json").write_text(json.dumps(sealed(document)))
    refuse(
        "simulate", tmp_path / "plan.json", "--profile", "H100", words="width must be 0 to", folder=tmp_path
    )
