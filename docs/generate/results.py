"""Result files of experiments, and figures in words."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.record import stored_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"


def result(name: str) -> dict[str, Any]:
    """What a script left; OSError where it left nothing."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def judged() -> list[dict[str, Any]]:
    """Results of scripts that hold a paper's numbers or claims against ours, by name, by today's rules."""
    return stored_records()


def count(record: dict[str, Any], verdict: str) -> int:
    """Rows of a result with that verdict."""
    return sum(row["verdict"] == verdict for row in record["rows"])


def held(record: dict[str, Any], *, holds: bool) -> int:
    """Claims of a result that hold, or that do not."""
    return sum(claim["holds"] is holds for claim in record["claims"])


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f} %"


def made(record: Mapping[str, Any]) -> str:
    """Date and commit of a result, as far as it says."""
    date = str(record["date"])[:10] if "date" in record else "date not recorded"
    commit = record.get("commit")
    return f"{date}, commit `{commit}`" if commit else f"{date}, commit not recorded"
