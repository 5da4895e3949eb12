"""Rows of a microbenchmark file: what was timed on one machine, with which software."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from workbench.bounded_file import read_bounded
from workbench.calibrate.row_line import parse_line
from workbench.calibrate.sustained_rows import DeviceNotes, SustainedAttentionRow, SustainedMatmulRow
from workbench.whole_file import write_text

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First line of a file: the machine, the software and the day. All rows share it.

    Args:
        device: kind, as `Node.device` says it: "cpu" or the accelerator's name.
        device_name: the machine's own name.
        memory_bytes: of one device (CPU: of the node, shared by its ranks).
        num_threads: intra-operator threads per rank while measuring (accelerators: 1).
        date: ISO date of the measurement.
        clocks: clock state, e.g. "unlocked" or "1410 MHz locked".
        versions: (package, version) pairs, sorted, driver included; rows of different versions are not mixed
            by default.
    """

    device: str
    device_name: str
    memory_bytes: int
    num_threads: int
    date: str
    clocks: str
    versions: tuple[tuple[str, str], ...]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow(DeviceNotes):
    """One layer over `rows` packed sequences of equal size, medians over `repeats`.

    Args:
        signature: `workbench.cost.signature.signature(layer)`.
        precision: "float32", ...
        rows: packed sequences in the call.
        tokens_in: tokens of one row entering the layer's module.
        tokens_out: tokens of one row leaving the module (LLM: equal).
        attention_area: query-key pairs of one row.
        forward_s: forward that keeps what backward needs.
        input_grad_s: backward when the input asks for a gradient and no weight does.
        weight_grad_s: full backward (input and weights) less `input_grad_s`.
        weight_only_s: backward when the weights ask for gradients and the input does not.
            None where not measured.
        forward_only_s: forward without gradients, which keeps nothing. None where not measured.
        split_input_s: backward that leaves weight gradients for later. None where not measured.
        split_weight_s: those weight gradients, later. None where not measured.
        recompute_forward_s: forward under a checkpoint. None where not measured.
        recompute_backward_s: full backward under it, the forward again included. None where not measured.
        recompute_idle_s: forward under it that no gradient asks for. None where not measured.
        spread: (third quartile - first quartile) / median of the forward.
        repeats: timed calls behind each median.
        tp, cp: degrees of tensor and context parallelism while measuring.
        ep: of the ranks distribute experts.
        sequence_parallel: tensor-parallel ranks divide tokens between products.
        context_tokens: of other modules, that one row's cross-attention read.
        reader_tokens: of the row's items that had any.
        context_area: query-key pairs between the two.
    """

    signature: str
    precision: str
    rows: int
    tokens_in: int
    tokens_out: int
    attention_area: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    weight_only_s: float | None = None
    forward_only_s: float | None = None
    split_input_s: float | None = None
    split_weight_s: float | None = None
    recompute_forward_s: float | None = None
    recompute_backward_s: float | None = None
    recompute_idle_s: float | None = None
    spread: float = 0.0
    repeats: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    context_tokens: int = 0
    reader_tokens: int = 0
    context_area: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRow(DeviceNotes):
    """Seconds the executor adds to one action of that kind, see `workbench.schedule.action.Meaning`.

    "LAUNCH" is not an action: it is what a kernel costs that does nothing.
    """

    action: str
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow(DeviceNotes):
    """One optimizer step over `num_parameters` weights of a rank.

    `update`: "single" tensor after tensor, or "fused".
    """

    precision: str
    num_parameters: int
    seconds: float
    spread: float = 0.0
    update: str = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One message of `num_bytes` from rank to rank; `link` is "intra" or "inter"."""

    link: str
    num_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective, named as in `workbench.cost.collectives.Collective`.

    `num_bytes` is the size of the whole tensor: of the reduced one, of the gathered one.
    """

    collective: str
    link: str
    num_ranks: int
    num_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRow(DeviceNotes):
    """One product y[m, n] = x[m, k] w[k, n], by which layers without rows of their own are priced."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow(DeviceNotes):
    """One memory-bound operator whose forward moves `num_bytes` (read plus written).

    Args:
        operator: "add", "gelu", "swiglu", "layer_norm", "rms_norm", "embedding", "cross_entropy".
        seconds: of the forward.
        backward_s: of the backward, all gradients; None where not measured.
        precision: of its tensors.
    """

    num_bytes: int
    seconds: float
    spread: float = 0.0
    operator: str = "add"
    backward_s: float | None = None
    precision: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow(DeviceNotes):
    """One attention over one packed row.

    Args:
        mask: name of the mask, e.g. "causal".
        launch: how it was launched: "dense" (CPU), "whole" or "split" (kernels).
        length: queries, and as many keys.
        pairs: query-key pairs that attend, of one head.
        backward_s: gradients of queries, keys and values; None where not measured.
    """

    precision: str
    mask: str
    launch: str
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    pairs: int
    seconds: float
    backward_s: float | None = None
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyRow(DeviceNotes):
    """A copy of pinned host memory "to_device", or back "to_host", as offloading needs."""

    direction: str
    num_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """The same product alone and during a collective of `num_bytes` that outlasts it."""

    collective: str
    link: str
    num_ranks: int
    num_bytes: int
    alone_s: float
    beside_s: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YardstickRow:
    """A constant piece of work, timed among the other rows.

    Args:
        seconds: per turn, the median on the slowest of the processes.
        num_processes: that timed it at once.
        others_cores: mean number of cores that other programs or the machine's host used since the previous
            row; None if the system does not report it.
    """

    seconds: float
    num_processes: int
    others_cores: float | None = None


Row = (
    MatmulRow
    | SustainedMatmulRow
    | SustainedAttentionRow
    | CopyRow
    | AttentionRow
    | LayerRow
    | OverheadRow
    | OptimizerRow
    | HostCopyRow
    | LinkRow
    | CollectiveRow
    | OverlapRow
    | YardstickRow
)

_ROWS: dict[str, type[Row]] = {
    "matmul": MatmulRow,
    "copy": CopyRow,
    "attention": AttentionRow,
    "host_copy": HostCopyRow,
    "overlap": OverlapRow,
    "layer": LayerRow,
    "overhead": OverheadRow,
    "optimizer": OptimizerRow,
    "link": LinkRow,
    "collective": CollectiveRow,
    "yardstick": YardstickRow,
    "sustained_matmul": SustainedMatmulRow,
    "sustained_attention": SustainedAttentionRow,
}
_KIND = {kind: name for name, kind in _ROWS.items()}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A header and its rows."""

    header: Header
    rows: tuple[Row, ...]


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Write one JSON object per line: the header, then every row; atomically."""
    lines = [json.dumps({"kind": "header", **asdict(measurement.header)})]
    lines += [json.dumps(row_values(row)) for row in measurement.rows]
    write_text("\n".join(lines) + "\n", path)


def row_values(row: Row) -> dict[str, Any]:
    """A row as JSON data, with its kind."""
    return {"kind": _KIND[type(row)], **asdict(row)}


def row_of(values: dict[str, Any], where: str) -> Row:
    """The row of `row_values`; ValueError, prefixed with `where`, if it is invalid."""
    row: Row = parse_line(Path(where), 1, json.dumps(values), _ROWS)
    return row


def read_measurement(path: Path) -> Measurement:
    """Read a measurement file; ValueError names file, line and field of the first error."""
    lines = [(number, line) for number, line in enumerate(read_bounded(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: want a header line, the file is empty")
    header = parse_line(path, *lines[0], {"header": Header})
    if header.format_version != FORMAT_VERSION:
        raise ValueError(f"{path}: want format_version {FORMAT_VERSION}, got {header.format_version}")
    header_fields = {field.name: getattr(header, field.name) for field in fields(Header)}
    pairs = header.versions if isinstance(header.versions, list | tuple) else [None]
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{path}: header versions: want [package, version] pairs, got {header.versions!r:.60}"
        )
    header_fields["versions"] = tuple((str(name), str(version)) for name, version in header.versions)
    rows = tuple(parse_line(path, number, line, _ROWS) for number, line in lines[1:])
    return Measurement(Header(**header_fields), rows)


class Mixing(Enum):
    """Whether rows of different software may be combined in one profile."""

    REFUSED = "refused"
    ALLOWED = "allowed"


def merge_rows(measurements: Iterable[Measurement], mixing: Mixing = Mixing.REFUSED) -> Measurement:
    """Merge rows of several files of one machine.

    A package that one file does not name does not constrain its rows: kernels measured without transformers
    can be combined with layers measured with it. If mixing is allowed, the header keeps all versions of a
    package.

    Raises:
        ValueError: no file; machine or clocks differ; software differs and mixing is refused.
    """
    merged = list(measurements)
    if not merged:
        raise ValueError("want at least one measurement, got none")
    first = merged[0].header
    for other in (measurement.header for measurement in merged[1:]):
        for name in ("device", "device_name", "num_threads", "clocks"):
            if getattr(first, name) != getattr(other, name):
                raise ValueError(
                    f"rows of different {name} are never mixed: {getattr(first, name)} of {first.date} "
                    f"and {getattr(other, name)} of {other.date}; measure again"
                )
    versions: dict[str, list[str]] = {}
    for package, version in (pair for measurement in merged for pair in measurement.header.versions):
        versions.setdefault(package, [])
        if version not in versions[package]:
            versions[package].append(version)
    for package, known in versions.items():
        if len(known) > 1 and mixing is Mixing.REFUSED:
            raise ValueError(
                f"rows of different versions are not mixed unless asked: {package} {' and '.join(known)}; "
                "measure again or allow it with --mix-versions"
            )
    header = replace(first, versions=tuple(sorted((name, " + ".join(v)) for name, v in versions.items())))
    return Measurement(header, tuple(row for measurement in merged for row in measurement.rows))
