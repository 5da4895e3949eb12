"""The yardstick between steps: what says how fast the machine was while each of them ran."""

from collections.abc import Callable
from dataclasses import replace

from runtime.step.timing import Notes
from runtime.world.mesh import Mesh
from runtime.world.yardstick import Yardstick

READ_SHARE = 0.015  # of a step's time, for the reading behind it


class Readings:
    """The yardstick between the steps of one repetition; a step's readings are those before and after it."""

    def __init__(self, mesh: Mesh, yardstick: Yardstick | None) -> None:
        self._mesh, self._yardstick = mesh, yardstick
        self._budget_s = 0.0
        self._last_s: tuple[float, ...] | None = None

    def beside(self, do: Callable[[int], Notes], step: int) -> Notes:
        """Do a step, with the readings before and after it in its notes."""
        before_s = self._read(f"before step {step}") if self._last_s is None else self._last_s
        notes = do(step)
        self._budget_s = READ_SHARE * max((span.end_s - notes.start_s for span in notes.spans), default=0.0)
        self._last_s = self._read(f"after step {step}")
        return replace(notes, yardstick_s=(*before_s, *self._last_s))

    def _read(self, when: str) -> tuple[float, ...]:
        """Once all ranks have come, until all have read: who works must not share a core with who reads.

        Where ranks share cores some do not read; what they do between steps (Python's collector above all)
        would be taken for the machine's drift.
        """
        self._mesh.align(when)
        found = () if self._yardstick is None else (self._yardstick.read(self._budget_s),)
        self._mesh.align(f"{when}, behind the yardstick")
        return found
