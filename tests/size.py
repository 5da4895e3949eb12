"""How large the project is, and how many files one more of a kind touches: now, or at any commit.

    python -m tests.size [--json] [--at COMMIT]

Counted are lines of .py files, as `wc -l` does; names that a module offers: its functions and classes
without an underscore; and the length of every function and method, in lines from `def` to its end, with
its docstring and without decorators.

`to_add` says in how many files a kind of thing is named, by one that is there: whoever adds another such
thing will go through them. A file counts where its path or its text names the representative. Tests do
not count, nor results, logs and changelogs, nor pages that are generated, nor, but for a paper's table,
experiments, which use things.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("workbench", "sim", "runtime", "experiments", "tests", "examples", "docs")
LIBRARY = ("workbench", "sim", "runtime", "docs", "README.md")
TEXT = {".py", ".md", ".csv", ".toml", ".yaml", ".html"}
GENERATED = "<!-- Made by "  # how pages begin that a command makes
HISTORY = {"CHANGELOG.md", "ARCHITECTURE.md", "LOG.md"}

Sources = Mapping[PurePosixPath, str]  # path -> text


@dataclass(frozen=True, slots=True)
class Representative:
    """What stands for its kind: how it is spelt, and in which top-level folders and files it counts."""

    spelling: str  # a regular expression
    roots: tuple[str, ...] = LIBRARY


REPRESENTATIVES = {
    "strategy": Representative(r"\bencoders[-_]replicated\b|\bENCODERS_REPLICATED\b"),
    "schedule": Representative(r"\bthree[-_]phase\b|\bTHREE_PHASE\b"),
    "model_family": Representative(r"mllama|Mllama|MLLAMA"),
    "table": Representative(r"oobleck[/_.]table2_3\b", (*LIBRARY, "experiments")),
    "action_kind": Representative(r"\bREDUCE_GRAD\b"),
}


def here() -> Sources:
    """Files of the working tree."""
    folders = (ROOT / name for name in FOLDERS)
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    return {
        PurePosixPath(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.suffix in TEXT and path.is_file()
    }


def at(commit: str) -> Sources:
    """Files of a commit, out of git's store; ValueError where there is no such commit."""
    try:
        listed = _git("ls-tree", "-r", "-z", commit).decode().split("\0")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"--at {commit}: {error.stderr.decode().strip()}") from None
    blobs = {}
    for line in filter(None, listed):
        about, _, name = line.partition("\t")
        if PurePosixPath(name).suffix in TEXT:
            blobs[PurePosixPath(name)] = about.split()[2]
    return dict(zip(blobs, _contents(list(blobs.values())), strict=True))


def _contents(blobs: Sequence[str]) -> Iterator[str]:
    out = _git("cat-file", "--batch", stdin="\n".join(blobs).encode())
    start = 0
    for _ in blobs:
        header_end = out.index(b"\n", start)
        size = int(out[start:header_end].split()[2])
        yield out[header_end + 1 : header_end + 1 + size].decode()
        start = header_end + 2 + size


def _git(*arguments: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, input=stdin, capture_output=True, check=True).stdout


def measure(sources: Sources) -> dict[str, Any]:
    """The keys of `--json`: counts by top-level folder and of all, lengths of functions, `to_add`."""
    modules = {path: text for path, text in sources.items() if path.suffix == ".py"}
    trees = {path: ast.parse(text) for path, text in modules.items()}
    lengths = [length for tree in trees.values() for length in function_lines(tree)]
    return {
        "lines": _by_folder({path: text.count("\n") for path, text in modules.items()}),
        "files": _by_folder(dict.fromkeys(modules, 1)),
        "public_names": _by_folder({path: len(public_names(tree)) for path, tree in trees.items()}),
        "functions": len(lengths),
        "function_median": median(lengths),
        "function_p90": quantiles(lengths, n=10)[-1],
        "to_add": {kind: len(naming(one, sources)) for kind, one in REPRESENTATIVES.items()},
    }


def public_names(tree: ast.Module) -> list[str]:
    """Functions and classes that a module offers."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def function_lines(tree: ast.Module) -> list[int]:
    """Lines of every function and method, nested ones too."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def naming(one: Representative, sources: Sources) -> list[PurePosixPath]:
    """Files that name it, by the rule above."""
    spelling = re.compile(one.spelling)
    return sorted(
        path
        for path, text in sources.items()
        if path.parts[0] in one.roots
        and path.name not in HISTORY
        and path.parts[:2] != ("experiments", "results")
        and not text.startswith(GENERATED)
        and (spelling.search(str(path)) or spelling.search(text))
    )


def _by_folder(counts: Mapping[PurePosixPath, int]) -> dict[str, int]:
    """Sums of `FOLDERS`, and of them all."""
    found = {
        folder: sum(count for path, count in counts.items() if path.parts[0] == folder) for folder in FOLDERS
    }
    return found | {"all": sum(found.values())}


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    columns = ("lines", "files", "public_names")
    yield f"{'':12}" + "".join(f"{column:>14}" for column in columns)
    for folder in (*FOLDERS, "all"):
        yield f"{folder:12}" + "".join(f"{found[column][folder]:14,}" for column in columns)
    yield (
        f"{found['functions']:,} functions: median {found['function_median']:g} lines, "
        f"9 of 10 at most {found['function_p90']:g}"
    )
    yield from (f"to add, {kind}: {count} files" for kind, count in found["to_add"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.size", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--at", metavar="COMMIT", help="instead of the working tree")
    options = parser.parse_args(arguments)
    try:
        found = measure(here() if options.at is None else at(options.at))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    lines = [json.dumps(found)] if options.json else table(found)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
