"""Parses YAML of plain values only: text, numbers, booleans, lists and mappings; bounded, with unique keys.

Numbers that YAML 1.1 and 1.2 read differently (`010`, `1:30`) are refused.
"""

import re
from collections.abc import Hashable
from itertools import chain
from typing import Any, ClassVar

import yaml

MOST_DEPTH = 64
MOST_NODES = 200_000  # with aliases expanded
KINDS = ("str", "int", "float", "bool", "null", "map", "seq")
PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in KINDS)


# Octal or base 60 in YAML 1.1; decimal or text in YAML 1.2, and to most readers.
_BY_VERSION = re.compile(r"[-+]?0[0-7_]+|.*:.*")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The usual YAML loader, but dates are text, and a duplicate key is an error."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in PLAIN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  (yaml's)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_SCALARS = yaml.constructor.SafeConstructor()


def parse_yaml(text: str, *, where: str) -> Any:
    """Parse YAML text.

    Raises:
        ValueError: one line with `where`, the line and what is wrong.
    """
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check(root, {}, 0)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", error)
        raise ValueError(f"{where}: not YAML: {line}{problem}{_hint(text, str(problem))}") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def _hint(text: str, problem: str) -> str:
    """What YAML has in place of tabs and of comments as in other languages."""
    if "'\\t'" in problem:
        return "; want spaces, not tabs"
    if any(line.lstrip().startswith(("//", "/*")) for line in text.splitlines()):
        return "; a comment begins with #"
    return ""


def _check(node: Any, sizes: dict[int, int], depth: int) -> int:
    """Number of nodes below a node; ValueError for values that are not plain, recursive or too large."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise ValueError(f"line {_line(node)}: a value holds itself")
        return sizes[id(node)]
    if depth > MOST_DEPTH:
        raise ValueError(f"line {_line(node)}: nested more than {MOST_DEPTH} deep")
    if node.tag not in PLAIN:
        raise ValueError(f"line {_line(node)}: want plain values, got {node.tag.rpartition(':')[2]!r:.40}")
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
    else:
        is_list = isinstance(node, yaml.SequenceNode)
        for child in node.value if is_list else chain.from_iterable(node.value):
            size += _check(child, sizes, depth + 1)
            if size > MOST_NODES:
                raise ValueError(f"line {_line(node)}: more than {MOST_NODES} values")
    sizes[id(node)] = size
    return size


def _check_scalar(node: Any) -> None:
    """Raise ValueError for a value that does not fit its tag, has control characters, or is ambiguous."""
    if not all(character.isprintable() or character in "\n\t" for character in node.value):
        raise ValueError(f"line {_line(node)}: control characters in {node.value!r:.40}")
    kind = node.tag.rpartition(":")[2]
    try:
        value = _SCALARS.yaml_constructors[node.tag](_SCALARS, node)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, yaml.YAMLError):
        raise ValueError(f"line {_line(node)}: {node.value!r:.40} is no {kind}") from None
    if kind in ("int", "float") and _BY_VERSION.fullmatch(node.value):
        raise ValueError(
            f"line {_line(node)}: {node.value!r:.40} is {value!r:.40} in YAML 1.1 only; want a plain decimal "
            "number, or quotes around a text"
        )


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1
