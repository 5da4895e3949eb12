"""Two ways to put off a call on the virtual clock: by a delay, or to the end of this instant."""

from collections.abc import Callable
from typing import TypeVar

from simpy.core import Environment
from simpy.events import Event, EventPriority

LAST = EventPriority(2)  # after simpy's URGENT and NORMAL

Subject = TypeVar("Subject")


def after(env: Environment, delay_s: float, then: Callable[[Subject], None], subject: Subject) -> Event:
    """Call `then(subject)` in `delay_s` seconds; a delay of 0 is still before any `at_last`."""
    event = env.timeout(delay_s)
    event.callbacks.append(lambda _: then(subject))
    return event


def at_last(env: Environment, then: Callable[[], None]) -> None:
    """Call `then()` in this very instant, after everything else that happens in it."""
    LastOfInstant(env).callbacks.append(lambda _: then())


class LastOfInstant(Event):
    """An event of lowest priority at its instant."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, LAST)
