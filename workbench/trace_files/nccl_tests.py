"""Read the output of nccl-tests as rows of links and collectives, and merge them into a profile.

Format: NVIDIA/nccl-tests, `src/common.cu`: comment lines that name the devices, then a line per size with
the times out of place and in place. Sizes are of the whole tensor, as in our rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import CollectiveRow, Header, LinkRow, Measurement, Mixing
from workbench.cost.profile import Profile
from workbench.trace_files.packed_file import read_packed
from workbench.units import US_PER_S

MOST_BYTES = 2**24
_POINT_TO_POINT = "sendrecv"
# Program -> our collective, and bus over algorithm bandwidth of n ranks (doc/PERFORMANCE.md there).
_PROGRAMS: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "all_reduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
    "all_gather": ("all_gather", lambda n: (n - 1) / n),
    "reduce_scatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "broadcast": ("broadcast", lambda n: 1.0),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
    _POINT_TO_POINT: (_POINT_TO_POINT, lambda n: 1.0),
}
_NAME = re.compile(rf"({'|'.join(_PROGRAMS)})(?:_perf)?")
_STARTING = re.compile(r"Collective test starting:\s*(\S+)")
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.*\S)")
_PREFIX = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")  # of Open MPI's --tag-output
_BUS_TOLERANCE = 0.05  # printed with two digits behind the point
_LEAST_BUS_GB_PER_S = 1.0  # below, two digits say too little to compare


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRun:
    """One program's output.

    Args:
        program: "all_reduce", ..., "sendrecv".
        device: name that the GPUs report.
        num_ranks: GPUs.
        link: "intra" on one host, else "inter".
        timed: (bytes, seconds out of place), by size.
    """

    path: Path
    program: str
    device: str
    num_ranks: int
    link: str
    timed: tuple[tuple[int, float], ...]

    @property
    def rows(self) -> tuple[CollectiveRow | LinkRow, ...]:
        if self.program == _POINT_TO_POINT:
            return tuple(
                LinkRow(link=self.link, num_bytes=size, seconds=time_s) for size, time_s in self.timed
            )
        collective, _ = _PROGRAMS[self.program]
        return tuple(
            CollectiveRow(
                collective=collective,
                link=self.link,
                num_ranks=self.num_ranks,
                num_bytes=size,
                seconds=time_s,
            )
            for size, time_s in self.timed
        )


def looks_like_nccl_tests(head: str) -> bool:
    """Whether a file starts like such output."""
    return "# nThread" in head and ("minBytes" in head or "nGpus" in head)


def read_nccl_tests(path: Path) -> NcclRun:
    """Read a file of such output; see `parse_nccl_tests`."""
    return parse_nccl_tests(read_packed(path, MOST_BYTES).decode("utf-8", errors="replace"), path)


def parse_nccl_tests(text: str, path: Path) -> NcclRun:
    """Parse one run's output; of its two times, the one out of place is used.

    Raises:
        ValueError: no devices, no program's name in the text or file name, no sizes, or a bus bandwidth
            that does not match the program.
    """
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    devices = [match.groups() for line in lines if (match := _DEVICE.match(line))]
    if len(devices) < 2:
        raise ValueError(
            f"{path}: want lines '# Rank ... on HOST device ...' of >= 2 GPUs, got {len(devices)}"
        )
    num_ranks = len({rank for rank, _, _ in devices})
    program = _program(text, path)
    columns = _columns(lines, path)
    timed, factor = [], _PROGRAMS[program][1](num_ranks)
    for cells in (line.split() for line in lines if line.strip() and line.split()[0].isdigit()):
        size, time_us, algorithm, bus = _cells(cells, columns, path)
        if algorithm >= _LEAST_BUS_GB_PER_S and abs(bus / (algorithm * factor) - 1) > _BUS_TOLERANCE:
            raise ValueError(
                f"{path}: size {size}: bus over algorithm bandwidth is {bus / algorithm:.3g}, that of "
                f"{program} on {num_ranks} ranks is {factor:.3g}; name the file after its program"
            )
        if size and time_us > 0:
            timed.append((size, time_us / US_PER_S))
    if not timed:
        raise ValueError(f"{path}: want at least one line of a size > 0 bytes and its time")
    return NcclRun(
        path=path,
        program=program,
        device=devices[0][2],
        num_ranks=num_ranks,
        link="intra" if len({host for _, host, _ in devices}) == 1 else "inter",
        timed=tuple(sorted(timed)),
    )


def with_nccl_tests(profile: Profile, runs: Sequence[NcclRun], name: str) -> Profile:
    """The profile with measured links and collectives in place of its own.

    Raises:
        ValueError: no runs, runs of different devices, or times that do not grow with the size.
    """
    devices = {run.device: run.path for run in runs}
    if len(devices) > 1:
        (first, one), (second, other), *_ = devices.items()
        raise ValueError(f"{one} and {other}: of different devices, {first} and {second}")
    header = Header(
        device=profile.device,
        device_name=runs[0].device,
        memory_bytes=profile.memory_bytes,
        num_threads=1,
        date=profile.provenance.date,
        clocks=profile.provenance.clocks,
        versions=(),
    )
    rows = tuple(row for run in runs for row in run.rows)
    measured = fit(name, [Measurement(header, rows)], Mixing.REFUSED)
    source = f"nccl-tests on {runs[0].device}"
    links = {link.scope: replace(link, source=source) for link in measured.links}
    measured_tables = {(t.collective, t.scope): t for t in measured.collectives}
    tables = {key: replace(t, table=replace(t.table, source=source)) for key, t in measured_tables.items()}
    kept_links = [link for link in profile.links if link.scope not in links]
    kept_tables = [t for t in profile.collectives if (t.collective, t.scope) not in tables]
    return replace(
        profile,
        name=name,
        links=(*kept_links, *links.values()),
        collectives=(*kept_tables, *tables.values()),
        fits=(*profile.fits, *measured.fits),
        provenance=replace(
            profile.provenance,
            sources=(*profile.provenance.sources, *(f"{source}: {run.path.name}" for run in runs)),
        ),
    )


def _program(text: str, path: Path) -> str:
    announced = _STARTING.search(text)
    match = _NAME.search(announced[1] if announced else path.name)
    if match is None:
        raise ValueError(
            f"{path}: of which program? want '# Collective test starting: ...' in it, or a name like "
            f"all_reduce.txt; known are {', '.join(_PROGRAMS)}"
        )
    return match[1]


def _columns(lines: Sequence[str], path: Path) -> tuple[int, int, int]:
    """Indices of time, algorithm and bus bandwidth in a line; some programs lack redop or root."""
    for line in lines:
        names = line.lstrip("#").split()
        if (
            line.startswith("#")
            and names[:2] == ["size", "count"]
            and {"time", "algbw", "busbw"} <= set(names)
        ):
            return names.index("time"), names.index("algbw"), names.index("busbw")
    raise ValueError(f"{path}: want the line '# size count type ... time algbw busbw' above the sizes")


def _cells(
    cells: Sequence[str], columns: tuple[int, int, int], path: Path
) -> tuple[int, float, float, float]:
    try:
        time_us, algorithm, bus = (float(cells[column]) for column in columns)
        size = int(cells[0])
    except (IndexError, ValueError):
        raise ValueError(f"{path}: want size, times and bandwidths, got {' '.join(cells)!r:.80}") from None
    if not (0 <= time_us < float("inf") and 0 <= algorithm < float("inf") and 0 <= bus < float("inf")):
        raise ValueError(f"{path}: want finite times and bandwidths, got {' '.join(cells)!r:.80}")
    return size, time_us, algorithm, bus
