"""What a preprocessing server serves, and how."""

from dataclasses import dataclass, field
from pathlib import Path

from runtime.preprocess.answers import MOST_WINDOW
from runtime.preprocess.images import Rule
from runtime.preprocess.order import OrderSettings
from runtime.preprocess.stream import Malformed
from workbench.units import S_PER_DAY

STILL_S = 1.0  # between two words to a producer that has nothing to do
MOST_PRODUCERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What is served, and how.

    Args:
        folder: with `data.jsonl`.
        rule: of its images.
        batch_size: examples.
        window: batches prepared ahead of each trainer, the one that it works on included.
        lease_s: that a producer has for one example before another gets it, too.
        num_producers: on this host.
        host: address to listen on; any but this machine's own wants keys.
        port: 0: any free one.
        silence_s: after which a producer that hears nothing of the server ends.
    """

    folder: Path
    rule: Rule
    batch_size: int
    window: int = 3
    order: OrderSettings = field(default_factory=OrderSettings)
    malformed: Malformed = Malformed.FATAL
    lease_s: float = 60.0
    num_producers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.lease_s <= S_PER_DAY or not STILL_S < self.silence_s <= S_PER_DAY:
            raise ValueError(
                f"server: want 0 < lease_s and {STILL_S:g} < silence_s up to a day, "
                f"got {self.lease_s} and {self.silence_s}"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port: want 1 to {2**16 - 1}, or 0 for any free one, got {self.port}")
        if not 1 <= self.window <= MOST_WINDOW:
            raise ValueError(f"window: want >= 1 batch ahead, at most {MOST_WINDOW}, got {self.window}")
        if not 0 <= self.num_producers <= MOST_PRODUCERS:
            raise ValueError(f"producers: want 0 to {MOST_PRODUCERS} on a host, got {self.num_producers}")
