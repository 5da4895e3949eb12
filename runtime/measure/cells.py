"""The measurements of a device by one process without a model: cells, each with a key."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product

import torch

from runtime.measure.attention import MASKS, AttentionSizes, attention_sizes, time_attention
from runtime.measure.clock import Clock, notes_of
from runtime.measure.operators import (
    LAUNCH,
    OPERATORS,
    Sizes,
    name_of,
    sizes_of,
    time_embedding,
    time_head,
    time_host_copies,
    time_launch,
    time_operator,
    time_products,
)
from runtime.measure.sustained import (
    SustainedSizes,
    sustained_sizes,
    time_sustained_attention,
    time_sustained_product,
)
from workbench.calibrate.measurement import AttentionRow, CopyRow, HostCopyRow, MatmulRow, OverheadRow, Row
from workbench.calibrate.sustained_rows import DeviceNotes, SustainedAttentionRow, SustainedMatmulRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One short measurement.

    Args:
        key: its name in files, the same in every run.
        kind: type of its rows.
        fields: values that identify its rows among those of all cells.
        measure: returns its rows, given the clock of a device.
    """

    key: str
    kind: type[Row]
    fields: tuple[tuple[str, object], ...]
    measure: Callable[[Clock], Sequence[Row]]

    def is_in(self, rows: Sequence[Row]) -> bool:
        """Whether these rows include some of this cell."""
        return any(
            isinstance(row, self.kind) and all(getattr(row, name) == want for name, want in self.fields)
            for row in rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSizes:
    """Sizes of all measurements on one device."""

    short: Sizes
    attention: AttentionSizes
    sustained: SustainedSizes


def cell_sizes(device: torch.device | str) -> CellSizes:
    """Sizes that keep such a device busy without filling its memory."""
    return CellSizes(
        short=sizes_of(device), attention=attention_sizes(device), sustained=sustained_sizes(device)
    )


def operator_cells(
    device: torch.device | str, dtype: torch.dtype, sizes: CellSizes | None = None
) -> tuple[Cell, ...]:
    """All cells of a device; short calls come first, before long loops heat it.

    `cell.measure(Clock(device))` returns the rows of one; `workbench.calibrate.fit.fit` fits a profile to
    all.
    """
    chosen = sizes or cell_sizes(device)
    short, sustained = chosen.short, chosen.sustained
    cells = [
        _cell("kernel launch", OverheadRow, lambda clock: time_launch(clock, short), action=LAUNCH),
        *_products(short, dtype),
        *_memory_bound(short, dtype),
        *_attention(chosen.attention, dtype),
    ]
    if torch.device(device).type == "cuda":
        cells.append(_cell("host copies", HostCopyRow, lambda clock: time_host_copies(clock, short)))
    return (*cells, *_sustained_products(sustained, dtype), *_sustained_attention(sustained, dtype))


def _cell(what: str, kind: type[Row], measure: Callable[[Clock], Sequence[Row]], **fields: object) -> Cell:
    key = " ".join([what, *(f"{name}={value}" for name, value in fields.items())])
    return Cell(
        key=key, kind=kind, fields=tuple(fields.items()), measure=partial(_with_device_notes, measure)
    )


def _with_device_notes(measure: Callable[[Clock], Sequence[Row]], clock: Clock) -> Sequence[Row]:
    """The rows; those without notes get the device's readings before and after."""
    before = clock.gauge()
    rows = measure(clock)
    notes = notes_of(before, (None, None), clock.gauge())
    if notes == DeviceNotes():
        return rows
    return [
        replace(row, **asdict(notes)) if isinstance(row, DeviceNotes) and _lacks_notes(row) else row
        for row in rows
    ]


def _lacks_notes(row: DeviceNotes) -> bool:
    return all(getattr(row, note.name) is None for note in fields(DeviceNotes))


def _products(sizes: Sizes, dtype: torch.dtype) -> Iterator[Cell]:
    for m, n, k in sizes.products:
        call = partial(time_products, dtype=dtype, shapes=((m, n, k),), budget_s=sizes.budget_s)
        yield _cell("product", MatmulRow, call, precision=name_of(dtype), m=m, n=n, k=k)


def _memory_bound(sizes: Sizes, dtype: torch.dtype) -> Iterator[Cell]:
    calls = {name: partial(time_operator, sizes=sizes, dtype=dtype, name=name) for name in OPERATORS}
    calls["embedding"] = partial(time_embedding, sizes=sizes, dtype=dtype)
    calls["cross_entropy"] = partial(time_head, sizes=sizes, dtype=dtype)
    for name, call in calls.items():
        yield _cell("operator", CopyRow, call, precision=name_of(dtype), operator=name)


def _attention(sizes: AttentionSizes, dtype: torch.dtype) -> Iterator[Cell]:
    for mask, length in product(MASKS, sizes.lengths):
        call = partial(time_attention, sizes=replace(sizes, lengths=(length,)), dtype=dtype, mask=mask)
        yield _cell("attention", AttentionRow, call, precision=name_of(dtype), mask=mask, length=length)


def _sustained_products(sizes: SustainedSizes, dtype: torch.dtype) -> Iterator[Cell]:
    for m, n, k in sizes.products:
        call = partial(time_sustained_product, sizes=sizes, dtype=dtype, shape=(m, n, k))
        yield _cell("sustained product", SustainedMatmulRow, call, precision=name_of(dtype), m=m, n=n, k=k)


def _sustained_attention(sizes: SustainedSizes, dtype: torch.dtype) -> Iterator[Cell]:
    for head_dim, mask, length in product(sizes.head_dims, sizes.masks, sizes.lengths):
        call = partial(
            time_sustained_attention, sizes=sizes, dtype=dtype, head_dim=head_dim, mask=mask, length=length
        )
        at = {"head_dim": head_dim, "mask": mask, "length": length}
        yield _cell("sustained attention", SustainedAttentionRow, call, precision=name_of(dtype), **at)
