"""What `elastic --resume` goes on from: its own saves, and no other training's."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.data.scenes import make
from runtime.elastic.progress import STAMP
from runtime.state.tensor_files import TENSORS
from tests.command_line import JOB, accept, refuse


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and beside it saves of its first step on random data, and a folder of other data."""
    job = tmp_path_factory.mktemp("elastic") / "job.yaml"
    job.write_text(JOB.replace("  samples: 4\n", "  samples: 8\n"))
    make(job.with_name("data"), num_samples=8, seed=0)
    accept("elastic", job, "--nodes", 2, "--steps", 1, "--checkpoint", job.with_name("saves"))
    return job


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (("--seed", 7), {}, "is of seed 0, this training of 7"),
        ((), {"word_embeddings: false": "word_embeddings: true"}, "is of graph "),
        ((), {"word_embeddings: false": "word_embeddings: false, rope_theta: 500"}, "is of graph "),
        ((), {"precision: float32": "precision: float64"}, "precision float32, this training of float64"),
        ((), {"text_tokens: 16": "text_tokens: 17"}, "is of data random samples "),
        (("--data", "data"), {}, "is of data random samples |, this training of examples "),
    ],
    ids=["seed", "tied", "rope", "precision", "samples", "data"],
)  # fmt: skip
def test_saves_of_another_training_are_refused_before_any_process(
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    change: dict[str, str],
    words: str,
):
    """Other weights, other numbers or other samples: the losses would be no training's."""
    monkeypatch.chdir(saved.parent)
    text = saved.read_text()
    for before, after in change.items():
        assert before in text
        text = text.replace(before, after)
    saved.with_name("other.yaml").write_text(text)
    on = ("elastic", "other.yaml", "--nodes", 2, "--steps", 2, "--resume", "saves")
    refuse(*on, *options, words=words, folder=saved.parent)


def test_other_nodes_go_on(saved: Path):
    on = accept("elastic", saved, "--nodes", 3, "--steps", 2, "--resume", saved.with_name("saves"))
    assert "of step 2" in on.stdout


def halve(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_last_bit(path: Path) -> None:
    held = path.read_bytes()
    path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))


@pytest.fixture(scope="module")
def further(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saves of one and of two steps."""
    folder = tmp_path_factory.mktemp("further") / "saves"
    shutil.copytree(saved.with_name("saves"), folder)
    accept("elastic", saved, "--nodes", 2, "--steps", 2, "--resume", folder, "--checkpoint", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step1", "step2"]
    return folder


@pytest.mark.parametrize(
    ("name", "tear", "words"),
    [
        (f"part0/{TENSORS}", halve, f"part0/{TENSORS} is not "),
        (f"part0/{TENSORS}", flip_last_bit, f"part0/{TENSORS} is not "),
        (STAMP, halve, f"{STAMP} cannot be read ("),
        (STAMP, Path.unlink, f"{STAMP} cannot be read ("),
    ],
    ids=["half-a-part", "a-bit", "half-a-stamp", "killed-before-the-stamp"],
)
def test_a_torn_save_is_told_before_an_older_one_goes_on(
    saved: Path, further: Path, tmp_path: Path, name: str, tear: Callable[[Path], None], words: str
):
    saves = tmp_path / "saves"
    shutil.copytree(further, saves)
    tear(saves / "step2" / name)
    told = accept("elastic", saved, "--nodes", 2, "--steps", 2, "--resume", saves)
    assert "of step 2" in told.stdout
    (warning,) = (line for line in told.stderr.splitlines() if "warning" in line)
    assert warning.startswith(f"workbench: warning: {saves / 'step2'} holds no whole progress: {words}")
    assert warning.endswith("; skipped, resuming from step1 with step 2")


def test_where_nothing_else_is_saved_a_torn_save_is_refused_by_name(saved: Path, tmp_path: Path):
    saves = tmp_path / "saves"
    shutil.copytree(saved.with_name("saves"), saves)
    (saves / "step1" / STAMP).unlink()
    refuse(
        "elastic", saved, "--nodes", 2, "--steps", 2, "--resume", saves,
        words=f"{saves / 'step1'} holds no whole progress: {STAMP} cannot be read (", folder=tmp_path,
    )  # fmt: skip
