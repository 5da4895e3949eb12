"""Least-recently-used caches of pure functions' results, shared by all plans."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from threading import Lock
from types import MethodType
from typing import Any, Generic, TypeVar, cast

Result = TypeVar("Result")
CLEAR_EVERY = 100  # batches, in processes that plan many: each batch has results of its own


def _unit_size(result: object) -> int:
    return 1


class _Entry(Generic[Result]):
    """A cached result, and how many results had been cached when it was last used."""

    __slots__ = ("result", "used_at")

    def __init__(self, result: Result, used_at: int) -> None:
        self.result, self.used_at = result, used_at


class LruCache(Generic[Result]):
    """Results by key, up to a total size; for results of one plan object there is `cached_on_instance`.

    Exceptions are not cached. Of uses between which nothing was cached, the first counts: so most look-ups
    hash their key once and move nothing.

    Args:
        most: total size; a larger result is returned and not cached.
        size_of: size of a result; 1 each by default.
    """

    def __init__(self, most: int, size_of: Callable[[Result], int] = _unit_size) -> None:
        self._most, self._size_of = most, size_of
        self._entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()
        self._size = self._num_cached = 0
        self._lock = Lock()
        _ALL.append(self)

    def get_or(self, key: Hashable, derive: Callable[[], Result]) -> Result:
        """Return the cached result of an equal key, else that of `derive`, which must follow from the key."""
        entry = self._entries.get(key)
        if entry is not None:
            if entry.used_at != self._num_cached:
                self._use(key, entry)
            return entry.result
        result = derive()
        self.put(key, result)
        return result

    def get(self, key: Hashable) -> Result | None:
        """Return the result of an equal key; None where there is none, or no longer."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._use(key, entry)
        return entry.result

    def _use(self, key: Hashable, entry: _Entry[Result]) -> None:
        with self._lock:
            entry.used_at = self._num_cached
            try:
                self._entries.move_to_end(key)
            except KeyError:  # another thread has dropped it
                return

    def put(self, key: Hashable, result: Result) -> None:
        """Cache a result that follows from the key."""
        size = self._size_of(result)
        with self._lock:
            if size > self._most or key in self._entries:
                return
            self._num_cached += 1
            self._entries[key] = _Entry(result, self._num_cached)
            self._size += size
            while self._size > self._most:
                self._size -= self._size_of(self._entries.popitem(last=False)[1].result)

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._entries.clear()
            self._size = 0


_ALL: list[LruCache[Any]] = []


def clear_caches() -> None:
    """Clear every cache: for measuring what a result costs, or for recomputing one."""
    for cache in _ALL:
        cache.clear()


IdentityKey = MethodType

# An object as a key that equals itself alone, for objects that all plans of a search share: one of its bound
# methods, which keeps it alive, so that no other object gets its address, and is hashed and compared by it.
# Slower: a class with `__hash__` and `__eq__`, three calls in Python for each look-up.
Identity = cast(Callable[[Any], IdentityKey], attrgetter("__repr__"))


def _num_things(key: IdentityKey) -> int:
    return len(cast(tuple[Any, ...], key.__self__)) + 1


_VALUE_KEYS: LruCache[IdentityKey] = LruCache(2_000_000, _num_things)
_VALUE_KEYS_OF: LruCache[IdentityKey] = LruCache(2_000_000, _num_things)


def value_key(things: tuple[Any, ...]) -> IdentityKey:
    """Return one key object for equal tuples; each tuple object is hashed once."""
    return _VALUE_KEYS_OF.get_or(
        Identity(things), lambda: _VALUE_KEYS.get_or(things, lambda: Identity(things))
    )
