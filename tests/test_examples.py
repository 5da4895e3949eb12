"""Folders of examples: their pages print what the commands print, and a notebook's cells run."""

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import accept
from tests.test_docs import shown_in, stripped

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("examples/*/README.md"))
NOTEBOOKS = sorted(ROOT.glob("examples/*/notebook.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_commands_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "out").mkdir()
    running = [shown for shown in shown_in(page) if shown.runs]
    assert running
    for shown in running:
        done = accept(*shlex.split(shown.line)[1:])
        assert stripped(done.stdout) == stripped(shown.output), shown.line


@pytest.mark.parametrize("name", ["vlm-64-h100", "audio-text-8-a100"])
def test_the_job_is_what_init_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = [s.line for s in shown_in(ROOT / "examples" / name / "README.md") if " init " in s.line]
    *words, _ = shlex.split(line)[1:]
    target = tmp_path / "job.yaml"
    accept(*words, str(target))
    assert target.read_text() == (ROOT / "examples" / name / "job.yaml").read_text()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell in one process; what it is about holds: freezing more takes less."""
    monkeypatch.chdir(ROOT)
    held: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), held)
    assert held["steps"]["projector"] < held["steps"]["projector and LLM"] < held["steps"]["all"]
    assert held["layers"](held["plans"]["cornstarch"]) != held["layers"](
        held["plans"]["cornstarch-frozen-unaware"]
    )
    assert held["ran"].losses[1] < held["ran"].losses[0]
