"""A first call: parts without timings, side by side, while other processes compile for later calls.

Where time on a GPU is short, compiling must not take it: with TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and
NUMBA_CACHE_DIR set to folders that stay, the calls that follow reuse what is compiled here. Rows of the
kernels' part that these processes make are dropped: they were timed beside others.

Run:     python -m experiments.gpu_day.beside --out DIR [--limit SECONDS] [--device cuda|cpu] [--small]
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.gpu_day.__main__ import LEAST_LIMIT_S
from experiments.gpu_day.__main__ import main as campaign
from experiments.gpu_day.drive import Deadline
from experiments.harness.command import run_main

KEPT = {
    "correctness": 4,
    "alone": 1,
}  # part -> processes that share its cells; plans of memory run one by one
COMPILED = {"kernels": 8}
LIMIT_S = 120.0
GRACE_S = 30.0  # behind its limit, for a process to end
BAD_INPUT = 2  # exit code


@dataclass(frozen=True, slots=True)
class Share:
    """One process's cells of a part: every `of`-th, from this one."""

    part: str
    number: int
    of: int

    @property
    def name(self) -> str:
        return f"{self.part}-{self.number}"


def shares() -> tuple[Share, ...]:
    """All processes."""
    return tuple(
        Share(part, number, count)
        for part, count in {**KEPT, **COMPILED}.items()
        for number in range(1, count + 1)
    )


def command(share: Share, folder: Path, options: argparse.Namespace) -> list[str]:
    """That process's command line."""
    words = [sys.executable, "-m", "experiments.gpu_day", "--out", str(folder), "--only", share.part]
    words += ["--share", f"{share.number}/{share.of}", "--device", options.device]
    words += ["--limit", str(options.limit), *(["--small"] if options.small else [])]
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """As `experiments.gpu_day`, of the parts that are kept."""
    options = _parse(arguments)
    return run_main(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    if not options.limit >= LEAST_LIMIT_S:
        raise ValueError(f"--limit: want at least {LEAST_LIMIT_S:g} s, got {options.limit:g}")
    if any((options.out / f"{part}.jsonl").exists() for part in KEPT):
        raise ValueError(f"--out {options.out}: holds rows already; want a new folder")
    deadline = Deadline(options.limit + GRACE_S)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        folders = {share: Path(scratch) / share.name for share in shares()}
        with _running(folders, options) as processes:
            late = [share for share, process in processes.items() if not _has_ended(process, deadline)]
            for share, process in processes.items():
                if process.poll() == BAD_INPUT:
                    line = _log(folders[share]).read_text().strip().splitlines()[-1]
                    raise ValueError(f"{share.name}: {line.removeprefix('error: ')}")
        for share in late:
            sys.stderr.write(f"{share.name}: ended, {GRACE_S:g} s behind its limit; its rows stay\n")
        kept = [folder for share, folder in folders.items() if share.part in KEPT]
        earlier = [str(folder) for folder in kept if any(folder.glob("*.jsonl"))]
        words = [
            "--out",
            str(options.out),
            *(["--from", *earlier] if earlier else []),
            "--only",
            *KEPT,
            "--json",
        ]
        words += ["--device", options.device, "--limit", str(max(LEAST_LIMIT_S, deadline.left_s()))]
        code = campaign([*words, *(["--small"] if options.small else [])])
        return code or int(bool(late))


def _has_ended(process: subprocess.Popen[bytes], deadline: Deadline) -> bool:
    """Whether it does before the deadline."""
    try:
        process.wait(max(1.0, deadline.left_s()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


@contextmanager
def _running(
    folders: Mapping[Share, Path], options: argparse.Namespace
) -> Iterator[dict[Share, subprocess.Popen[bytes]]]:
    """All of them at once; what still runs at the end is ended."""
    processes: dict[Share, subprocess.Popen[bytes]] = {}
    try:
        for share, folder in folders.items():
            with _log(folder).open("wb") as log:
                words = command(share, folder, options)
                processes[share] = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_day.beside", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the rows")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of every process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all of it works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
