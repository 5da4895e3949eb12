"""A run of the fuzzer: its inputs, workers and stored findings."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.fuzz.tally import Tally
from experiments.fuzz.target import Target
from experiments.fuzz.worker import CHUNK, Chunk, Taken, prepared, rng_of, taken

SHOW_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzing:
    """The settings of a run.

    Args:
        count: inputs in all; every target gets an equal share, rounded up.
        seed: of all mutations.
        first: number of each target's first input.
        num_workers: concurrent workers.
        keep: folder for one input of each kind of finding.
    """

    count: int
    seed: int = 0
    first: int = 0
    num_workers: int = 2
    keep: Path | None = None

    def __post_init__(self) -> None:
        for name in ("count", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"fuzz: want {name} >= 1, got {getattr(self, name)}")

    def chunks(self, targets: Mapping[str, Target]) -> Iterator[Chunk]:
        """The chunks of inputs, target by target."""
        share = -(-self.count // len(targets))
        end = self.first + share
        for name in targets:
            for first in range(self.first, end, CHUNK):
                yield Chunk(name, first, min(end, first + CHUNK))


def fuzzed(
    targets: Mapping[str, Target],
    settings: Fuzzing,
    *,
    show: Callable[[int, int, int], None] | None = None,
) -> Tally:
    """Make and judge all inputs; `show` receives (inputs done, their total, kinds of findings)."""
    tally, chunks = Tally(), list(settings.chunks(targets))
    total = sum(chunk.end - chunk.first for chunk in chunks)
    next_s = time.monotonic() + SHOW_EVERY_S
    firsts: list[Taken] = []
    for outcome in taken(targets, chunks, seed=settings.seed, num_workers=settings.num_workers):
        if tally.add(outcome):
            firsts.append(outcome)
        if show is not None and time.monotonic() > next_s:
            next_s = time.monotonic() + SHOW_EVERY_S
            show(tally.num_inputs, total, len(tally.findings))
    if settings.keep is not None:
        _keep(targets, settings, firsts, settings.keep)
    return tally


def _keep(targets: Mapping[str, Target], settings: Fuzzing, firsts: list[Taken], folder: Path) -> None:
    """Make these inputs again, and write them as `TARGET/NUMBER-ENDING`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        ready_targets = {
            name: prepared(targets[name], Path(scratch)) for name in dict.fromkeys(e.target for e in firsts)
        }
        for finding in firsts:
            content = ready_targets[finding.target].mutant(
                rng_of(settings.seed, finding.target, finding.number)
            )
            path = folder / finding.target / f"{finding.number}-{re.sub(' ', '-', finding.judged.ending)}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
