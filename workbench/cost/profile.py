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
    """Points (coordinate, ..., rate) of one operation.

    Args:
        axes: names of the coordinates.
        points: one tuple a point; the last number is the rate, in FLOP/s or bytes/s.
        measured: False when scaled from another machine or from a data sheet.
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
    """Products in one direction, in long loops over operands that take turns.

    Args:
        direction: which of the three products.
        table: FLOP/s by the forward's (m, n, k).
    """

    direction: Direction
    table: Table

    def __post_init__(self) -> None:
        self.table.check_over(PRODUCT_AXES, f"sustained products, {self.direction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedHeads:
    """Attention with heads of one width, in long loops over operands that take turns.

    Args:
        head_dim: their width.
        causal: whether the mask is causal; else every query sees every key.
        forward: FLOP/s by (length, heads, queries per key), as of `Profile.attention`.
        backward: the same; FLOP is 2.5 times the forward's.
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
        scope, name: "intra" or "inter", and how it is called.
        bytes_per_s: of one rank's port, or of one network card, in one direction.
        latency_s: from the end of sending to arrival.
        measured, source: whether it was measured, not taken from a data sheet, and where.
        per_node: of an "inter" link, network cards of a node; None: one for each of its ranks.
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
        collective, scope: which, and of which link.
        table: bytes/s by (ranks, bytes of the whole tensor).
    """

    collective: str
    scope: str
    table: Table

    def __post_init__(self) -> None:
        self.table.check_over(COLLECTIVE_AXES, f"{self.collective} of the {self.scope!r} link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Leave-one-out quality of one table.

    Args:
        table: which.
        num_points: in it.
        median, p90: of the absolute relative errors.
    """

    table: str
    num_points: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who measured what, with what.

    Args:
        date: of the measurement.
        clocks: of the device.
        versions: (package, version) pairs.
        sources: files or papers.
    """

    date: str
    clocks: str
    versions: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Facts about one machine. An empty table means: the peak rate is assumed.

    Args:
        name: how users call it.
        device: as `Node.device` says it.
        memory_bytes: of one device.
        peak_flop_per_s: (precision, dense matmul peak) pairs.
        peak_bytes_per_s: of the device memory; None where nobody knows.
        matmul: FLOP/s by (m, n, k) of y[m, n] = x[m, k] w[k, n], forward, in short loops over one set of
            operands.
        attention: FLOP/s by (length, heads, queries per key), causal forward, in short loops; heads counts
            all sequences of the launch, FLOP is 4 x head_dim x query-key pairs x heads.
        sustained_products: rates of long loops, direction by direction. Where they are there, a price is
            that of `matmul` times what the long loop takes of it; empty: short loops price all.
        sustained_attention: the same of attention by head width and mask, forward and backward; empty:
            `attention` and `attention_backward_rate` price all widths.
        pointwise: bytes/s by bytes moved.
        normalization: the same for norms; empty: as pointwise.
        table_precision: precision in which the tables were measured.
        attention_backward_rate: backward FLOP/s over forward FLOP/s of attention.
        flash_generation: of FlashAttention in the attention table; None: not noted, and taken to compute what
            a layer's window hides.
        attention_head_dim: head width in the attention table; None: holds for any.
        power: limit under which the rates hold; None: nobody noted it.
        launch: times between kernels; None: none.
        narrow_rates: of products in narrow formats; others follow the peaks.
        kernel_floor_s: no kernel is shorter.
        overheads_s: (action kind, seconds the executor adds to each such action).
        in_pipeline: (action kind, how many times as long it takes in a running pipeline as its parts
            do alone in a loop, where memory and caches are as they left them).
        without_messages: the same of passes between which no messages come and go; none: as `in_pipeline`.
        optimizer_s_per_parameter: (precision, seconds) measured; absent: by bytes.
        optimizer_update: how AdamW ran for that, "single" tensor after tensor or "fused"; None: not noted.
        layers: layers measured as a whole; they win over the tables.
        links: of this machine.
        node_ranks: devices that its "intra" link joins, 72 in a rack of NVLink; None: not said.
        collectives: measured over those links; any other follows the ring formula.
        unmeasured: costs that no row stands behind, in words.
        like: the profile whose tables were rescaled by data sheets; None: this machine was measured.
        presumed: cells of its data sheet that nobody published.
        fits: leave-one-out quality per table.
        noise: why the measurement is not to be trusted, in words; empty: no reason was seen, or asked for.
        yardstick_s: seconds of a turn of the yardstick while it was measured; None: not read.
        format_version: of the file.
        provenance: of it all.
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
