"""Results of searches, kept in a folder: by everything that decides them, few, and checked when read."""

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
    """What is kept of a search.

    Args:
        record: of all candidates, as JSON data.
        best_plan: the text of its plan file.
    """

    record: dict[str, Any]
    best_plan: str


@dataclass(frozen=True, slots=True)
class KeptResults:
    """A folder of results, the least recently used of which go when there are too many.

    Args:
        folder: made when something is kept.
        warn: called with a line about an entry that is damaged; it counts as none.
    """

    folder: Path
    warn: Callable[[str], None]

    def get(self, key: str) -> Kept | None:
        """The result of that key; None where there is none, or one that is damaged or of other code."""
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
        with suppress(OSError):  # of a folder that can only be read
            path.touch()
        return kept

    def put(self, key: str, kept: Kept) -> None:
        """Keep a result if it can be written; of all no more than `MOST_ENTRIES` and `MOST_TOTAL_BYTES`."""
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
        files = sorted(
            self.folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns, reverse=True
        )
        total_bytes = 0
        for number, file in enumerate(files, 1):
            total_bytes += file.stat().st_size
            if number > MOST_ENTRIES or total_bytes > MOST_TOTAL_BYTES:
                file.unlink(missing_ok=True)


def result_key(job: Job, cost: CostModel, planners: Sequence[str], objective: str) -> str:
    """A hash of all that decides a search but the code: job, machines, execution, and what is tried.

    An entry says which code it is of, so that one of another version is named and not taken.
    """
    machines = [(name, model.profile, model.execution) for name, model in sorted(cost.beside.items())]
    decided = (job, cost.profile, cost.execution, machines, tuple(planners), objective)
    return _sha256(repr(decided))


@cache
def code_hash() -> str:
    """Of the sources of planner and simulator: another version finds nothing of this one."""
    digest = hashlib.sha256()
    for package in ("workbench", "sim"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
