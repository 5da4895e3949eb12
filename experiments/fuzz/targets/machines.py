"""Files about machines: measured, from data sheets, and their availability."""

import json
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.plans import planned
from experiments.fuzz.targets.writing import CORPUS, CSV, JSON, JSON_LINES, cells_of, folder_in, reading
from sim.failures.recovery import Recovery
from sim.failures.simulate import simulate_failures
from sim.predict import predict_within
from workbench.bounded_file import read_bounded
from workbench.calibrate.derived import profile_of
from workbench.calibrate.device_sheet import (
    DeviceSheet,
    check_sheet,
    read_sheet,
    shipped_sheet,
    shipped_sheets,
)
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import read_measurement
from workbench.cli.predicting import predict_command
from workbench.cost.execution import Execution, load_execution, write_execution
from workbench.cost.profile import PROFILES, Profile, dump_profile, load_profile, write_profile
from workbench.elastic.availability import Availability, parse_trace
from workbench.job.job import load_job
from workbench.job.machines import cost_of, under
from workbench.job.matching import cost_for
from workbench.strategies.elastic_templates import elastic_templates
from workbench.timing.accept import accept

EXAMPLES = Path(__file__).parents[3] / "examples"
DEVICES = ("H100", "A40")


def _profile(folder: Path) -> Ready:
    plan = planned("cornstarch")
    lowered, memory = accept(plan)

    def use(profile: Profile) -> None:
        predict_within(lowered, memory, cost_for(plan, [profile]))

    seeds = [json.loads(dump_profile(load_profile(name))) for name in DEVICES]
    return reading(JSON, folder / "profile.json", seeds, load_profile, use)


def _sheet(folder: Path) -> Ready:
    shipped = [shipped_sheet(name) for name in shipped_sheets()]
    out = folder_in(folder)

    def use(sheet: DeviceSheet) -> None:
        check_sheet(sheet, shipped)
        write_profile(profile_of(sheet, "H100", name="new"), out / "new.json")

    seeds = [cells_of(PROFILES / "sheets" / f"{name}.csv") for name in shipped_sheets()]
    return reading(CSV, folder / "sheet.csv", seeds, read_sheet, use, out=out)


def _execution(folder: Path) -> Ready:
    good, path = folder / "good.json", folder / "execution.json"
    write_execution(Execution(), good)
    plan = planned("cornstarch")
    lowered, memory = accept(plan)

    def use(execution: Execution) -> None:
        del execution
        predict_within(lowered, memory, under(cost_for(plan, [load_profile("H100")]), path))

    return reading(JSON, path, [_fields(Execution()), json.loads(good.read_bytes())], load_execution, use)


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields with their defaults, as in its file."""
    return {
        name: getattr(value_of_field, "value", value_of_field)
        for name in value.__dataclass_fields__
        for value_of_field in [getattr(value, name)]
    }


def _measured(folder: Path) -> Ready:
    seeds = [JSON_LINES.parse((CORPUS / "measured.jsonl").read_bytes())]
    return reading(
        JSON_LINES,
        folder / "measured.jsonl",
        seeds,
        read_measurement,
        lambda measurement: fit("new", [measurement]),
    )


def _table(folder: Path) -> Ready:
    out = folder_in(folder)

    def use(path: Path) -> None:
        written_to = out / "out.csv"
        try:
            predict_command(path, written_to, as_json=True)
        except SystemExit:
            raise
        except Exception as error:
            if type(error).__name__ != "Exit":  # some rows are bad, and say so in the file
                raise
            assert written_to.is_file()

    seeds = [cells_of(CORPUS / "table.csv")]
    return reading(CSV, folder / "table.csv", seeds, lambda path: path, use, out=out)


def _nodes(folder: Path) -> Ready:
    job = load_job(EXAMPLES / "elastic.yaml")
    templates = elastic_templates(job, cost_of(job, None, None), num_nodes=4, num_faults=1)
    recovery = Recovery(recover_s=1.0, restart_s=60.0, checkpoint_every=100, storage_bytes_per_s=1e9)
    systems = recovery.systems(templates)

    def use(trace: Availability) -> None:
        for system in systems:
            simulate_failures(system, trace)

    seeds = [cells_of(EXAMPLES / "elastic-spot.csv")]
    return reading(
        CSV, folder / "nodes.csv", seeds, lambda path: parse_trace(path.name, read_bounded(path)), use
    )


TARGETS = (
    Target(
        name="profile",
        make=_profile,
        readers=(
            "workbench.cost.profile:parse_profile",
            "workbench.cost.profile:_read",
            "workbench.cli.profiles:check_command",
        ),
    ),
    Target(name="device-sheet", make=_sheet, readers=("workbench.calibrate.device_sheet:_rows",)),
    Target(name="execution", make=_execution, readers=("workbench.cost.execution:load_execution",)),
    Target(
        name="measurements",
        make=_measured,
        readers=(
            "workbench.calibrate.measurement:read_measurement",
            "workbench.calibrate.row_line:parse_line",
        ),
    ),
    Target(name="table-of-rows", make=_table, readers=("workbench.llm_table.csv_file:read_table",)),
    Target(
        name="availability",
        make=_nodes,
        readers=(
            "workbench.elastic.availability:parse_trace",
            "workbench.cli.resilience:availability",
            "workbench.cli.searching:criterion_of",
            "workbench.search.objectives.options:_trace_of",
            "runtime.elastic.local_nodes:parsed_trace",
        ),
    ),
)
