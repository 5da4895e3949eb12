"""Measurements cover what a plan is made of, go on where they stopped, and price the plan."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.bench_layers import Asked, points_of, quartile_spread, rows_of, time_point
from runtime.bench_machine import build_empty, time_executor, time_messages, time_reductions
from runtime.launch import run_lowered
from runtime.microbench import BenchSettings, header_here, measure
from runtime.pool import Pool
from runtime.rank_job import RunSettings
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import (
    LayerRow,
    Measurement,
    OptimizerRow,
    read_measurement,
    write_measurement,
)
from workbench.cost.model import CostModel
from workbench.cost.signature import signature
from workbench.graph.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.price import price
from workbench.plan.work import work_of

QUICK = BenchSettings(sizes=2, budget_s=0.001, timeout_s=60.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    return disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts)


@pytest.fixture(scope="module")
def measured(plan: Plan, pool: Pool) -> Measurement:
    return measure([plan], pool, settings=QUICK)


def test_every_layer_and_size_is_measured_once(plan: Plan, measured: Measurement) -> None:
    rows = [row for row in measured.rows if isinstance(row, LayerRow)]
    wanted = {signature(layer) for module in plan.model.modules for layer in module.layers}
    assert {row.signature for row in rows} == wanted
    assert len({(row.signature, row.rows, row.tokens_in, row.attention_area) for row in rows}) == len(rows)
    assert all(row.forward_s > 0 and row.weight_grad_s >= 0 and row.repeats >= 3 for row in rows)
    embeds = [row for row in rows if row.signature == signature(plan.model.module("vision").layers[0])]
    assert all(row.input_grad_s == 0 and row.weight_grad_s == row.weight_only_s for row in embeds)


def test_mean_rows_keep_the_sums(plan: Plan) -> None:
    points = points_of(plan, sizes=9)
    for point in points:
        work = work_of(plan, point.microbatch)
        rows = len(work.rows)
        assert point.num_rows == rows
        assert abs(point.row.tokens_in * rows - sum(row.tokens_in for row in work.rows)) <= rows / 2
        assert abs(point.row.attention_area * rows - work.attention_area) <= rows / 2
    blocks = [point for point in points if point.module == "llm" and point.layer == 1]
    assert {point.chain for point in blocks} == {2}
    assert len(points_of(plan, sizes=1)) < len(points)


def test_profile_prices_every_action_from_measured_layers(plan: Plan, measured: Measurement) -> None:
    profile = fit("here", [measured])
    prices = price(lower(plan), CostModel(profile))
    assert all(seconds > 0 for seconds in prices.durations_s.values())
    assert not any("layer" in reason and "outside" not in reason for reason in prices.unmeasured)


def test_an_interrupted_measurement_goes_on(
    plan: Plan, pool: Pool, measured: Measurement, tmp_path: Path
) -> None:
    path = tmp_path / "here.jsonl"
    layers = [row for row in measured.rows if isinstance(row, LayerRow)]
    kept = tuple(row for row in measured.rows if row is not layers[-1])
    write_measurement(Measurement(measured.header, kept), path)
    again = measure([plan], pool, settings=QUICK, path=path)
    assert again.rows[: len(kept)] == kept
    added = again.rows[len(kept) :]
    assert [type(row) for row in added] == [LayerRow, OptimizerRow]
    assert isinstance(added[0], LayerRow)
    assert added[0].signature == layers[-1].signature
    assert read_measurement(path) == again
    assert [file.name for file in tmp_path.iterdir()] == ["here.jsonl"]


def test_rows_of_other_software_are_refused(
    plan: Plan, pool: Pool, measured: Measurement, tmp_path: Path
) -> None:
    path = tmp_path / "other.jsonl"
    header = replace(measured.header, versions=(("torch", "1.0"),))
    write_measurement(Measurement(header, measured.rows), path)
    with pytest.raises(ValueError, match=r"versions is .* measure into another file"):
        measure([plan], pool, settings=QUICK, path=path)


def test_nothing_to_measure_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="want at least one plan"):
        measure([], pool)
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        BenchSettings(concurrency=0)


def test_processes_that_measure_together_all_report(plan: Plan, pool: Pool) -> None:
    point = next(point for point in points_of(plan, sizes=1) if point.module == "llm" and point.layer == 1)
    times = pool.run(time_point, 2, plan, point, 0.001)
    assert len(times) == 2
    assert all(set(found.backward_s) == set(Asked) for found in times)
    layer_row, optimizer_row = rows_of(plan, point, times)
    assert isinstance(layer_row, LayerRow)
    assert layer_row.repeats == sum(len(found.forward_s) for found in times)
    assert layer_row.forward_s == statistics.median(s for found in times for s in found.forward_s)
    assert isinstance(optimizer_row, OptimizerRow)
    assert optimizer_row.num_parameters == 2 * plan.model.module("llm").layers[1].num_parameters


def test_empty_stages_have_the_shapes_of_real_ones(plan: Plan, pool: Pool) -> None:
    """Every message of the plan fits, so the whole step runs; its loss is zero."""
    result = run_lowered(lower(plan), RunSettings(), pool=pool, build=build_empty)
    assert result.losses == (0.0,)
    stage = plan.stages[-1]
    empty = build_empty(plan, stage, seed=0, dtype=torch.float32, weights=None, device="cpu")
    assert {key.layer for key in empty.weights()} == set(range(*stage.layers))


def test_overheads_are_of_the_kinds_that_run(plan: Plan, pool: Pool) -> None:
    rows = time_executor(plan, pool, steps=2)
    assert [row.action for row in rows] == ["B", "F", "STEP"]
    step_s = run_lowered(lower(plan), RunSettings(), pool=pool, build=build_empty).trace.iteration_s
    assert all(0 < row.seconds < max(0.1, step_s) for row in rows)  # a busy machine slows both


def test_big_messages_move_more_bytes_a_second(pool: Pool) -> None:
    """What a message costs at least stands beside what a byte costs, on however busy a machine."""
    messages = pool.run(time_messages, 2)[0]
    assert messages[-1].num_bytes > 1000 * messages[0].num_bytes
    assert all(row.seconds > 0 for row in messages)
    assert messages[-1].num_bytes / messages[-1].seconds > messages[0].num_bytes / messages[0].seconds
    reductions = pool.run(time_reductions, 3)[0]
    assert {row.num_ranks for row in reductions} == {3}
    assert reductions[-1].num_bytes > 1000 * reductions[0].num_bytes
    assert reductions[-1].num_bytes / reductions[-1].seconds > reductions[0].num_bytes / reductions[0].seconds


def test_header_names_machine_and_software() -> None:
    header = header_here()
    assert dict(header.versions)["torch"] == torch.__version__
    assert header.memory_bytes > 2**28
    assert header.device == "cpu"


def test_quartile_spread() -> None:
    assert quartile_spread([1.0]) == 0.0
    assert quartile_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4.0 - 2.0) / 3.0)
