"""Detect by its content which tool a file comes from."""

from enum import StrEnum
from pathlib import Path

from workbench.bounded_file import open_regular
from workbench.trace_files.memory_snapshot import looks_like_snapshot
from workbench.trace_files.nccl_tests import looks_like_nccl_tests
from workbench.trace_files.nsys import looks_like_nsys

_HEAD_BYTES = 65_536


class FileKind(StrEnum):
    """What `workbench ingest` reads."""

    RECORDING = "recordings of torch.profiler"
    NCCL_TESTS = "output of nccl-tests"
    NSYS = "statistics of Nsight Systems"
    SNAPSHOT = "memory snapshots of torch"


def kind_of(path: Path) -> FileKind:
    """Detect the kind from the file's first bytes; anything unknown counts as a recording, whose reader
    reports errors.

    Raises:
        ValueError: not a regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    if looks_like_snapshot(head):
        return FileKind.SNAPSHOT
    text = head.decode("utf-8", errors="replace")
    if looks_like_nccl_tests(text):
        return FileKind.NCCL_TESTS
    return FileKind.NSYS if looks_like_nsys(text) else FileKind.RECORDING
