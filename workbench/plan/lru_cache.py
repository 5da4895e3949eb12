"""Least-recently-used caches of pure functions' results, shared by all plans."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")
_NOTHING: Any = object()  # in the place of an answer; keys are large, and hashed at every look-up
CLEAR_EVERY = 100  # batches, in processes that plan one after the other: each has answers of its own


def _one(answer: object) -> int:
    return 1


class LruCache(Generic[Answer]):
    """Results by key, up to a total size; `cached_on_instance` is for what follows from one plan object.

    Exceptions are not cached: they are raised each time anew.

    Args:
        most: size of all answers together; a larger one is returned, and not cached.
        size_of: an answer's; 1 each by default.
    """

    def __init__(self, most: int, size_of: Callable[[Answer], int] = _one) -> None:
        self._most, self._size_of = most, size_of
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()
        self._size = 0
        self._lock = Lock()
        _ALL.append(self)

    def get_or(self, key: Hashable, derive: Callable[[], Answer]) -> Answer:
        """What `derive` gives, or gave when it was last asked for an equal key, of which all follows."""
        with self._lock:
            known: Answer = self._known.get(key, _NOTHING)
            if known is not _NOTHING:
                self._known.move_to_end(key)
                return known
        found = derive()
        self.put(key, found)
        return found

    def get(self, key: Hashable) -> Answer | None:
        """The answer to an equal key; None where there is none, or none any more."""
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def put(self, key: Hashable, answer: Answer) -> None:
        """Cache an answer of which all follows from the key."""
        size = self._size_of(answer)
        with self._lock:
            if size > self._most or key in self._known:
                return
            self._known[key] = answer
            self._size += size
            while self._size > self._most:
                self._size -= self._size_of(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        """Everything."""
        with self._lock:
            self._known.clear()
            self._size = 0


_ALL: list[LruCache[Any]] = []


def clear_caches() -> None:
    """All of them: for who measures what a result costs, or doubts one."""
    for cache in _ALL:
        cache.clear()


class Identity:
    """An object as a key that equals itself alone: for what is the same object in all plans of a search."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of  # held, so that no other object has its number meanwhile

    def __hash__(self) -> int:
        return object.__hash__(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._of is other._of


_INTERNED: LruCache[tuple[Any, ...]] = LruCache(2_000_000, lambda things: len(things) + 1)
_INTERNED_OF: LruCache[tuple[Any, ...]] = LruCache(2_000_000, lambda things: len(things) + 1)


def value_key(things: tuple[Answer, ...]) -> Identity:
    """A key that equals those of equal tuples, which are hashed once each."""
    return Identity(_INTERNED_OF.get_or(Identity(things), lambda: _INTERNED.get_or(things, lambda: things)))
