"""Assigns components and faults to rounds, and summarises all rounds."""

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import quantiles
from typing import Any, Protocol

from experiments.chaos.disk import can_mount
from experiments.chaos.fault import Fault
from experiments.chaos.findings import Findings
from experiments.chaos.model import write_job
from experiments.chaos.processes import until
from experiments.chaos.room import Room, room, workbench
from experiments.chaos.saves import named
from experiments.chaos.searching import JOINTLY, Searching
from experiments.chaos.serving import Serving
from experiments.chaos.training import run_command, trainers
from runtime.state.checkpoint import Begin

COMPONENTS = ("run", "torchrun", "elastic", "checkpoint", "resume", "preprocess", "search", "joint")
BEGUN_STEPS, BEGUN_S = 8, 240.0


class Component(Protocol):
    """A component that can be put under some of the faults."""

    @property
    def faults(self) -> tuple[Fault, ...]: ...

    def play(self, room: Room, fault: Fault, seed: str, rng: random.Random) -> Findings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A finished round."""

    number: int
    component: str
    fault: Fault
    seconds: float
    findings: Findings
    commit: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        fields_of = {"number": self.number, "component": self.component, "fault": str(self.fault)}
        return fields_of | {"seconds": self.seconds, "commit": self.commit} | asdict(self.findings)

    @property
    def line(self) -> str:
        verdict = "clean" if self.findings.is_clean else "NOT CLEAN"
        again = (
            ""
            if self.findings.recovery_s is None
            else f", at work again after {self.findings.recovery_s:.2f} s"
        )
        noticed = (
            "" if self.findings.noticed_s is None else f", noticed after {self.findings.noticed_s:.2f} s"
        )
        head = f"round {self.number}: {self.component}, {self.fault}: {verdict}, code {self.findings.code}"
        details = "" if self.findings.is_clean else f"\n  {asdict(self.findings)}"
        return f"{head}{noticed}{again} ({self.seconds:.1f} s){details}"


def played_from(record: Mapping[str, Any]) -> Played:
    """The round of a `Played.record`."""
    plain_fields = {key: record[key] for key in ("number", "component", "seconds", "commit")}
    findings = {field.name: record[field.name] for field in fields(Findings)}
    return Played(**plain_fields, fault=Fault(record["fault"]), findings=Findings(**findings))


class Rounds:
    """All rounds of a seed; each can be played alone, as none depends on earlier ones.

    Args:
        folder: for shared files: job, plan, a save to resume from, images.
    """

    def __init__(self, folder: Path, seed: int, components: Sequence[str], faults: Sequence[Fault]) -> None:
        self._folder, self._seed, self._names = folder, seed, frozenset(components)
        self._chosen = [
            (name, fault)
            for name in components
            for fault in self._components[name].faults
            if fault in faults and (fault is not Fault.FULL_DISK or can_mount())
        ]
        if not self._chosen:
            raise SystemExit("error: no component has any of these faults")

    def play(self, number: int) -> Played:
        """Play one round."""
        start_s = time.monotonic()
        seed = f"{self._seed}/{number}"
        rng = random.Random(seed)
        name, fault = rng.choice(self._chosen)
        with room(seed) as index:
            findings = self._components[name].play(index, fault, seed, rng)
        seconds = round(time.monotonic() - start_s, 3)
        return Played(number=number, component=name, fault=fault, seconds=seconds, findings=findings)

    @cached_property
    def _components(self) -> dict[str, Component]:
        job, elastic, plan = (self._folder / name for name in ("job.yaml", "elastic.yaml", "plan.json"))
        write_job(job, ranks=2)
        other_components: dict[str, Component] = {
            "preprocess": Serving(self._folder / "images"),
            "search": Searching(job),
            "joint": Searching(job, JOINTLY),
        }
        if self._names <= other_components.keys():
            return other_components  # what the trainers begin with takes longer than a round
        write_job(elastic, ranks=3, samples=6)
        with room("begun") as opened:
            planned = opened.start("plan", *workbench(None, "", "plan", job, "-o", plan))
            if planned.process.wait(BEGUN_S):
                raise RuntimeError(planned.stderr_text)
            if "resume" in self._names:
                self._begin(opened, plan)
        return {**trainers(plan, elastic, self._folder / "saves"), **other_components}

    def _begin(self, shared_room: Room, plan: Path) -> None:
        """Make saves to resume from, by a run that is ended after some steps."""
        begun = shared_room.start("run", *run_command(plan)(shared_room, None, "", Begin.ANEW))
        until(lambda: named(shared_room.saves) >= BEGUN_STEPS or begun.process.poll() is not None, BEGUN_S)
        begun.process.terminate()
        begun.process.wait(BEGUN_S)
        shared_room.saves.rename(self._folder / "saves")


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """Sums over rounds, quantiles of recovery, and counts of faults."""
    findings = [finding.findings for finding in played]
    again_s = [finding.recovery_s for finding in findings if finding.recovery_s is not None]
    noticed_s = [finding.noticed_s for finding in findings if finding.noticed_s is not None]
    return {
        "rounds": len(played),
        "clean": sum(finding.is_clean for finding in findings),
        "orphans": sum(len(finding.orphans) for finding in findings),
        "lost_steps": sum(finding.lost_steps for finding in findings),
        "wrong_losses": sum(finding.wrong_losses for finding in findings),
        "unnamed_causes": sum(len(finding.unnamed_causes) for finding in findings),
        "leftover_files": sum(len(finding.leftover_files) for finding in findings),
        "late_notices": sum(finding.late_notices for finding in findings),
        "recovery_p50_s": quantile_s(again_s, 50),
        "recovery_p95_s": quantile_s(again_s, 95),
        "noticed_p95_s": quantile_s(noticed_s, 95),
        "noticed_max_s": max(noticed_s, default=None),
        "components": dict(sorted(Counter(finding.component for finding in played).items())),
        "faults": dict(sorted(Counter(str(finding.fault) for finding in played).items())),
    }


def quantile_s(seconds: Sequence[float], percent: int) -> float | None:
    """A quantile of seconds; None without values."""
    if len(seconds) < 2:
        return seconds[0] if seconds else None
    return quantiles(seconds, n=100, method="inclusive")[percent - 1]
