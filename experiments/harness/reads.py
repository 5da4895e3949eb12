"""The inputs of a result: modules of the project that its script can import, and data files that it opened.

Both are stored as hashes of their content, so that a result is stale where one of them has changed, and only
there, whatever has been committed since. Docstrings do not count. Modules are those that the script's source,
and in turn theirs, names in an import statement anywhere, or as text that is a module's whole name. Data
files are those under the project's folder that this process has opened since its start, or since `forget`;
files opened by other processes that it started are not seen.
"""

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from workbench.on_demand import OnDemand

ROOT = Path(__file__).parents[2]
PACKAGES = ("workbench", "sim", "runtime", "experiments")
WITHOUT_EFFECT = frozenset(  # they print, keep and draw what is computed elsewhere
    f"experiments/harness/{name}.py"
    for name in ("command", "drawing", "figure", "reads", "record", "script", "tally")
)
CODE = (".py", ".pyc", ".nbi", ".nbc")  # what Python and numba open by themselves
_WRITING = os.O_WRONLY | os.O_RDWR

_opened: set[str] = set()


def reads_of(script: str) -> dict[str, Any]:
    """Return what the result of `<paper>/<script>`, computed in this process, depends on."""
    return {
        "modules": modules_hash(script),
        "files": {name: hash_of(ROOT / name) for name in sorted(opened_files())},
    }


def forget() -> None:
    """Reset the record and clear the project's caches, so that files are opened again."""
    _opened.clear()
    modules = [
        m for name, m in sys.modules.items() if name.partition(".")[0] in PACKAGES and name != __name__
    ]
    for value in [value for module in modules for value in vars(module).values()]:
        if not isinstance(value, type | OnDemand):  # the latter would import what it stands for
            getattr(value, "cache_clear", lambda: None)()


def changed_since(record: Mapping[str, Any]) -> list[str]:
    """Inputs of a stored result that have changed: `modules`, or file names; empty if current."""
    reads = record.get("reads")
    if reads is None:
        return ["not recorded"]
    changed = [] if reads["modules"] == modules_hash(record["script"]) else ["modules"]
    return changed + [name for name, kept in reads["files"].items() if hash_of(ROOT / name) != kept]


def modules_hash(script: str) -> str:
    """Hash of the source of everything that the script can import."""
    return sources_hash(_module_of(script))


def modules_of(script: str) -> tuple[Path, ...]:
    """The script's file and those of all modules that it can import, sorted."""
    return sources_of(_module_of(script))


def _module_of(script: str) -> str:
    return f"experiments.{script.replace('/', '.')}"


def sources_hash(module: str) -> str:
    """Hash of the sources of everything that a module can import, by its dotted name."""
    parts = [f"{path.relative_to(ROOT)} {_module(path)[0]}" for path in sources_of(module)]
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def sources_of(module: str) -> tuple[Path, ...]:
    """Files of a module and of all that it can import, sorted.

    Complexity: each file is parsed once per process; later changes are not seen.
    """
    files = set(_files(module))
    pending = list(files)
    while pending:
        new = _module(pending.pop())[1] - files
        files |= new
        pending += new
    return tuple(sorted(path for path in files if str(path.relative_to(ROOT)) not in WITHOUT_EFFECT))


def hash_of(path: Path) -> str | None:
    """Hash of a file's content; None for a missing file."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else None


def opened_files() -> set[str]:
    """Data files in the project's folder that this process has read, as relative paths."""
    names = set()
    for name in _opened:
        path = Path(name)
        if path.is_relative_to(ROOT) and path.suffix not in CODE and path.is_file():
            relative = path.relative_to(ROOT)
            if not any(part.startswith((".", "__")) for part in relative.parts):
                names.add(str(relative))
    return names


@cache
def _module(path: Path) -> tuple[str, frozenset[Path]]:
    """Hash of a module's source without docstrings, and the files of the modules that it names."""
    if not path.is_file():
        return "", frozenset()
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    for first, last in _docstrings(tree):
        lines[first - 1 : last] = [""] * (last - first + 1)
    digest = blake2b("\n".join(line for line in lines if line).encode(), digest_size=16).hexdigest()
    named = {file for name in _names(tree, path) for file in _files(name)}
    return digest, frozenset(named)


def _docstrings(node: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line of every docstring."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or (isinstance(node, ast.stmt) and not hasattr(node, "name")):
        return
    match body[:1]:
        case [ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last))]:
            yield first, last
    for inner in body:
        yield from _docstrings(inner)


def _names(tree: ast.Module, path: Path) -> Iterator[str]:
    """Dotted names that may be modules; strings in an `__init__` do not count: users name lazy imports."""
    lazy = path.name == "__init__.py"
    statements = [statement for statement in tree.body if not _is_for_types(statement)]
    for node in (inner for statement in statements for inner in ast.walk(statement)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
                yield from (f"{alias.name}.face" for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if not lazy and text.partition(".")[0] in PACKAGES:
                yield text


def _is_for_types(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _files(name: str) -> Iterator[Path]:
    """The module's file and those of its packages; none for other modules."""
    parts = name.split(".")
    if parts[0] not in PACKAGES or not all(part.isidentifier() for part in parts):
        return
    for count in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike) and not (arguments[2] or 0) & _WRITING:
        _opened.add(os.path.abspath(arguments[0]))  # noqa: PTH100  (Path is slow here)


sys.addaudithook(_hook)
