"""Gain per effort of one kind of candidate, estimated while a search runs."""

from dataclasses import dataclass

UNKNOWN_GAIN, UNKNOWN_EFFORT = 0.02, 40.0  # prior
KEPT = 0.9  # decay per round: what gains at first soon stops gaining


@dataclass(slots=True)
class Credit:
    """Accumulated gain and effort of a kind of candidate; `share` is its prior share of the effort."""

    share: float
    effort: float = UNKNOWN_EFFORT
    gain: float = UNKNOWN_GAIN

    @property
    def rate(self) -> float:
        return self.share * self.gain / self.effort

    def add(self, effort: float, before: float, after: float) -> None:
        """Add one candidate; the gain is the relative improvement of the best value."""
        self.effort += effort
        self.gain += 1 - after / before

    def fade(self) -> None:
        """Decay towards the prior before the next round, so that old results count less."""
        self.effort = UNKNOWN_EFFORT + KEPT * (self.effort - UNKNOWN_EFFORT)
        self.gain = UNKNOWN_GAIN + KEPT * (self.gain - UNKNOWN_GAIN)
