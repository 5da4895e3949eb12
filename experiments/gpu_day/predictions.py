"""The file of predictions: written whole before any of its plans runs, and checked by every run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.store import FORMAT_VERSION, PREDICTIONS
from workbench.whole_file import write_text

FORMAT = "multimodal-workbench predictions"
REHEARSAL, JUDGED, PREDICTED = "rehearsal", "judged", "predictions"  # kinds of rows of plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """What was predicted of a plan.

    Args:
        kinds_s: seconds of each kind of action, all ranks together.
    """

    plan: str
    plan_hash: str
    predicted_s: float
    kinds_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predictions from one profile."""

    profile_hash: str
    device_name: str
    date: str
    plans: tuple[Foretold, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return _digest(asdict(self))

    def of(self, plan_hash: str) -> Foretold:
        """The prediction of a plan; ValueError where there is none."""
        plan = next((one for one in self.plans if one.plan_hash == plan_hash), None)
        if plan is None:
            raise ValueError(f"plan {plan_hash:.16} was not predicted: it does not run")
        return plan


def write_predictions(predictions: Predictions, folder: Path) -> None:
    """Write the file.

    Raises:
        ValueError: two plans are the same, or none is there.
    """
    hashes = [one.plan_hash for one in predictions.plans]
    twice = next((one for one in predictions.plans if hashes.count(one.plan_hash) > 1), None)
    if twice is not None:
        raise ValueError(f"plan {twice.plan!r} is predicted twice")
    if not hashes:
        raise ValueError("predictions: want at least one plan, got none")
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": predictions.digest,
        **asdict(predictions),
    }
    write_text(json.dumps(content, indent=1) + "\n", folder / PREDICTIONS)


def read_predictions(folder: Path, digest: str) -> Predictions:
    """The predictions of a folder, as they were written.

    Args:
        digest: that they had then.

    Raises:
        ValueError: the file is missing or is not the one that was written.
    """
    path = folder / PREDICTIONS
    if not path.is_file():
        raise ValueError(f"{path}: predictions are missing: no plan is judged without")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        plans = tuple(Foretold(**one) for one in content["plans"])
        predictions = Predictions(
            profile_hash=content["profile_hash"],
            device_name=content["device_name"],
            date=content["date"],
            plans=plans,
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of predictions: {error}") from None
    if predictions.digest != digest or content.get("digest") != digest:
        raise ValueError(
            f"{path}: predictions were changed after they were written: hash {predictions.digest:.16}, "
            f"want {digest:.16}; plans judged by them do not count"
        )
    return predictions


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
