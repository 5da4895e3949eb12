"""The size of the project is counted as its docstring says."""

import ast
import json
import subprocess
from pathlib import PurePosixPath

import pytest

from tests import size

MODULE = '''"""A module."""

LIMIT = 3


class Shown:
    """Three lines of a method, one inside it."""

    def method(self):
        def inner(): ...
        return inner


@property
def shown(
    x,
):
    return x


async def _hidden(): ...
'''


def test_lengths_and_public_names():
    tree = ast.parse(MODULE)
    assert size.public_names(tree) == ["Shown", "shown"]
    assert sorted(size.function_lines(tree)) == [1, 1, 3, 4]


def test_sums_by_top_level_folder():
    sources = {
        PurePosixPath("workbench/a.py"): MODULE,
        PurePosixPath("tests/deep/b.py"): "def _private():\n    pass\n",
        PurePosixPath("README.md"): "no code",
    }
    found = size.measure(sources)
    assert found["lines"]["workbench"] == MODULE.count("\n")
    assert found["lines"]["all"] == MODULE.count("\n") + 2
    assert found["files"] == dict.fromkeys(size.FOLDERS, 0) | {"workbench": 1, "tests": 1, "all": 2}
    assert found["public_names"]["all"] == 2
    assert (found["functions"], found["function_median"]) == (5, 2)


def test_files_that_name_a_thing():
    strategy = size.REPRESENTATIVES["strategy"]
    named = "plan as encoders-replicated does"
    counted = ["README.md", "workbench/one.py", "workbench/strategies/encoders_replicated.py"]
    others = ["tests/test_one.py", "CHANGELOG.md", "experiments/one.py"]
    sources = {PurePosixPath(path): named for path in [*others, *counted[:2]]}
    sources[PurePosixPath(counted[2])] = "only its path"
    sources[PurePosixPath("workbench/other.py")] = "another: so_encoders_replicated"
    found = [str(path) for path in size.naming(strategy, sources)]
    assert found == counted


def test_every_representative_is_there():
    sources = size.here()
    assert all(size.naming(one, sources) for one in size.REPRESENTATIVES.values())


def test_a_commit_is_read_out_of_git(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "ä.py").write_text("x = 'ü'\n")
    (tmp_path / "workbench" / "empty.py").write_text("")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    (tmp_path / "workbench" / "ä.py").write_text("changed\n")
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert {str(path): text for path, text in size.at("HEAD").items()} == {
        "workbench/empty.py": "",
        "workbench/ä.py": "x = 'ü'\n",
    }
    with pytest.raises(ValueError, match="--at nothing: "):
        size.at("nothing")


def test_json_has_the_keys(capsys, monkeypatch):
    monkeypatch.setattr(size, "here", lambda: {PurePosixPath("sim/a.py"): MODULE})
    assert size.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"lines", "files", "public_names", "function_median", "function_p90", "to_add"} <= found.keys()
    assert size.main(["--json", "--at", "no-such-commit"]) == 2
    assert capsys.readouterr().err.startswith("error: --at no-such-commit: ")
