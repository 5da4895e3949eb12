"""The documentation says what holds: links, commands, what they print, blocks of code, generated pages."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from docs.generate.commands import commands, flags
from docs.generate.markdown import MADE_BY, anchor, table
from docs.generate.pages import DOCS, PAGES, README, stale_pages
from docs.generate.records import field_rows, records_in
from tests.command_line import accept
from workbench.cost.execution import Execution
from workbench.cost.profile import Profile
from workbench.job.schema import JobSpec
from workbench.plan.plan import Plan
from workbench.trace import Trace

ROOT = README.parent
PAGES_OF_TEXT = (README, ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md")))
MOST_README_LINES = 150

FENCE = re.compile(r"^(?P<mark><!-- runs -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
INLINE = re.compile(r"`((?:workbench|python -m|torchrun) [^`]+)`")
MODULE_FLAG = re.compile(r"--[a-z][a-z-]+")


@dataclass(frozen=True, slots=True)
class Shown:
    """A command in a page, what the page prints below it, and whether the tests run it."""

    page: str
    line: str
    output: str = ""
    runs: bool = False


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    return {anchor(heading.replace("`", "")) for heading in HEADING.findall(prose(path))}


def shown_in(path: Path) -> Iterator[Shown]:
    page = str(path.relative_to(ROOT))
    for block in FENCE.finditer(path.read_text(encoding="utf-8")):
        if block["kind"] == "console":
            for part in re.split(r"^\$ ", block["text"], flags=re.M)[1:]:
                line, _, output = part.partition("\n")
                yield Shown(page, line, output, runs=block["mark"] is not None)
        elif block["kind"] == "bash":
            yield from (Shown(page, line.partition(" #")[0].strip()) for line in block["text"].splitlines())
    yield from (Shown(page, " ".join(line.split())) for line in INLINE.findall(prose(path)))


SHOWN = [shown for path in PAGES_OF_TEXT for shown in shown_in(path)]
LINES = sorted({shown.line for shown in SHOWN})


def test_the_readme_is_a_door():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize("path", PAGES_OF_TEXT, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    broken = []
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+://", link):
            continue
        name, _, fragment = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_file() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_menu():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(leaves(menu)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def leaves(menu: object) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from leaves(part)


@pytest.mark.parametrize("line", LINES)
def test_commands_exist(line):
    program, *words = shlex.split(line)
    if program == "workbench":
        workbench_takes(words)
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program in ("python", "torchrun"):
        module_takes(words)
    else:
        pytest.fail(f"what is {program!r}?")


def workbench_takes(words: list[str]) -> None:
    """The command is there and knows the flags; files of the repository that it names are there."""
    known = dict(commands())
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    if [name] == words and any(command.startswith(f"{name} ") for command in known):
        return
    assert name in known
    assert {word for word in words if word.startswith("-")} <= flags(known[name])
    read = [word for before, word in pairwise(words) if before not in ("-o", "--profile")]
    assert all((ROOT / word).is_file() for word in read if word.startswith("examples/"))


def module_takes(words: list[str]) -> None:
    """The module or script is there, and flags behind it stand in its sources or its package's.

    Flags of a bench are the parameters of its function.
    """
    if "-m" in words:
        name, *rest = words[words.index("-m") + 1 :]
        if name == "pytest":
            assert all((ROOT / word).is_file() for word in rest if word.startswith("tests/"))
            return
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folders = (Path(spec.origin).parent, ROOT / "experiments" / "harness")
        sources = [source for folder in folders for source in folder.glob("*.py")]
    else:
        script = next(word for word in words if word.endswith(".py"))
        rest, sources = words[words.index(script) + 1 :], [ROOT / script]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    taken = [word for word in rest if MODULE_FLAG.fullmatch(word) and f'"{word}"' not in text]
    parameters = [f"{word.removeprefix('--').replace('-', '_')}: " for word in taken]
    assert [name for name in parameters if "@bench(" not in text or name not in text] == []


def test_shown_commands_print_what_the_pages_show(tmp_path, monkeypatch):
    """Page by page, in order; the pages' examples lie where their commands look for them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    running = [shown for shown in SHOWN if shown.runs]
    assert len(running) >= 4
    for shown in running:
        done = accept(*shlex.split(shown.line)[1:])
        assert stripped(done.stdout) == stripped(shown.output), f"{shown.page}: {shown.line}"


def stripped(text: str) -> list[str]:
    """Lines without the spaces at their ends, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").split("\n")


def test_python_blocks_run(monkeypatch):
    """But for those of the runtime, which would load torch: what they import is there, and they compile."""
    blocks = [
        b["text"] for p in PAGES_OF_TEXT for b in FENCE.finditer(p.read_text()) if b["kind"] == "python"
    ]
    assert len(blocks) >= 4
    monkeypatch.chdir(ROOT)
    for text in blocks:
        code = compile(text, "a block of code", "exec")
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        if not any((node.module or "").startswith("runtime.") for node in imports):
            exec(code, {})
        for node in imports:
            source = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            assert {alias.name for alias in node.names} <= defined_in(source), source


def defined_in(source: Path) -> set[str]:
    """Functions, classes, constants and modules that a module or package offers."""
    if not source.is_file():
        return {path.stem for path in source.with_suffix("").glob("*.py")}
    body = ast.parse(source.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return names | {t.id for t in targets if isinstance(t, ast.Name)}


def test_generated_pages_are_fresh():
    assert stale_pages() == [], "renew them: python -m docs.generate"


def test_a_stale_page_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr("docs.generate.pages.DOCS", tmp_path)
    monkeypatch.setattr("docs.generate.pages.PAGES", {"a.md": lambda: "new", "b.md": lambda: "as it was"})
    (tmp_path / "b.md").write_text("as it was")
    assert stale_pages() == ["a.md"]
    (tmp_path / "a.md").write_text("old")
    assert stale_pages() == ["a.md"]
    (tmp_path / "a.md").write_text("new")
    assert stale_pages() == []


def test_reference_pages_say_who_made_them():
    made = [name for name in PAGES if name.endswith(".md") and not name.startswith("..")]
    assert all((DOCS / name).read_text(encoding="utf-8").startswith(MADE_BY) for name in made)


@pytest.mark.parametrize("root", [Plan, Profile, Execution, Trace, JobSpec])
def test_every_field_of_a_file_has_a_meaning(root):
    silent = [
        f"{record.__name__}.{name}"
        for record in records_in(root)
        for name, _, _, told in field_rows(record)
        if not told
    ]
    assert silent == []


def test_cells_of_a_table_stay_in_their_row():
    assert table(("a", "b"), [("x|y", "two\nlines")]) == "| a | b |\n| --- | --- |\n| x\\|y | two lines |"
