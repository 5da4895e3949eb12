"""Commands for files of other tools: ingest their recordings, and write traces in their formats."""

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.console import print_result, warn
from workbench.cli.options import Json
from workbench.cost.profile import load_profile, write_profile
from workbench.float_sum import float_sum
from workbench.metrics import peak_bytes
from workbench.plan.codec import read_plan
from workbench.report.folder import repetition_paths
from workbench.report.tables import mebibytes, milliseconds, percent, titled
from workbench.schedule.action import Pass
from workbench.trace import Trace
from workbench.trace_files.chakra import write_chakra
from workbench.trace_files.hta import write_hta
from workbench.trace_files.ingest import files_of, ingest, read_ranks
from workbench.trace_files.kinds import FileKind, kind_of
from workbench.trace_files.memory_snapshot import read_snapshot
from workbench.trace_files.nccl_tests import read_nccl_tests, with_nccl_tests
from workbench.trace_files.nsys import read_nsys, seconds_by_work
from workbench.trace_files.passes import HOW_TO_NAME
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import check_writable, write_text


def ingest_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="torch.profiler recordings, one per rank, or a folder of them; nccl-tests output; Nsight "
            "Systems statistics (CSV); torch memory snapshots",
            metavar="FILE...",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="trace file to write, one per step; for nccl-tests, a profile"),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="plan of the recorded job; needed for a comparison")
    ] = None,
    pp: Annotated[
        int, typer.Option("--pp", help="pipeline stages, if neither plan nor annotations give them")
    ] = 1,
    profile: Annotated[
        str | None, typer.Option(help="profile name or file to which links from nccl-tests are added")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert recordings of other tools: traces, link speeds, kernel times, memory."""
    paths = files_of(files)
    kinds = {path: kind_of(path) for path in paths}
    file_kind = kinds[paths[0]]
    for path, kind in kinds.items():
        if kind is not file_kind:
            raise ValueError(f"{paths[0]} and {path}: {file_kind} and {kind}; want files of one kind")
    for flag, is_given, required_kind in (
        ("--plan", plan is not None, FileKind.RECORDING),
        ("--pp", pp != 1, FileKind.RECORDING),
        ("--profile", profile is not None, FileKind.NCCL_TESTS),
    ):
        if is_given and file_kind is not required_kind:
            raise ValueError(
                f"ingest: {flag} is for {required_kind}, {paths[0]} is {file_kind}; want no {flag}"
            )
    if output is not None:
        check_writable(output, plan, *paths)
    if file_kind is FileKind.RECORDING:
        recorded_plan = None if plan is None else read_plan(plan)
        traces = ingest(read_ranks(paths), plan=recorded_plan, pp=pp)
        _warn_of_missing_backwards(traces[0])
        _print_traces(traces, output, as_json=as_json)
    elif file_kind is FileKind.SNAPSHOT:
        _print_traces([read_snapshot(path) for path in paths], output, as_json=as_json)
    elif file_kind is FileKind.NCCL_TESTS:
        _ingest_links(paths, profile, output, as_json=as_json)
    else:
        _ingest_kernels(paths, output, as_json=as_json)


class TraceFormat(StrEnum):
    """Formats of other tools in which a trace can be written."""

    HTA = "hta"
    CHAKRA = "chakra"


def trace_command(
    trace: Annotated[Path, typer.Argument(help="trace file", metavar="TRACE")],
    to: Annotated[
        TraceFormat,
        typer.Option("--to", help="hta: Kineto files for HolisticTraceAnalysis; chakra: execution traces"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to write to, one file per rank")],
    as_json: Json = False,
) -> None:
    """Convert a trace to the format of another tool. Perfetto opens trace files directly."""
    write = {TraceFormat.HTA: write_hta, TraceFormat.CHAKRA: write_chakra}[to]
    paths = write(read_trace(trace), output)
    lines = (f"written to {path}" for path in paths)
    print_result({"files": [str(path) for path in paths]}, *lines, as_json=as_json)


def _warn_of_missing_backwards(trace: Trace) -> None:
    """DDP and FSDP name their forwards themselves, and nothing names the backwards behind them."""
    if not any(span.action.kind in (Pass.B, Pass.I) for span in trace.spans):
        warn(
            "no backward is named in these recordings: the traces have forwards alone, and count the time of "
            f"backwards as idle; {HOW_TO_NAME}"
        )


def _print_traces(traces: Sequence[Trace], output: Path | None, *, as_json: bool) -> None:
    files = repetition_paths(output, len(traces)) if output is not None else ()
    for path, trace in zip(files, traces, strict=False):
        write_trace(trace, path)
    headers = ("", "iteration", "ranks", "passes", "exchanges", "messages", "peak memory")
    table = titled("ingested", headers)
    records = [_record(trace) for trace in traces]
    for number, record in enumerate(records, 1):
        peak = record["peak_bytes"]
        table.add_row(
            f"{number}",
            milliseconds(record["iteration_s"]),
            *(str(record[name]) for name in ("ranks", "passes", "exchanges", "messages")),
            "-" if peak is None else mebibytes(peak),
        )
    details = ", ".join(f"{name}: {value}" for name, value in traces[0].details if name != "step")
    result = {"files": [str(path) for path in files], "traces": records}
    print_result(result, table, details, *(f"written to {path}" for path in files), as_json=as_json)


def _record(trace: Trace) -> dict[str, Any]:
    passes = [span for span in trace.spans if span.lane == "compute"]
    return {
        "plan_hash": trace.plan_hash,
        "iteration_s": trace.iteration_s,
        "ranks": len({span.rank for span in trace.spans} | {sample.rank for sample in trace.memory}),
        "passes": len(passes),
        "exchanges": len(trace.spans) - len(passes),
        "messages": len(trace.messages),
        "peak_bytes": max(peak_bytes(trace).values(), default=None),
        "details": dict(trace.details),
    }


def _ingest_links(files: Sequence[Path], base: str | None, output: Path | None, *, as_json: bool) -> None:
    runs = [read_nccl_tests(path) for path in files]
    rows = [row for run in runs for row in run.rows]
    if (base is None) is not (output is None):
        raise ValueError("ingest: links go into a profile: want both --profile NAME and -o FILE, or neither")
    if base is not None and output is not None:
        name = output.name.removesuffix(".json")
        write_profile(with_nccl_tests(load_profile(base), runs, name), output)
    row_records = [{key: value for key, value in asdict(row).items() if key != "spread"} for row in rows]
    result = {"output": None if output is None else str(output), "rows": row_records}
    table = titled("links", ("", "link", "ranks", "sizes", "largest", "time", "GB/s"))
    for run in runs:
        size, time_s = run.timed[-1]
        speed = f"{size / time_s / 1e9:.4g}"
        cells = (mebibytes(size), milliseconds(time_s), speed)
        table.add_row(run.program, run.link, str(run.num_ranks), str(len(run.timed)), *cells)
    print_result(result, table, *((f"written to {output}",) if output is not None else ()), as_json=as_json)


def _ingest_kernels(files: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    rows = tuple(row for path in files for row in read_nsys(path))
    by_work = seconds_by_work(rows)
    total_s = float_sum(by_work.values())
    if output is not None:
        lines = ["work,count,seconds,name"]
        lines += [f'{row.work},{row.count},{row.seconds!r},"{_quoted(row.name)}"' for row in rows]
        write_text("\n".join(lines) + "\n", output)
    table = titled("time on the GPU", ("", "time", "share"))
    for work, time_s in by_work.items():
        table.add_row(
            work, milliseconds(time_s), percent(time_s / total_s if total_s else None, signed=False)
        )
    result = {"seconds_by_work": by_work, "rows": [asdict(row) for row in rows]}
    print_result(result, table, *((f"written to {output}",) if output is not None else ()), as_json=as_json)


def _quoted(name: str) -> str:
    return name.replace('"', '""')
