"""Which component meets which fault in which round, and what all of them amount to."""

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
    """Something that can be put under some of the faults."""

    @property
    def faults(self) -> tuple[Fault, ...]: ...

    def play(self, room: Room, fault: Fault, seed: str, rng: random.Random) -> Findings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A round that is over."""

    number: int
    component: str
    fault: Fault
    seconds: float
    found: Findings
    commit: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        rest = {"number": self.number, "component": self.component, "fault": str(self.fault)}
        return rest | {"seconds": self.seconds, "commit": self.commit} | asdict(self.found)

    @property
    def line(self) -> str:
        verdict = "clean" if self.found.is_clean else "NOT CLEAN"
        again = (
            "" if self.found.recovery_s is None else f", at work again after {self.found.recovery_s:.2f} s"
        )
        seen = "" if self.found.noticed_s is None else f", noticed after {self.found.noticed_s:.2f} s"
        head = f"round {self.number}: {self.component}, {self.fault}: {verdict}, code {self.found.code}"
        details = "" if self.found.is_clean else f"\n  {asdict(self.found)}"
        return f"{head}{seen}{again} ({self.seconds:.1f} s){details}"


def played_from(record: Mapping[str, Any]) -> Played:
    """What `Played.record` was made of."""
    own = {key: record[key] for key in ("number", "component", "seconds", "commit")}
    found = {field.name: record[field.name] for field in fields(Findings)}
    return Played(**own, fault=Fault(record["fault"]), found=Findings(**found))


class Rounds:
    """All rounds of a seed; each can be played alone, as nothing of it depends on those before.

    Args:
        folder: for what all of them use: job, plan, a save to go on from, images.
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
            raise SystemExit("error: none of these components is put under any of these faults")

    def play(self, number: int) -> Played:
        """One round."""
        start_s = time.monotonic()
        seed = f"{self._seed}/{number}"
        rng = random.Random(seed)
        name, fault = rng.choice(self._chosen)
        with room(seed) as index:
            found = self._components[name].play(index, fault, seed, rng)
        seconds = round(time.monotonic() - start_s, 3)
        return Played(number=number, component=name, fault=fault, seconds=seconds, found=found)

    @cached_property
    def _components(self) -> dict[str, Component]:
        job, elastic, plan = (self._folder / name for name in ("job.yaml", "elastic.yaml", "plan.json"))
        write_job(job, ranks=2)
        others: dict[str, Component] = {
            "preprocess": Serving(self._folder / "images"),
            "search": Searching(job),
            "joint": Searching(job, JOINTLY),
        }
        if self._names <= others.keys():
            return others  # what the trainers begin with takes longer than a round
        write_job(elastic, ranks=3, samples=6)
        with room("begun") as opened:
            planned = opened.start("plan", *workbench(None, "", "plan", job, "-o", plan))
            if planned.process.wait(BEGUN_S):
                raise RuntimeError(planned.said)
            if "resume" in self._names:
                self._begin(opened, plan)
        return {**trainers(plan, elastic, self._folder / "saves"), **others}

    def _begin(self, place: Room, plan: Path) -> None:
        """A run that is ended after some steps leaves its saves to go on from."""
        begun = place.start("run", *run_command(plan)(place, None, "", Begin.ANEW))
        until(lambda: named(place.saves) >= BEGUN_STEPS or begun.process.poll() is not None, BEGUN_S)
        begun.process.terminate()
        begun.process.wait(BEGUN_S)
        place.saves.rename(self._folder / "saves")


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """Sums of all rounds, quantiles of recovery, and how often what was met."""
    found = [each.found for each in played]
    again_s = [each.recovery_s for each in found if each.recovery_s is not None]
    noticed_s = [each.noticed_s for each in found if each.noticed_s is not None]
    return {
        "rounds": len(played),
        "clean": sum(each.is_clean for each in found),
        "orphans": sum(len(each.orphans) for each in found),
        "lost_steps": sum(each.lost_steps for each in found),
        "wrong_losses": sum(each.wrong_losses for each in found),
        "unnamed_causes": sum(len(each.unnamed_causes) for each in found),
        "leftover_files": sum(len(each.leftover_files) for each in found),
        "late_notices": sum(each.late_notices for each in found),
        "recovery_p50_s": quantile_s(again_s, 50),
        "recovery_p95_s": quantile_s(again_s, 95),
        "noticed_p95_s": quantile_s(noticed_s, 95),
        "noticed_max_s": max(noticed_s, default=None),
        "components": dict(sorted(Counter(each.component for each in played).items())),
        "faults": dict(sorted(Counter(str(each.fault) for each in played).items())),
    }


def quantile_s(seconds: Sequence[float], percent: int) -> float | None:
    """None of nothing."""
    if len(seconds) < 2:
        return seconds[0] if seconds else None
    return quantiles(seconds, n=100, method="inclusive")[percent - 1]
