"""Files with random damage get one line that says what is wrong, never a traceback."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import JOB, accept, workbench
from tests.plans import sealed

VALUES = (None, True, -1, 0, 2**63, 10**30, 1e308, 1.5, "", "nan", "\ud800", [], {}, [[]], {"a": 1}, "0F0")
NUM_DAMAGES = 25


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values of a JSON document."""
    if path:
        yield path
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in members:
        yield from places(value, (*path, key))


def damage(tree: Any, rng: random.Random) -> Any:
    """One value replaced, dropped or doubled."""
    *above, last = rng.choice(list(places(tree)))
    holder = tree
    for key in above:
        holder = holder[key]
    kind = rng.random()
    if kind < 0.7:
        holder[last] = rng.choice(VALUES)
    elif kind < 0.85:
        del holder[last]
    elif isinstance(holder, list):
        holder.append(holder[last])
    else:
        holder[f"{last}x"] = holder[last]
    return tree


def assert_spoken(*arguments: object) -> None:
    """Taken, or refused in one line."""
    result = workbench(*arguments)
    if result.exit_code != 0:
        assert result.exit_code == 2, repr(result.exception)
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < 1000, result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "job.yaml").write_text(JOB)
    accept("plan", folder / "job.yaml", "-o", folder / "plan.json")
    accept("simulate", folder / "plan.json", "--profile", "H100", "--trace", folder / "sim.json")
    return folder


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_damaged_jobs(tmp_path: Path, seed: int) -> None:
    text = yaml.dump(damage(yaml.safe_load(JOB), random.Random(seed)))
    (tmp_path / "job.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_spoken("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json")


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_damaged_plans(made: Path, tmp_path: Path, seed: int) -> None:
    document = json.loads((made / "plan.json").read_text())
    damage(document["plan"], random.Random(seed))
    document = sealed(document)  # as from a program that writes plans, and has a bug
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert_spoken("simulate", tmp_path / "plan.json", "--profile", "H100")


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_damaged_traces(made: Path, tmp_path: Path, seed: int) -> None:
    document = damage(json.loads((made / "sim.json").read_text()), random.Random(seed))
    (tmp_path / "sim.json").write_text(json.dumps(document))
    assert_spoken("compare", made / "sim.json", tmp_path / "sim.json")
    assert_spoken("compare", tmp_path / "sim.json", made / "sim.json")


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
    result = workbench("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert words in result.stderr


def test_negative_sizes_in_a_plan(made: Path, tmp_path: Path) -> None:
    document = json.loads((made / "plan.json").read_text())
    document["plan"]["model"]["modules"][0]["layers"][1]["operators"][0]["width"] = -1
    (tmp_path / "plan.json").write_text(json.dumps(sealed(document)))
    result = workbench("simulate", tmp_path / "plan.json", "--profile", "H100")
    assert result.exit_code == 2
    assert "width must be 0 to" in result.stderr
