"""A profile: measured or sourced facts about one machine, in one strict JSON file."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.cost.device_limits import LaunchTimes, NarrowRate, PowerLimit
from workbench.cost.device_names import check_memory, shipped_device
from workbench.cost.hardware import Link
from workbench.cost.layer_table import LayerTable
from workbench.data.sample import WHERE_SET
from workbench.frozen_json import FrozenJson, json_lines, parse_json
from workbench.json_schema import Schema, of_dataclass
from workbench.whole_file import write_text

FORMAT_VERSION = 1
MOST_REMEMBERED = 32  # profiles
PROFILES = Path(__file__).parent / "profiles"
PRODUCT_AXES = ("m", "n", "k")
ATTENTION_AXES = ("length", "heads", "queries_per_key")
BYTES_AXES = ("bytes",)
COLLECTIVE_AXES = ("num_ranks", "bytes")
_JSON = FrozenJson()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measured rates of one operation at several sizes.

    Args:
        axes: names of the size coordinates.
        points: (coordinate, ..., rate) tuples; the rate is in FLOP/s or bytes/s.
        measured: false if scaled from another machine or from a data sheet.
        source: where the points come from.
    """

    axes: tuple[str, ...] = ()
    points: tuple[tuple[float, ...], ...] = ()
    measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for point in self.points:
            if len(point) != len(self.axes) + 1 or not all(0 < value < math.inf for value in point):
                raise ValueError(f"table over {self.axes}: want points (*axes, rate) > 0, got {point}")

    def check_over(self, axes: tuple[str, ...], name: str) -> None:
        """Raise ValueError for points over other axes."""
        if self.points and self.axes != axes:
            raise ValueError(
                f"{name}: want points over {', '.join(axes)}, got {', '.join(self.axes) or 'none'}"
            )


class Direction(StrEnum):
    """The three products of a layer y[m, n] = x[m, k] w[k, n] in training."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedProducts:
    """Matrix products of one direction in long loops over alternating operands.

    Args:
        direction: forward, input gradient or weight gradient.
        table: FLOP/s by the forward's (m, n, k).
    """

    direction: Direction
    table: Table

    def __post_init__(self) -> None:
        self.table.check_over(PRODUCT_AXES, f"sustained products, {self.direction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedHeads:
    """Attention with one head width in long loops over alternating operands.

    Args:
        head_dim: head width.
        causal: true for a causal mask, false for full attention.
        forward: FLOP/s by (length, heads, queries per key), as in `Profile.attention`.
        backward: the same for the backward, counted as 2.5 times the FLOP of the forward.
    """

    head_dim: int
    causal: bool
    forward: Table
    backward: Table

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(f"sustained attention: want heads of width >= 1, got {self.head_dim}")
        if [p[:-1] for p in self.forward.points] != [p[:-1] for p in self.backward.points]:
            raise ValueError(
                f"sustained attention, width {self.head_dim}: want both passes at the same points"
            )
        if not self.forward.points:
            raise ValueError(f"sustained attention, width {self.head_dim}: want points, got none")
        for table in (self.forward, self.backward):
            table.check_over(ATTENTION_AXES, f"sustained attention, width {self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLink:
    """A link of this machine.

    Args:
        scope: "intra" (inside a node) or "inter" (between nodes).
        name: name of the link.
        bytes_per_s: bandwidth of one rank's port, or of one network card, in one direction.
        latency_s: time from the end of sending to arrival.
        measured: true if measured, false if taken from a data sheet.
        source: where the numbers come from.
        per_node: network cards per node, for an "inter" link; None: one per rank.
    """

    scope: str
    name: str
    bytes_per_s: float
    latency_s: float
    measured: bool
    source: str
    per_node: int | None = field(default=None, metadata={WHERE_SET: True})

    @property
    def link(self) -> Link:
        return Link(name=self.name, bytes_per_s=self.bytes_per_s, latency_s=self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """A collective measured over a link of this machine.

    Args:
        collective: name of the collective.
        scope: "intra" or "inter": the link.
        table: bytes/s by (ranks, bytes of the whole tensor).
    """

    collective: str
    scope: str
    table: Table

    def __post_init__(self) -> None:
        self.table.check_over(COLLECTIVE_AXES, f"{self.collective} of the {self.scope!r} link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Leave-one-out accuracy of one table.

    Args:
        table: name of the table.
        num_points: number of its points.
        median: median of the absolute relative errors.
        p90: 90th percentile of the absolute relative errors.
    """

    table: str
    num_points: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """When, how and from which sources the profile was made.

    Args:
        date: date of the measurement.
        clocks: clocks of the device.
        versions: (package, version) pairs.
        sources: files or papers.
    """

    date: str
    clocks: str
    versions: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured or sourced facts about one machine. Where a table is empty, the peak rate is assumed.

    Args:
        name: name of the profile.
        device: name of the device, as in `Node.device`.
        memory_bytes: memory of one device.
        peak_flop_per_s: (precision, dense matmul peak) pairs.
        peak_bytes_per_s: peak bandwidth of the device memory; None: unknown.
        matmul: FLOP/s by (m, n, k) of the forward y[m, n] = x[m, k] w[k, n], in short loops over the same
            operands.
        attention: FLOP/s by (length, heads, queries per key) of the causal forward, in short loops; heads are
            those of all sequences of the launch, FLOP are 4 x head_dim x query-key pairs x heads.
        sustained_products: rates in long loops, by direction. If given, the time by `matmul` is scaled by the
            ratio of long to short loops; empty: short loops determine all times.
        sustained_attention: the same for attention, by head width and mask, forward and backward; empty:
            `attention` and `attention_backward_rate` determine all times.
        pointwise: bytes/s of memory-bound kernels, by bytes moved.
        normalization: the same for norms; empty: as `pointwise`.
        table_precision: precision in which the tables were measured.
        attention_backward_rate: FLOP/s of the attention backward over those of the forward.
        flash_generation: FlashAttention generation of the attention table; None: unknown, and taken to
            compute pairs outside a layer's window too.
        attention_head_dim: head width of the attention table; None: valid for all.
        power: power limit at which the rates hold; None: unknown.
        launch: times between kernels; None: zero.
        narrow_rates: rates of products in narrow formats; other formats follow the peaks.
        kernel_floor_s: shortest time of a kernel.
        overheads_s: (action kind, seconds that the executor adds to each action of this kind).
        in_pipeline: (action kind, slowdown factor in a running pipeline over the same layers alone in a loop,
            where memory and caches are warm).
        without_messages: the same for passes without messages in between; none: as `in_pipeline`.
        optimizer_s_per_parameter: (precision, measured seconds); empty: computed from bytes.
        optimizer_update: AdamW variant of that measurement, "single" (per tensor) or "fused"; None: unknown.
        layers: layers measured as a whole; they take precedence over the tables.
        links: links of this machine.
        node_ranks: devices joined by the "intra" link, e.g. 72 in an NVLink rack; None: unknown.
        collectives: collectives measured over those links, scaled for links of other rates; others follow the
            ring formula.
        unmeasured: costs that were not measured, in words.
        like: profile whose tables were scaled by data sheets; None: this machine was measured.
        presumed: cells of the data sheet that are not published.
        fits: leave-one-out accuracy of each table.
        noise: reasons not to trust the measurement, in words; empty: none found, or not checked.
        yardstick_s: seconds of one yardstick run during the measurement; None: not recorded.
        format_version: version of the file format.
        provenance: origin of the measurements.
    """

    name: str
    device: str
    memory_bytes: int
    peak_flop_per_s: tuple[tuple[str, float], ...]
    peak_bytes_per_s: float | None
    provenance: Provenance
    matmul: Table = field(default_factory=Table)
    attention: Table = field(default_factory=Table)
    pointwise: Table = field(default_factory=Table)
    normalization: Table = field(default_factory=Table)
    table_precision: str = "bfloat16"
    sustained_products: tuple[SustainedProducts, ...] = field(default=(), metadata={WHERE_SET: True})
    sustained_attention: tuple[SustainedHeads, ...] = field(default=(), metadata={WHERE_SET: True})
    attention_backward_rate: float = 1.0
    flash_generation: int | None = field(default=None, metadata={WHERE_SET: True})
    attention_head_dim: int | None = None
    power: PowerLimit | None = field(default=None, metadata={WHERE_SET: True})
    launch: LaunchTimes | None = field(default=None, metadata={WHERE_SET: True})
    narrow_rates: tuple[NarrowRate, ...] = field(default=(), metadata={WHERE_SET: True})
    kernel_floor_s: float = 0.0
    overheads_s: tuple[tuple[str, float], ...] = ()
    in_pipeline: tuple[tuple[str, float], ...] = ()
    without_messages: tuple[tuple[str, float], ...] = field(default=(), metadata={WHERE_SET: True})
    optimizer_s_per_parameter: tuple[tuple[str, float], ...] = ()
    optimizer_update: str | None = field(default=None, metadata={WHERE_SET: True})
    layers: tuple[LayerTable, ...] = ()
    links: tuple[MachineLink, ...] = ()
    node_ranks: int | None = field(default=None, metadata={WHERE_SET: True})
    collectives: tuple[CollectiveTable, ...] = ()
    unmeasured: tuple[str, ...] = ()
    like: str | None = field(default=None, metadata={WHERE_SET: True})
    presumed: tuple[str, ...] = field(default=(), metadata={WHERE_SET: True})
    fits: tuple[Fit, ...] = ()
    noise: tuple[str, ...] = field(default=(), metadata={WHERE_SET: True})
    yardstick_s: float | None = field(default=None, metadata={WHERE_SET: True})
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"profile {self.name!r}: want format_version {FORMAT_VERSION}, got {self.format_version}"
            )
        rates = [self.attention_backward_rate, *(rate for _, rate in self.peak_flop_per_s)]
        rates += [] if self.peak_bytes_per_s is None else [self.peak_bytes_per_s]
        rates += [factor for _, factor in (*self.in_pipeline, *self.without_messages)]
        if min(rates) <= 0 or self.memory_bytes < 1:
            raise ValueError(f"profile {self.name!r}: rates and memory must be > 0")
        self.matmul.check_over(PRODUCT_AXES, "matmul")
        self.attention.check_over(ATTENTION_AXES, "attention")
        self.pointwise.check_over(BYTES_AXES, "pointwise")
        self.normalization.check_over(BYTES_AXES, "normalization")

    def peak(self, precision: str) -> float:
        """Dense matmul FLOP/s in that precision; ValueError when the profile has none."""
        for name, rate in self.peak_flop_per_s:
            if name == precision:
                return rate
        known = ", ".join(name for name, _ in self.peak_flop_per_s) or "none"
        raise ValueError(f"profile {self.name!r} has no matmul rate in {precision}, only in: {known}")

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak rate of the device memory; ValueError where the profile has none."""
        if self.peak_bytes_per_s is None:
            raise ValueError(f"profile {self.name!r} has no memory bandwidth: measure copies")
        return self.peak_bytes_per_s

    def overhead_s(self, kind: str) -> float:
        """Seconds the executor adds to an action of that kind ("F", ...); 0 where not measured."""
        return dict(self.overheads_s).get(kind, 0.0)

    def pipeline_factor(self, kind: str) -> float:
        """Seconds of an action of that kind in a pipeline over those alone; 1 where not measured."""
        return dict(self.in_pipeline).get(kind, 1.0)

    def alone_factor(self, kind: str) -> float:
        """The same of ranks that nobody hands rows to; that of a pipeline where not measured."""
        return dict(self.without_messages).get(kind, self.pipeline_factor(kind))

    def machine_link(self, scope: str) -> MachineLink:
        """Its "intra" or "inter" link; ValueError naming the known ones."""
        for link in self.links:
            if link.scope == scope:
                return link
        known = ", ".join(link.scope for link in self.links) or "none"
        raise ValueError(f"profile {self.name!r} has no {scope!r} link; it has {known}")


def ideal_profile(
    name: str = "ideal", *, flop_per_s: float = 1e12, bytes_per_s: float = 1e30, memory_bytes: int = 2**40
) -> Profile:
    """A machine that reaches its peak everywhere: for closed forms and as a yardstick."""
    precisions = ("bfloat16", "float32", "float64")
    return Profile(
        name=name,
        device=name,
        memory_bytes=memory_bytes,
        peak_flop_per_s=tuple((precision, flop_per_s) for precision in precisions),
        peak_bytes_per_s=bytes_per_s,
        provenance=Provenance(date="", clocks="", sources=("ideal",)),
        unmeasured=("everything: an ideal machine",),
    )


def known_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship, sorted."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by a name of its device ("A40", "A100-SXM4-80GB"), or a file by path.

    Raises:
        ValueError: no such name or file (names the known ones), or the first field that is
            missing, unknown or of the wrong kind.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if name in known_profiles() or not path.is_file():
        profile = _shipped(PROFILES / f"{shipped_device(name, known_profiles())}.json")
        check_memory(name, profile.device, profile.memory_bytes)
        return profile
    return _read(path)


@lru_cache(maxsize=MOST_REMEMBERED)
def _shipped(path: Path) -> Profile:
    """Read once: unlike a user's, these files do not change while a program runs."""
    return _read(path)


def _read(path: Path) -> Profile:
    return parse_profile(read_bounded(path, MOST_SETTINGS_BYTES), where=str(path))


def profile_schema() -> Schema:
    """JSON Schema of a profile file."""
    return of_dataclass(Profile, _JSON, {})


def parse_profile(text: str, *, where: str = "profile") -> Profile:
    """The JSON text of a profile; ValueError names the first wrong field."""
    data = parse_json(text, f"{where}: the profile")
    try:
        profile = _JSON.decode(Profile, data, "profile")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    assert isinstance(profile, Profile)
    return profile


def dump_profile(profile: Profile) -> str:
    """Canonical JSON text, a point a line; `parse_profile` gives an equal profile back."""
    return json_lines(_JSON.encode(profile)) + "\n"


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile; the file appears whole or not at all."""
    write_text(dump_profile(profile), path)
