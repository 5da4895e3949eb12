"""Answers of pure functions by what decides them, shared by all plans; the last used ones are kept."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar, cast

Answer = TypeVar("Answer")
_NOTHING: Any = object()  # in the place of an answer; keys are large, and hashed at every look-up
FORGET_EVERY = 100  # batches, in processes that plan one after the other: each has answers of its own


def _one(answer: object) -> int:
    return 1


class Remembered(Generic[Answer]):
    """What a function has answered, up to a total size; `kept` is for what follows from one plan object.

    A refusal is not remembered: it is raised each time anew.

    Args:
        most: size of all answers together; a larger one is given, and not remembered.
        size_of: an answer's; 1 each by default.
    """

    def __init__(self, most: int, size_of: Callable[[Answer], int] = _one) -> None:
        self._most, self._size_of = most, size_of
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()
        self._size = 0
        self._lock = Lock()
        _ALL.append(self)

    def answer(self, key: Hashable, derive: Callable[[], Answer]) -> Answer:
        """What `derive` gives, or gave when it was last asked for an equal key, of which all follows."""
        with self._lock:
            known = self._known.get(key, _NOTHING)
            if known is not _NOTHING:
                self._known.move_to_end(key)
                return cast(Answer, known)
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
        """Remember an answer of which all follows from the key."""
        size = self._size_of(answer)
        with self._lock:
            if size > self._most or key in self._known:
                return
            self._known[key] = answer
            self._size += size
            while self._size > self._most:
                self._size -= self._size_of(self._known.popitem(last=False)[1])

    def forget(self) -> None:
        """Everything."""
        with self._lock:
            self._known.clear()
            self._size = 0


_ALL: list[Remembered[Any]] = []


def forget_all() -> None:
    """Whatever any function remembers: for who measures what an answer costs, or doubts one."""
    for remembered in _ALL:
        remembered.forget()


class Same:
    """An object as a key that equals itself alone: for what is the same object in all plans of a search."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of  # held, so that no other object has its number meanwhile

    def __hash__(self) -> int:
        return object.__hash__(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._of is other._of


_ONE: Remembered[tuple[Any, ...]] = Remembered(2_000_000, lambda things: len(things) + 1)
_ASKED: Remembered[tuple[Any, ...]] = Remembered(2_000_000, lambda things: len(things) + 1)


def one(things: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Of equal tuples the same one, so that it is a key as an object: hashed when it is first asked for."""
    return _ASKED.answer(Same(things), lambda: _ONE.answer(things, lambda: things))
