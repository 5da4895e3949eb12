"""Mutations of JSON and YAML values: types, numbers, lengths, nesting and keys."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

Tree = Any  # None, bool, int, float, str, lists of trees, and trees by text

STOP = 0.12  # chance to change a list or an object itself and not what is in it
DEEPER = 200
REPEATED = 300

WILD_NUMBERS: tuple[Tree, ...] = (
    0, 1, -1, 2, 3, 7, 255, 256, 4097, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**18,
    10**30, 10**400, 0.0, -0.0, 0.5, 1e-300, 1e-9, 1e18, 1e308, -1e308, 1.5, math.nan, math.inf, -math.inf,
)  # fmt: skip
WILD_TEXTS = (
    "", " ", "\x00", "\x1b[2J\x1b]0;x\x07", "\u202etxt", "\ud800", "é", "a\nb", "x" * 5000, "../..",
    "/etc/passwd", "=cmd|' /C calc'!A0", "nan", "inf", "-1", "0x10", "1e999", "true", "null", "{}", "%s%n",
    "0F0", "STEP", "llm", "vision>llm", "text", "float32", "\u0661",
)  # fmt: skip
WILD_OTHERS: tuple[Tree, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [0] * REPEATED)


def mutated(tree: Tree, rng: Random) -> Tree:
    """The tree with one to four changes; the given one is not modified."""
    for _ in range(1 + min(3, int(rng.expovariate(1.2)))):
        tree = _changed(tree, tree, rng)
    return tree


def _changed(tree: Tree, whole: Tree, rng: Random) -> Tree:
    """One change somewhere in the tree; only the path to it is copied."""
    if isinstance(tree, dict) and tree and rng.random() > STOP:
        key = rng.choice(list(tree))
        return {**tree, key: _changed(tree[key], whole, rng)}
    if isinstance(tree, list) and tree and rng.random() > STOP:
        index = rng.randrange(len(tree))
        return [*tree[:index], _changed(tree[index], whole, rng), *tree[index + 1 :]]
    return rng.choice(_CHANGES.get(type(tree), _ANY))(tree, whole, rng)


def _other(tree: Tree, whole: Tree, rng: Random) -> Tree:
    del tree, whole
    return rng.choice(rng.choice((WILD_NUMBERS, WILD_TEXTS, WILD_OTHERS)))


def _from_elsewhere(tree: Tree, whole: Tree, rng: Random) -> Tree:
    """A value from elsewhere in the whole tree."""
    value = whole
    while isinstance(value, dict | list) and value and rng.random() > STOP:
        value = rng.choice(list(value.values()) if isinstance(value, dict) else value)
    return tree if value is whole else value


def _wrapped(tree: Tree, whole: Tree, rng: Random) -> Tree:
    del whole
    depth = rng.choice((1, 1, 2, 40, DEEPER))
    for _ in range(depth):
        tree = [tree] if rng.random() < 0.5 else {"a": tree}
    return tree


def _near(tree: Tree, whole: Tree, rng: Random) -> Tree:
    """A number that is slightly off, or of another magnitude."""
    del whole
    how = rng.choice((
        lambda n: n + 1, lambda n: n - 1, lambda n: -n, lambda n: 2 * n, lambda n: n / 2, lambda n: n // 2,
        lambda n: n * 1000, lambda n: n * 10**9, lambda n: n + 0.5, lambda n: rng.randrange(64),
        float, str,
    ))  # fmt: skip
    try:
        return how(tree)
    except (OverflowError, ValueError):
        return tree


def _text(tree: str, whole: Tree, rng: Random) -> Tree:
    """A text that is longer, shorter or has an invalid character."""
    del whole
    cut = rng.randrange(len(tree) + 1)
    return rng.choice((
        tree[:cut] + rng.choice(WILD_TEXTS) + tree[cut:], tree[:cut], tree[cut:], tree * rng.choice((2, 50)),
        tree.upper(), tree[::-1], tree[:cut] + chr(rng.randrange(1, 0x3000)) + tree[cut + 1 :],
        tree[:cut] + str(rng.randrange(100)) + tree[cut + 1 :],
    ))  # fmt: skip


def _shorter(tree: Tree, whole: Tree, rng: Random) -> Tree:
    del whole
    if not tree:
        return tree
    if isinstance(tree, dict):
        removed = rng.choice(list(tree))
        return {key: value for key, value in tree.items() if key != removed}
    index = rng.randrange(len(tree))
    return rng.choice((tree[:index] + tree[index + 1 :], tree[:index]))


def _longer(tree: Tree, whole: Tree, rng: Random) -> Tree:
    """Repeat an item, add one from elsewhere, or add a key that is unknown or has another's value."""
    new = rng.choice((_other, _from_elsewhere))(tree, whole, rng)
    if isinstance(tree, dict):
        return {**tree, rng.choice((*map(str, tree), *WILD_TEXTS)): new}
    index = rng.randrange(len(tree) + 1)
    again = tree[index : index + 1] * rng.choice((1, 1, 2, REPEATED))
    return [*tree[:index], *rng.choice(([new], again)), *tree[index:]]


def _moved(tree: Tree, whole: Tree, rng: Random) -> Tree:
    """Permute items or values, or rename a key."""
    del whole
    if not isinstance(tree, dict):
        return rng.sample(tree, len(tree))
    if rng.random() < 0.5:
        values = rng.sample(list(tree.values()), len(tree))
        return dict(zip(tree, values, strict=True))
    renamed = rng.choice(list(tree)) if tree else None
    return {(_text(str(key), None, rng) if key == renamed else key): value for key, value in tree.items()}


_ANY: tuple[Callable[[Any, Tree, Random], Tree], ...] = (_other, _from_elsewhere, _wrapped)
_CHANGES: dict[type, tuple[Callable[[Any, Tree, Random], Tree], ...]] = {
    int: (*_ANY, _near, _near, _near, _near, _near),
    float: (*_ANY, _near, _near, _near, _near, _near),
    str: (*_ANY, _text, _text, _text),
    list: (*_ANY, _shorter, _shorter, _longer, _longer, _moved, _moved),
    dict: (*_ANY, _shorter, _shorter, _longer, _longer, _moved, _moved),
}
