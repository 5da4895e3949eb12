"""What a calibration says of itself: load of others, sway, spread and errors; nothing on a quiet machine."""

from dataclasses import replace

import pytest
import torch

from runtime.measure.microbench import Task, run_tasks
from runtime.measure.plans import BETWEEN, with_yardstick
from runtime.world.yardstick import Yardstick
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import Header, LayerRow, LinkRow, Measurement, Row, YardstickRow
from workbench.calibrate.noise import noise_of, yardstick_s_of
from workbench.cost.profile import Fit

HEADER = Header(
    device="cpu",
    device_name="a machine",
    memory_bytes=2**30,
    num_threads=1,
    date="2026-11-22",
    clocks="unlocked",
    versions=(),
)
LAYER = LayerRow(
    signature="layer",
    precision="float32",
    rows=1,
    tokens_in=16,
    tokens_out=16,
    attention_area=136,
    forward_s=1e-3,
    input_grad_s=1e-3,
    weight_grad_s=1e-3,
    spread=0.02,
)


def readings(*seconds: float, others: float | None = 0.01) -> tuple[YardstickRow, ...]:
    return tuple(YardstickRow(seconds=each, num_processes=2, others_cores=others) for each in seconds)


def off(table: str, error: float) -> Fit:
    return Fit(table=table, num_points=8, median=error, p90=2 * error)


def measured(*rows: Row) -> Measurement:
    return Measurement(HEADER, rows)


def test_a_quiet_machine_gives_no_reason() -> None:
    quiet = measured(*readings(1.0e-3, 1.01e-3, 1.05e-3), LAYER)
    fits = (off("layers, forward", 0.02), off("attention, other masks by their pairs", 0.7))
    assert noise_of(quiet, fits) == ()
    assert yardstick_s_of(quiet) == 1.01e-3
    assert yardstick_s_of(measured(LAYER)) is None


@pytest.mark.parametrize(
    ("rows", "fits", "said"),
    [
        (readings(1e-3, 1e-3, others=0.5), (), "others kept 0.50 cores busy"),
        (readings(1e-3, 1e-3, 1.4e-3), (), "times that lay 40% apart"),
        ((replace(LAYER, spread=0.31),), (), "repetitions of a layer lay 31% apart"),
        ((LAYER,), (off("layers, backward", 0.24),), "layers, backward: sizes left out are 24% off"),
    ],
)
def test_each_reason_is_named(rows: tuple[Row, ...], fits: tuple[Fit, ...], said: str) -> None:
    (line,) = noise_of(measured(*rows), fits)
    assert said in line


def test_a_single_stall_of_many_readings_is_no_sway() -> None:
    assert noise_of(measured(*readings(*[1e-3] * 19, 9e-3)), ()) == ()


def test_a_profile_keeps_reasons_and_yardstick() -> None:
    links = tuple(LinkRow(link="intra", num_bytes=2**i, seconds=1e-6 * 2**i) for i in (10, 14, 18))
    profile = fit("mine", [measured(*readings(2e-3, 2e-3, others=1.2), *links)])
    assert profile.yardstick_s == 2e-3
    assert profile.noise == ("others kept 1.20 cores busy while this machine was measured",)


def test_readings_stand_among_the_tasks_and_are_not_repeated() -> None:
    count = 2 * BETWEEN + 1

    def one(index: int) -> Task:
        row = LinkRow(link=f"link {index}", num_bytes=1, seconds=1.0)
        return Task(f"task {index}", lambda rows: row in rows, lambda: (row,))

    tasks = with_yardstick([one(index) for index in range(count)], None, torch.device("cpu"), 2)
    kinds = [task.what.startswith("yardstick") for task in tasks]
    assert len({task.what for task in tasks}) == len(tasks) == count + 4
    assert kinds[0]
    assert kinds[-1]
    rows = run_tasks(tasks, HEADER).rows
    assert sum(isinstance(row, YardstickRow) for row in rows) == 4
    assert all(task.is_done(rows) for task in tasks)
    assert all(row.num_processes == 1 for row in rows if isinstance(row, YardstickRow))


def test_a_calibration_reads_means_as_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that steps count and calibrations do not would be a drift of a machine that holds still."""
    monkeypatch.setattr(Yardstick, "turns_s", lambda yardstick, budget_s: [1.0, 1.0, 1.0, 5.0])
    [reading] = run_tasks(with_yardstick([], None, torch.device("cpu"), 1), HEADER).rows
    assert isinstance(reading, YardstickRow)
    assert reading.seconds == Yardstick(torch.device("cpu")).read(0.0) == 2.0
