"""What one kind of candidates has gained for its effort, as one learns it while a search goes on."""

from dataclasses import dataclass

UNKNOWN_GAIN, UNKNOWN_EFFORT = 0.02, 40.0  # before anything is known
KEPT = 0.9  # of what is known, from round to round: what gains at first soon does no more


@dataclass(slots=True)
class Credit:
    """What a kind of candidates has gained for its effort, of which its first share is a guess."""

    share: float
    effort: float = UNKNOWN_EFFORT
    gain: float = UNKNOWN_GAIN

    @property
    def rate(self) -> float:
        return self.share * self.gain / self.effort

    def add(self, effort: float, before: float, after: float) -> None:
        """One candidate more; the gain is of the best value, as a part of it."""
        self.effort += effort
        self.gain += 1 - after / before

    def fade(self) -> None:
        """Before the next round: what was long ago counts less, and the guess again more."""
        self.effort = UNKNOWN_EFFORT + KEPT * (self.effort - UNKNOWN_EFFORT)
        self.gain = UNKNOWN_GAIN + KEPT * (self.gain - UNKNOWN_GAIN)
