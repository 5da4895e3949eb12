"""Cross-attention is measured where there is something to read, and priced by what it reads."""

from dataclasses import replace

import pytest

from runtime.measure.layer_rows import rows_of
from runtime.measure.layers import time_window
from runtime.measure.windows import windows_of
from runtime.world.pool import Place
from tests import cross_models, tiny_models
from workbench.calibrate.fit import layer_fits, layer_tables
from workbench.calibrate.measurement import LayerRow
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.cost.roofline import RowWork, Work
from workbench.cost.signature import signature
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.plan import Plan, Precision, Settings
from workbench.plan.work import work_of

ALONE = Place(process=0, size=1, report=lambda position: None)
WIRE = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
CROSS = cross_models.language().layers[cross_models.CROSS[0]]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four samples in microbatches of one: three read images, one has none."""
    settings = Settings(precision=Precision.FLOAT32)
    draft = tiny_models.plan_of(cross_models.model(), cross_models.batch(), settings=settings)
    parts = batched_microbatches(draft, samples_per_microbatch=1, replicas=(0,))
    return replace(draft, microbatches=parts)


@pytest.fixture(scope="module")
def rows(plan: Plan) -> list[LayerRow]:
    windows = [window for window in windows_of(plan, sizes=9) if window.module == "llm"]
    found = (
        row for window in windows for row in rows_of(plan, window, [time_window(ALONE, plan, window, 0.0005)])
    )
    return [row for row in found if isinstance(row, LayerRow)]


def test_a_row_says_what_was_read(plan: Plan, rows: list[LayerRow]) -> None:
    """Of cross-attention; its neighbours work on the same tokens and read nothing."""
    works = [work_of(plan, m).rows[0] for m in plan.microbatches if m.module == "llm"]
    expected = {(w.tokens_in, w.context_tokens, w.reader_tokens, w.context_area) for w in works}
    own = [row for row in rows if row.signature == signature(CROSS)]
    read = {(r.tokens_in, r.context_tokens, r.reader_tokens, r.context_area) for r in own}
    assert read == {size for size in expected if size[1]}
    assert len(read) == 3
    assert all(row.forward_s > 0 and row.input_grad_s > 0 for row in own)
    others = [row for row in rows if row.signature != signature(CROSS)]
    assert others
    assert all(row.context_tokens == row.reader_tokens == row.context_area == 0 for row in others)


def test_its_price_is_what_was_measured(plan: Plan, rows: list[LayerRow]) -> None:
    tables = layer_tables(rows)
    cost = CostModel(replace(ideal_profile(), layers=tables))
    for microbatch in plan.microbatches:
        if microbatch.module != "llm":
            continue
        work = work_of(plan, microbatch)
        price = cost.layer_time(CROSS, work, tp=1, cp=1, precision=Precision.FLOAT32, link=WIRE)
        alike = [r for r in rows if r.signature == signature(CROSS) and _is_of(r, work.rows[0])]
        if not work.rows[0].reader_tokens:
            assert not alike
            assert price.forward_s == 0.0
            assert not price.unmeasured
            continue
        (row,) = alike
        assert price.forward_s == row.forward_s
        assert price.input_grad_s == row.input_grad_s
        assert not price.unmeasured


def test_more_to_read_takes_longer_at_equal_tokens() -> None:
    """Times that are linear in what is read come back between and beyond the measured sizes."""
    sizes = [(12, c, r, r * c) for r in (4, 12) for c in (32, 64, 128)]
    rows = [_row(*size, seconds=1e-6 * (size[2] + size[1]) + 1e-8 * size[3]) for size in sizes]
    cost = CostModel(replace(ideal_profile(), layers=layer_tables(rows)))

    def seconds(context: int, readers: int) -> float:
        work = Work((RowWork(12, 12, 78, context, readers, readers * context),))
        return cost.layer_time(CROSS, work, tp=1, cp=1, precision=Precision.FLOAT32, link=WIRE).forward_s

    assert seconds(96, 12) == pytest.approx(1e-6 * 108 + 1e-8 * 12 * 96, rel=0.02)
    assert seconds(64, 4) < seconds(96, 4) < seconds(128, 4)
    assert seconds(64, 4) < seconds(64, 8) < seconds(64, 12)


def test_errors_are_of_sizes_left_out() -> None:
    sizes = [(12, c, r, r * c) for r in (4, 8, 12) for c in (32, 64, 128)]
    rows = [_row(*size, seconds=1e-6 * (size[2] + size[1]) + 1e-8 * size[3]) for size in sizes]
    (forward, _) = layer_fits(layer_tables(rows))
    assert forward.median <= 0.02


def _is_of(row: LayerRow, work: RowWork) -> bool:
    return (row.tokens_in, row.context_tokens, row.reader_tokens) == (
        work.tokens_in,
        work.context_tokens,
        work.reader_tokens,
    )


def _row(tokens: int, context: int, readers: int, area: int, *, seconds: float) -> LayerRow:
    return LayerRow(
        signature=signature(CROSS),
        precision="float32",
        rows=1,
        tokens_in=tokens,
        tokens_out=tokens,
        attention_area=tokens * (tokens + 1) // 2,
        context_tokens=context,
        reader_tokens=readers,
        context_area=area,
        forward_s=seconds,
        input_grad_s=seconds,
        weight_grad_s=seconds,
    )
