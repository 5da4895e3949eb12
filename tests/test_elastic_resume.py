"""What `elastic --resume` goes on from: its own saves, and no other training's."""

from pathlib import Path

import pytest

from runtime.data.scenes import make
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
