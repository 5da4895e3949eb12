"""Files of other tools: recordings, statistics and snapshots, compressed or not."""

import gzip
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import CORPUS, JSON, Form, csv_bytes, folder_in, json_bytes, reading
from workbench.cli.ingesting import ingest_command
from workbench.trace_files.kinds import kind_of

RECORDING = json.loads((CORPUS / "recording.json").read_text(encoding="utf-8"))
KERNELS = [
    ["Generating SQLite file report.sqlite from report.nsys-rep"],
    ["Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Name"],
    ["60.0", "6000000", "3", "2000000.0", "flash_fwd_kernel"],
    ["40.0", "4000000", "2", "2000000.0", "ampere_gemm"],
]
SNAPSHOT = {
    "segments": [{"device": 0, "active_size": 512, "blocks": []}],
    "device_traces": [
        [
            {"action": "alloc", "addr": 1, "size": 512, "time_us": 1000, "stream": 0, "frames": []},
            {"action": "alloc", "addr": 2, "size": 256, "time_us": 1500, "stream": 0, "frames": []},
            {"action": "free_completed", "addr": 2, "size": 256, "time_us": 2000, "stream": 0},
        ]
    ],
}


def _pickled(tree: Any) -> bytes:
    try:
        return pickle.dumps(tree, protocol=4)
    except RecursionError:
        return json_bytes(tree)


def _packed(tree: Any) -> bytes:
    return gzip.compress(json_bytes(tree), mtime=0)


def _unpickled(content: bytes) -> object:
    """Unpickle the fuzzer's own trees; mutated bytes are read only up to the first mark."""
    if not content.startswith(b"\x80\x04"):
        raise ValueError("no pickle")
    return content


def _ready(tree: Any, form: Form, name: str, folder: Path) -> Ready:
    """`ingest` of one file."""
    out, path = folder_in(folder), folder / name

    def ingest(kind: object) -> None:
        del kind
        ingest_command([path], output=out / "trace.json", as_json=True)

    return reading(form, path, [tree], kind_of, ingest, out=out)


TARGETS = (
    Target(
        name="recording",
        make=partial(_ready, RECORDING, JSON, "rank0.json"),
        readers=("workbench.trace_files.kinds:kind_of", "workbench.trace_files.kineto:document_of"),
    ),
    Target(
        name="recording-packed",
        make=partial(_ready, RECORDING, Form(_packed, gzip.decompress), "rank0.json.gz"),
        readers=("workbench.trace_files.packed_file:read_packed",),
    ),
    Target(
        name="nsys",
        make=partial(_ready, KERNELS, Form(csv_bytes, lambda content: content.decode()), "kernels.csv"),
        readers=("workbench.trace_files.nsys:parse_nsys",),
    ),
    Target(
        name="snapshot",
        make=partial(_ready, SNAPSHOT, JSON, "snapshot.json"),
        readers=("workbench.trace_files.memory_snapshot:_json",),
    ),
    Target(
        name="snapshot-pickle",
        make=partial(_ready, SNAPSHOT, Form(_pickled, _unpickled), "snapshot.pickle"),
    ),
)
