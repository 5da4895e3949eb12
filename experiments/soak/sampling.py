"""Samples the resources of processes of this machine from /proc."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
PRIVATE = ("Private_Clean:", "Private_Dirty:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a process: resident bytes, private ones of these, open descriptors, threads."""

    rss_bytes: int
    uss_bytes: int
    descriptors: int
    threads: int


MEASURES = tuple(Resources.__dataclass_fields__)


def resources_of(pid: int) -> Resources:
    """The resources of a process at this moment; OSError where it does not exist."""
    folder = PROC / str(pid)
    kib: dict[str, int] = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name] = int(value)
    return Resources(
        rss_bytes=KIB * kib["Rss:"],
        uss_bytes=KIB * sum(kib[name] for name in PRIVATE),
        descriptors=sum(1 for _ in (folder / "fd").iterdir()),
        threads=sum(1 for _ in (folder / "task").iterdir()),
    )


@dataclass(slots=True)
class Series:
    """Samples of named processes over steps or requests."""

    done: list[int] = field(default_factory=list)
    by_process: dict[str, list[Resources]] = field(default_factory=dict)

    def sample(self, done: int, processes: Mapping[str, int]) -> None:
        """Sample all processes; where one has just ended, the sample is dropped for all."""
        with suppress(OSError):
            now = {name: resources_of(pid) for name, pid in processes.items()}
            self.done.append(done)
            for name, resources in now.items():
                self.by_process.setdefault(name, []).append(resources)

    def values(self, process: str, measure: str) -> list[int]:
        return [getattr(sample, measure) for sample in self.by_process[process]]
