"""Counts of a fuzzing run, and its findings."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.fuzz.target import Ending, Target
from experiments.fuzz.worker import Taken

KEYS = {
    Ending.TRACEBACK: "tracebacks",
    Ending.HANG: "hangs",
    Ending.NATIVE_CRASH: "native_crashes",
    Ending.OVER_2GB: "over_2gb",
    Ending.HALF_WRITTEN: "half_written",
    Ending.UNCLEAR: "unclear_lines",
}
MOST_TEXT = 1500  # characters of a finding
_VARYING = re.compile(r"\b0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"")


@dataclass(slots=True)
class Tally:
    """Counts of the outcomes of all inputs so far."""

    endings: dict[str, Counter[Ending]] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, Ending, str], list[Taken]] = field(default_factory=dict)

    def add(self, outcome: Taken) -> bool:
        """Count an input; returns whether it is the first finding of its kind."""
        result = outcome.judged
        self.endings.setdefault(outcome.target, Counter())[result.ending] += 1
        self.passed[outcome.target] += result.passed_parse
        if result.ending not in KEYS:
            return False
        key = (outcome.target, result.ending, _VARYING.sub("*", result.text)[-300:])
        alike = self.findings.setdefault(key, [])
        alike.append(outcome)
        return len(alike) == 1

    def count(self, ending: Ending) -> int:
        """The number of inputs with one of these endings."""
        return sum(counts[ending] for counts in self.endings.values())

    @property
    def num_inputs(self) -> int:
        return sum(sum(counts.values()) for counts in self.endings.values())

    def record(self, targets: Mapping[str, Target]) -> dict[str, Any]:
        """Counts in all and per target, and one of each kind of finding."""
        return {
            "inputs": self.num_inputs,
            **{key: self.count(ending) for ending, key in KEYS.items()},
            "targets": {
                name: self._of(name) | {"kind": targets[name].kind.value} for name in sorted(self.endings)
            },
            "findings": [_record(alike) for alike in self.findings.values()],
        }

    def _of(self, target: str) -> dict[str, Any]:
        counts = self.endings[target]
        num = sum(counts.values())
        return {
            "inputs": num,
            "accepted": counts[Ending.ACCEPTED],
            "first_parse_share": round(self.passed[target] / num, 3),
            **{key: counts[ending] for ending, key in KEYS.items() if counts[ending]},
        }


def _record(alike: list[Taken]) -> dict[str, Any]:
    first = min(alike, key=lambda finding: finding.number)
    return {
        "target": first.target,
        "ending": first.judged.ending.value,
        "inputs": len(alike),
        "number": first.number,
        "text": first.judged.text[-MOST_TEXT:],
    }


def lines(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """One paragraph per kind of finding."""
    return [
        f"{item['target']} input {item['number']}, {item['inputs']} alike: {item['ending']}\n{item['text']}"
        for item in findings
    ]
