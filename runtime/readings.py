"""Readings of the yardstick between steps, which show the machine's speed during each."""

from collections.abc import Callable
from dataclasses import replace

from runtime.step.timing import Notes
from runtime.world.mesh import Mesh
from runtime.world.yardstick import Yardstick

READ_SHARE = 0.015  # of a step's time, for the reading after it


class Readings:
    """Reads the yardstick between the steps of one repetition; a step's readings are before and after it."""

    def __init__(self, mesh: Mesh, yardstick: Yardstick | None) -> None:
        self._mesh, self._yardstick = mesh, yardstick
        self._budget_s = 0.0
        self._last_s: tuple[float, ...] | None = None

    def beside(self, do: Callable[[int], Notes], step: int) -> Notes:
        """Run a step, and add the readings before and after it to its notes."""
        before_s = self._read(f"before step {step}") if self._last_s is None else self._last_s
        notes = do(step)
        self._budget_s = READ_SHARE * max((span.end_s - notes.start_s for span in notes.spans), default=0.0)
        self._last_s = self._read(f"after step {step}")
        return replace(notes, yardstick_s=(*before_s, *self._last_s))

    def _read(self, when: str) -> tuple[float, ...]:
        """Read it while all ranks are idle, as a working rank on a shared core would disturb it.

        Where ranks share cores some do not read; their work between steps (mainly Python's garbage collector)
        would look like drift of the machine.
        """
        self._mesh.align(when)
        reading = () if self._yardstick is None else (self._yardstick.read(self._budget_s),)
        self._mesh.align(f"{when}, behind the yardstick")
        return reading
