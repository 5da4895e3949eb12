"""Callbacks on the virtual clock: after a delay, or at the end of the current instant."""

from collections.abc import Callable
from typing import TypeVar

from simpy.core import Environment
from simpy.events import Event, EventPriority

LAST = EventPriority(2)  # after simpy's URGENT and NORMAL

Subject = TypeVar("Subject")


def after(env: Environment, delay_s: float, then: Callable[[Subject], None], subject: Subject) -> Event:
    """Call `then(subject)` after `delay_s` seconds; a delay of 0 still precedes any `at_last`."""
    event = env.timeout(delay_s)
    event.callbacks.append(lambda _: then(subject))
    return event


def at_last(env: Environment, then: Callable[[], None]) -> None:
    """Call `then()` at the current instant, after everything else that happens at it."""
    LastOfInstant(env).callbacks.append(lambda _: then())


class LastOfInstant(Event):
    """An event at the current instant, of lowest priority."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, LAST)
