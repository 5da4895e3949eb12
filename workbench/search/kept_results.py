"""A bounded folder of search results, keyed by everything that determines them and verified by checksum."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_BYTES, read_bounded
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.whole_file import write_text

MOST_ENTRIES = 64
MOST_TOTAL_BYTES = 2**28
_SUFFIX = ".search.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The stored part of a search's result.

    Args:
        record: all candidates, as JSON data.
        best_plan: text of the best plan's file.
    """

    record: dict[str, Any]
    best_plan: str


@dataclass(frozen=True, slots=True)
class KeptResults:
    """A folder of results that evicts the least recently used ones when there are too many.

    Args:
        folder: created when the first result is stored.
        warn: called with one line about a damaged entry, which then counts as missing.
        most: number of entries.
    """

    folder: Path
    warn: Callable[[str], None]
    most: int = MOST_ENTRIES

    def get(self, key: str) -> Kept | None:
        """The result stored under a key; None if missing, damaged or written by other code."""
        path = self._path(key)
        try:
            checksum, _, body = read_bounded(path, MOST_BYTES).partition("\n")
            if checksum != _sha256(body):
                raise ValueError("its content does not have its checksum")
            data = json.loads(body)
            if data["version"] != code_hash():
                self.warn(f"{path} is of another version of the workbench: it is made again")
                return None
            kept = Kept(record=data["record"], best_plan=data["best_plan"])
            if not isinstance(kept.record, dict) or not isinstance(kept.best_plan, str):
                raise ValueError("want a record and the text of a plan")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.warn(f"{path} is damaged and made again: {error}")
            return None
        with suppress(OSError):  # a read-only folder cannot record the access
            path.touch()
        return kept

    def put(self, key: str, kept: Kept) -> None:
        """Store a result if it can be written, within `most` and `MOST_TOTAL_BYTES`."""
        body = json.dumps({"version": code_hash(), "record": kept.record, "best_plan": kept.best_plan})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(f"{_sha256(body)}\n{body}", self._path(key))
            self._drop_old()
        except OSError as error:
            self.warn(f"the result is not kept: {error}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}{_SUFFIX}"

    def _drop_old(self) -> None:
        """Remove entries beyond the limits; another process may remove some at the same time."""
        sizes: list[tuple[int, int, Path]] = []
        for file in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                stat = file.stat()
                sizes.append((stat.st_mtime_ns, stat.st_size, file))
        total_bytes = 0
        for number, (_, num_bytes, file) in enumerate(sorted(sizes, reverse=True), 1):
            total_bytes += num_bytes
            if number > self.most or total_bytes > MOST_TOTAL_BYTES:
                file.unlink(missing_ok=True)


def result_key(job: Job, cost: CostModel, planners: Sequence[str], objective: str) -> str:
    """Hash everything that determines a search but its code: job, machines, execution, strategies, objective.

    Each entry records the hash of its code, so that one written by another version is reported instead of
    used.
    """
    machines = [(name, model.profile, model.execution) for name, model in sorted(cost.beside.items())]
    inputs = (job, cost.profile, cost.execution, machines, tuple(planners), objective)
    return _sha256(repr(inputs))


@cache
def code_hash() -> str:
    """Hash the sources of planner and simulator; results of another version do not match."""
    digest = hashlib.sha256()
    for package in ("workbench", "sim"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
