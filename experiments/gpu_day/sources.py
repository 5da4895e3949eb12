"""Hashes of what decides a part's rows: its module and all of ours that it imports, read as text."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("experiments", "runtime", "sim", "workbench")


def sources_of(module: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Files of a module and of every module of ours that it imports, directly or not, sorted.

    Raises:
        ValueError: there is no such module below `root`.

    Complexity: O(bytes of all files).
    """
    first = _file_of(module, root)
    if first is None:
        raise ValueError(f"module {module!r}: no such file below {root}")
    found, open_files = {first}, [first]
    while open_files:
        path = open_files.pop()
        for name in _imports(path):
            file = _file_of(name, root)
            if file is not None and file not in found:
                found.add(file)
                open_files.append(file)
    return tuple(sorted(found))


def sources_hash(module: str, root: Path = ROOT) -> str:
    """SHA-256 of names and bytes of `sources_of`; the same wherever the tree lies."""
    digest = hashlib.sha256()
    for path in sources_of(module, root):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _imports(path: Path) -> Iterator[str]:
    """Names of modules of ours, with those that may be names inside a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.split(".")[0] in OURS)


def _file_of(module: str, root: Path) -> Path | None:
    path = root.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    return next((each for each in (file, path / "__init__.py") if each.is_file()), None)
