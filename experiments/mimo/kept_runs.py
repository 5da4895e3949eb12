"""Stores records of long runs one by one, so that an interrupted run can be continued."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.mimo.parity_grid_runs import NUM_RANKS
from runtime.world.pool import Pool

Record = dict[str, Any]
Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of records, one a line.

    Args:
        path: path of the file.
        key: the field that identifies a record.
        done: the field of successful records; others are not stored.
    """

    path: Path
    key: str
    done: str

    def read(self) -> dict[str, Record]:
        """Records by key; empty without a file."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return {record[self.key]: record for record in map(json.loads, filter(str.strip, lines))}

    def play(
        self,
        runs: Iterable[Run],
        record_of: Callable[[Run, Pool, Mapping[str, Record]], Record],
        limit_s: float,
    ) -> list[Record]:
        """Records of runs, reusing known ones, until the time is over; each new one is stored at once."""
        known_records, records, end_s = self.read(), list[Record](), time.monotonic() + limit_s
        with Pool(NUM_RANKS) as pool, self.path.open("a", encoding="utf-8") as file:
            for run in runs:
                if time.monotonic() > end_s:
                    break
                record = record_of(run, pool, known_records)
                records.append(record)
                if self.done in record and record[self.key] not in known_records:
                    known_records[record[self.key]] = record
                    file.write(json.dumps(record, sort_keys=True) + "\n")
                    file.flush()
                    print(f"run {len(records)}: {record.get('name', run)}", file=sys.stderr, flush=True)
        return records
