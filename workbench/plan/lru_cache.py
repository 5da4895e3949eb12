"""Least-recently-used caches of pure functions' results, shared by all plans."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
_MISSING: Any = object()  # default of a look-up, so that a large key is hashed once
CLEAR_EVERY = 100  # batches, in processes that plan many: each batch has results of its own


def _unit_size(result: object) -> int:
    return 1


class LruCache(Generic[Result]):
    """Results by key, up to a total size; for results of one plan object there is `cached_on_instance`.

    Exceptions are not cached.

    Args:
        most: total size; a larger result is returned and not cached.
        size_of: size of a result; 1 each by default.
    """

    def __init__(self, most: int, size_of: Callable[[Result], int] = _unit_size) -> None:
        self._most, self._size_of = most, size_of
        self._results: OrderedDict[Hashable, Result] = OrderedDict()
        self._size = 0
        self._lock = Lock()
        _ALL.append(self)

    def get_or(self, key: Hashable, derive: Callable[[], Result]) -> Result:
        """Return the cached result of an equal key, else that of `derive`, which must follow from the key."""
        with self._lock:
            cached: Result = self._results.get(key, _MISSING)
            if cached is not _MISSING:
                self._results.move_to_end(key)
                return cached
        result = derive()
        self.put(key, result)
        return result

    def get(self, key: Hashable) -> Result | None:
        """Return the result of an equal key; None where there is none, or no longer."""
        with self._lock:
            cached = self._results.get(key)
            if cached is not None:
                self._results.move_to_end(key)
            return cached

    def put(self, key: Hashable, result: Result) -> None:
        """Cache a result that follows from the key."""
        size = self._size_of(result)
        with self._lock:
            if size > self._most or key in self._results:
                return
            self._results[key] = result
            self._size += size
            while self._size > self._most:
                self._size -= self._size_of(self._results.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._results.clear()
            self._size = 0


_ALL: list[LruCache[Any]] = []


def clear_caches() -> None:
    """Clear every cache: for measuring what a result costs, or for recomputing one."""
    for cache in _ALL:
        cache.clear()


class Identity:
    """An object as a key that equals itself alone: for objects that all plans of a search share."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of  # kept alive, so that no other object gets its address

    def __hash__(self) -> int:
        return object.__hash__(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._of is other._of


_INTERNED: LruCache[tuple[Any, ...]] = LruCache(2_000_000, lambda things: len(things) + 1)
_INTERNED_OF: LruCache[tuple[Any, ...]] = LruCache(2_000_000, lambda things: len(things) + 1)


def value_key(things: tuple[Result, ...]) -> Identity:
    """Return a key that is equal for equal tuples; each tuple object is hashed once."""
    return Identity(_INTERNED_OF.get_or(Identity(things), lambda: _INTERNED.get_or(things, lambda: things)))
