"""Measurements cover what a plan is made of, go on where they stopped, and price the plan."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.fidelity.divided import as_experts, as_sequences, as_tensors, experts_work
from experiments.fidelity.work import UNMEASURED, this_machine
from experiments.fidelity.work import plan_of as plan_of_work
from runtime.launch import run_lowered
from runtime.measure import wires as bench_wires
from runtime.measure.clock import Clock, quartile_spread
from runtime.measure.executor import build_empty, time_executor
from runtime.measure.layer_rows import rows_of
from runtime.measure.layers import LayerKind, Part, Seconds, WindowTimes, time_window
from runtime.measure.microbench import header_here
from runtime.measure.plans import BenchSettings, executor_tasks, layer_tasks, measure, measuring_tasks
from runtime.measure.windows import runs_of, windows_of
from runtime.measure.wires import Ring, least_median, time_collective, time_messages, time_overlap
from runtime.run_settings import RunSettings
from runtime.world.pool import Place, Pool
from tests.plans import disjoint_plan
from tests.test_context_parallel_step import plan_of, with_owners
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.calibrate.fit import fit, layer_tables
from workbench.calibrate.measurement import (
    CollectiveRow,
    LayerRow,
    LinkRow,
    Measurement,
    OptimizerRow,
    OverheadRow,
    OverlapRow,
    read_measurement,
    write_measurement,
)
from workbench.cost.execution import ActivationCut
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.cost.signature import signature
from workbench.model.trainable import Trainable
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.work import work_of
from workbench.schedule.choice import ScheduleKind, usual
from workbench.timing.price import price

QUICK = BenchSettings(sizes=2, budget_s=0.001, timeout_s=60.0)
ALONE = Place(0, 1, lambda position: None)


@pytest.fixture(scope="module")
def plan() -> Plan:
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    return disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts)


@pytest.fixture(scope="module")
def measured(plan: Plan, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """All layers and the executor; operators and wires have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.measure.plans.operator_tasks", lambda clock, dtype: [])
        patch.setattr("runtime.measure.plans.wire_tasks", lambda clock, rings, mine: [])
        return measure([plan], pool, settings=QUICK, path=tmp_path_factory.mktemp("rows") / "rows.jsonl")


def test_every_layer_and_size_is_measured_once(plan: Plan, measured: Measurement) -> None:
    rows = [row for row in measured.rows if isinstance(row, LayerRow)]
    wanted = {signature(layer) for module in plan.model.modules for layer in module.layers}
    assert {row.signature for row in rows} == wanted
    assert len({(row.signature, row.rows, row.tokens_in, row.attention_area) for row in rows}) == len(rows)
    assert all(row.forward_s > 0 and row.weight_grad_s >= 0 and row.repeats >= 3 for row in rows)
    assert all(row.forward_only_s and row.split_input_s is not None for row in rows)
    assert {row.recompute_forward_s for row in rows} == {None}  # no plan wants it
    embeds = [row for row in rows if row.signature == signature(plan.model.module("vision").layers[0])]
    assert all(row.input_grad_s == 0 and row.weight_grad_s > 0 and row.weight_only_s for row in embeds)
    blocks = [row for row in rows if row.signature == signature(plan.model.module("llm").layers[1])]
    assert all(row.split_input_s and row.split_weight_s and row.input_grad_s > 0 for row in blocks)


def test_visits_of_a_window_lie_apart_and_an_interrupted_one_goes_on(plan: Plan, pool: Pool) -> None:
    once, twice = (layer_tasks([plan], pool, replace(QUICK, visits=visits)) for visits in (1, 2))
    names = [task.what for task in once]
    assert [task.what for task in twice] == names * 2
    first, again = twice[0], twice[len(names)]
    rows = tuple(first.measure())
    assert (first.is_done(rows), again.is_done(rows)) == (True, False)
    rows += tuple(again.measure())
    assert again.is_done(rows)
    both = [row for row in rows if isinstance(row, LayerRow)]
    (table,) = [table for table in layer_tables(both) if table.signature == both[0].signature]
    seconds = [row.forward_s for row in both if row.signature == both[0].signature]
    assert len(seconds) == 2
    assert [point.forward_s for point in table.points] == [pytest.approx(sum(seconds) / 2)]


def test_long_runs_of_equal_layers_are_cut_short() -> None:
    names = ["embed", *["block"] * 6, "head", *["block"] * 2, "last"]
    assert runs_of(names) == [(0, 4), (7, 8), (10, 11)]
    assert runs_of(["even", "odd"] * 4) == [(0, 6)]
    assert runs_of(["only"]) == [(0, 1)]


def test_windows_hold_every_distinct_layer_and_at_most_three_alike(plan: Plan) -> None:
    for window in windows_of(plan, sizes=9):
        work = work_of(plan, window.microbatch)
        rows = len(work.rows)
        assert window.num_rows == rows
        assert abs(window.row.tokens_in * rows - sum(row.tokens_in for row in work.rows)) <= rows / 2
        assert abs(window.row.attention_area * rows - work.attention_area) <= rows / 2
        keys = window.keys(plan)
        assert max(keys.count(key) for key in keys) <= 3
    assert len(windows_of(plan, sizes=1)) < len(windows_of(plan, sizes=9))


def test_profile_prices_every_action_from_measured_layers(plan: Plan, measured: Measurement) -> None:
    profile = fit("here", [measured])
    prices = price(lower(plan), CostModel(profile))
    assert all(seconds > 0 for seconds in prices.durations_s.values())
    assert not any("layer" in reason and "outside" not in reason for reason in prices.unmeasured)


def test_an_interrupted_measurement_goes_on(
    plan: Plan, pool: Pool, measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.measure.plans.operator_tasks", lambda clock, dtype: [])
    monkeypatch.setattr("runtime.measure.plans.wire_tasks", lambda clock, rings, mine: [])
    path = tmp_path / "here.jsonl"
    layers = [row for row in measured.rows if isinstance(row, LayerRow)]
    kept = tuple(row for row in measured.rows if row is not layers[-1])
    write_measurement(Measurement(measured.header, kept), path)
    again = measure([plan], pool, settings=QUICK, path=path)
    assert again.rows[: len(kept)] == kept
    added = again.rows[len(kept) :]
    assert {type(row) for row in added} == {LayerRow, OptimizerRow}
    assert layers[-1].signature in {row.signature for row in added if isinstance(row, LayerRow)}
    assert read_measurement(path) == again
    assert [file.name for file in tmp_path.iterdir()] == ["here.jsonl"]


def test_nothing_to_measure_is_refused(plan: Plan, pool: Pool) -> None:
    with pytest.raises(ValueError, match="want at least one plan"):
        measure([], pool)
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        BenchSettings(concurrency=0)
    gpu = replace(QUICK, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="a pool have no cuda:0: it is measured by one process"):
        measure([plan], pool, settings=gpu)


def test_one_process_measures_layers_and_executor_alone(
    plan: Plan, measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does on a GPU: the same rows as on a pool, but for what several processes say to each other."""
    monkeypatch.setattr("runtime.measure.plans.operator_tasks", lambda clock, dtype: [])
    names = [task.what for task in measuring_tasks([plan, plan], None, replace(QUICK, sizes=3))]
    assert len(set(names)) == len(names)
    before = torch.get_num_threads()
    alone = measure([plan], None, settings=QUICK)
    assert torch.get_num_threads() == before
    for kind, key in (
        (LayerRow, lambda row: (row.signature, row.rows, row.tokens_in)),
        (OverheadRow, lambda row: row.action),
    ):
        ours, theirs = (
            [key(row) for row in found.rows if isinstance(row, kind)] for found in (alone, measured)
        )
        assert ours == theirs
        assert ours
    assert not [row for row in alone.rows if isinstance(row, LinkRow | CollectiveRow)]


def test_processes_that_measure_together_all_report(plan: Plan, pool: Pool) -> None:
    window = next(window for window in windows_of(plan, sizes=1) if window.module == "llm")
    times = pool.run(time_window, 2, plan, window, 0.001)
    assert len(times) == 2
    block = signature(plan.model.module("llm").layers[1])
    rows = list(rows_of(plan, window, times))
    (row,) = [row for row in rows if isinstance(row, LayerRow) and row.signature == block]
    alike = [
        index for index in range(*window.layers) if plan.model.module("llm").layers[index].kind == "block"
    ]
    found = [s for t in times for i in alike for s in t.seconds[i, LayerKind.WHOLE, Part.FORWARD]]
    assert (row.repeats, row.forward_s) == (len(found), statistics.median(found))
    optimizer = [row for row in rows if isinstance(row, OptimizerRow)]
    layers = plan.model.module("llm").layers[slice(*window.layers)]
    assert optimizer[-1].num_parameters == sum(layer.num_parameters for layer in layers)
    assert optimizer[0].num_parameters == layers[-1].num_parameters


def test_shared_tokens_are_measured_on_as_many_processes(pool: Pool) -> None:
    """Ranks that share tokens run a window together, and its price is not scaled from one rank."""
    shared = with_owners(plan_of("everything", "mp", cp=2), "lpt")
    windows = [window for window in windows_of(shared, sizes=1) if window.module == "llm"]
    assert {window.cp for window in windows} == {2}
    rows = [
        row
        for window in windows
        for row in rows_of(shared, window, pool.run(time_window, 2, shared, window, 0.001))
    ]
    layers = [row for row in rows if isinstance(row, LayerRow)]
    assert {row.cp for row in layers} == {2}
    assert {row.recompute_backward_s for row in layers} == {None}  # one process alone times that
    assert min(row.forward_s for row in layers) > 0
    header = header_here("cpu", [])
    cost = CostModel(fit("shared", [Measurement(header=header, rows=tuple(rows))]))
    llm = shared.model.module("llm")
    work = work_of(shared, windows[0].microbatch)
    for layer in llm.layers:
        time = cost.layer_time(layer, work, tp=1, cp=2, precision=str(windows[0].precision))
        assert not [reason for reason in time.unmeasured if "scaled" in reason]


@pytest.mark.parametrize("as_divided", [as_tensors, as_sequences, as_experts])
def test_divided_weights_are_measured_on_as_many_processes(
    pool: Pool, as_divided: Callable[[Plan], Plan]
) -> None:
    """Ranks that divide weights run a window together; a table holds for one way to divide alone."""
    work = experts_work()
    cuts = {"llm": ((len(work.model.module("llm").layers), (0, 1)),)}
    cluster = this_machine(UNMEASURED, 2)
    divided = plan_of_work(work, cluster, cuts, samples=(1,) * 6, divided=as_divided)
    stage, settings = divided.stages[0], divided.settings
    alone, together = windows_of(divided, sizes=1)
    assert (alone.num_processes, together.num_processes) == (1, 2)
    assert layer_tasks([divided], None, QUICK)[0].what == layer_tasks([divided], pool, QUICK)[0].what
    assert [len(layer_tasks([divided], of, QUICK)) for of in (None, pool)] == [1, 2]
    rows = list(rows_of(divided, together, pool.run(time_window, 2, divided, together, 0.001)))
    layers = [row for row in rows if isinstance(row, LayerRow)]
    assert {row.tp for row in layers} == {2}
    assert {row.ep for row in layers} == ({1, 2} if stage.ep > 1 else {1})
    assert {row.sequence_parallel for row in layers} >= {settings.of("llm").sequence_parallel}
    cost = CostModel(replace(ideal_profile(), layers=layer_tables(layers)))
    assert not [reason for reason in price(lower(divided), cost).unmeasured if "scaled" in reason]
    found = {
        (ep, cut): cost.executed(replace(cost.execution, activations=cut))
        .with_expert_parallel(ep)
        .layer_time(
            divided.model.module("llm").layers[1],
            work_of(divided, together.microbatch),
            tp=2,
            cp=1,
            precision="float32",
            link=UNMEASURED,
        )
        .forward_s
        for ep in (1, 2)
        for cut in ActivationCut
    }
    read = [key for key, forward_s in found.items() if forward_s == layers[1].forward_s]
    assert read == [
        (stage.ep, ActivationCut.SEQUENCE if layers[1].sequence_parallel else ActivationCut.WHOLE)
    ]


@pytest.mark.parametrize(("num_processes", "expected_s"), [(1, 0.010), (2, 0.012)])
def test_what_processes_share_counts_by_the_mean_of_its_median_round(
    num_processes: int, expected_s: float
) -> None:
    """Neither the long first round nor which process waited decides; in the median call the second would."""
    work = experts_work()
    cuts = {"llm": ((len(work.model.module("llm").layers), tuple(range(num_processes))),)}
    divided = plan_of_work(work, this_machine(UNMEASURED, 2), cuts, samples=(1,) * 6, divided=as_tensors)
    window = windows_of(divided, sizes=1)[-1]
    assert window.num_processes == num_processes
    layers, calls_s = range(*window.layers), (1.0, *[0.010] * 4)
    times = []
    for process in range(num_processes):
        seconds: Seconds = {
            (layer, kind, part): [call_s + 0.004 * process for call_s in calls_s]
            for layer in layers
            for kind in LayerKind
            for part in Part
        }
        times.append(WindowTimes(seconds=seconds, optimizer_s=()))
    rows = [row for row in rows_of(divided, window, times) if isinstance(row, LayerRow)]
    assert [row.forward_s for row in rows] == [pytest.approx(expected_s)] * len(rows)


def test_every_layer_of_a_pass_is_timed(plan: Plan) -> None:
    """Every call of a pass has one time for each of its layers, whether or not they are run again."""
    window = max(windows_of(plan, sizes=1), key=lambda window: window.layers[1])
    times = time_window(ALONE, plan, replace(window, is_recomputed=True), 0.001)
    for kind, part in (
        (LayerKind.WHOLE, Part.FORWARD),
        (LayerKind.WHOLE, Part.BACKWARD),
        (LayerKind.SPLIT, Part.LATER),
        (LayerKind.RECOMPUTED, Part.FORWARD),
        (LayerKind.RECOMPUTED, Part.BACKWARD),
        (LayerKind.RECOMPUTED_IDLE, Part.FORWARD),
    ):
        calls = [times.seconds[index, kind, part] for index in range(*window.layers)]
        assert len({len(found) for found in calls}) == 1
        assert all(second >= 0 for found in calls for second in found)
    assert not any(
        (kind, part) == (LayerKind.RECOMPUTED_IDLE, Part.BACKWARD) for _, kind, part in times.seconds
    )


def test_empty_stages_have_the_shapes_of_real_ones(plan: Plan, pool: Pool) -> None:
    """Every message of the plan fits, so the whole step runs; its loss is zero."""
    result = run_lowered(lower(plan), RunSettings(), pool=pool, build=build_empty)
    assert result.losses == (0.0,)
    stage = plan.stages[-1]
    empty = build_empty(
        plan, stage, seed=0, dtype=torch.float32, weights=None, device="cpu", tensor=None, experts=None
    )
    assert {key.layer for key in empty.weights()} == set(range(*stage.layers))


@pytest.mark.parametrize("is_alone", [False, True], ids=["processes", "one process plays all ranks"])
def test_overheads_are_of_the_kinds_that_run(plan: Plan, pool: Pool, is_alone: bool) -> None:
    rows = time_executor(plan, None if is_alone else pool, steps=2)
    assert [row.action for row in rows] == ["B", "F", "STEP"]
    step_s = run_lowered(lower(plan), RunSettings(), pool=pool, build=build_empty).trace.iteration_s
    assert all(0 < row.seconds < max(0.1, step_s) for row in rows)  # a busy machine slows both


def test_passes_that_the_first_plan_lacks_are_timed_in_one_that_has_them(plan: Plan) -> None:
    """Of empty stages nothing is left to a W; of the second plan no kind counts that the first one has."""
    split = with_programs(plan, usual(ScheduleKind.ZB_H1))
    tasks = executor_tasks([plan, plan, split], None, BenchSettings())
    assert [task.what for task in tasks] == ["executor of B, F", "executor of I, W"]
    rows = [[row.action for row in task.measure()] for task in tasks]
    assert rows == [["B", "F", "STEP"], ["I", "W"]]
    assert not tasks[0].is_done(())


def wires(place: Place) -> list[LinkRow | CollectiveRow | OverlapRow]:
    """Everything that two processes say to each other, in two sizes."""
    bench_wires.BYTES = (2**10, 2**22)
    ring = Ring(link="intra", processes=tuple(range(place.size)), process=place.process)
    rows: list[LinkRow | CollectiveRow | OverlapRow] = [*time_messages(Clock(), ring)]
    for name in bench_wires.COLLECTIVES:
        rows += time_collective(Clock(), ring, name)
    return [*rows, *time_overlap(Clock(), ring)]


def test_big_messages_move_more_bytes_a_second(pool: Pool) -> None:
    """What a message costs at least stands beside what a byte costs, on however busy a machine."""
    rows = pool.run(wires, 2)[0]
    messages = [row for row in rows if isinstance(row, LinkRow)]
    assert [row.num_bytes for row in messages] == [2**10, 2**22]
    by_name = {
        name: [r for r in rows if getattr(r, "collective", "") == name] for name in bench_wires.COLLECTIVES
    }
    for small, big in (messages, *(found[:2] for found in by_name.values())):
        assert small.seconds > 0
        assert big.num_bytes / big.seconds > small.num_bytes / small.seconds
    (overlap,) = [row for row in rows if isinstance(row, OverlapRow)]
    assert overlap.alone_s > 0
    assert overlap.beside_s > 0


def test_the_least_of_the_medians_is_a_call_undisturbed() -> None:
    """Half of the calls wait for a core; the median of all of them is either time at random."""
    seconds = [1e-4, 4e-3, 1e-4, 4e-3, 1e-4, 4e-3, 1e-4, 4e-3, 4e-3, 1e-4, 4e-3]
    assert statistics.median(seconds) == 4e-3
    assert least_median(seconds) == 1e-4


def test_header_names_machine_and_software() -> None:
    header = header_here()
    assert dict(header.versions)["torch"] == torch.__version__
    assert header.memory_bytes > 2**28
    assert header.device == "cpu"


def test_quartile_spread() -> None:
    assert quartile_spread([1.0]) == 0.0
    assert quartile_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4.0 - 2.0) / 3.0)
