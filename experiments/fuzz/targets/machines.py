"""What is said of machines, measured or on paper, and when they come and go."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.plans import planned
from experiments.fuzz.targets.writing import (
    CORPUS,
    cells_of,
    csv_bytes,
    folder_in,
    json_bytes,
    json_lines,
    parse_json_lines,
    written,
)
from sim.failures.recovery import Recovery
from sim.failures.simulate import simulate_failures
from sim.predict import predict_within
from workbench.bounded_file import read_bounded
from workbench.calibrate.derived import profile_of
from workbench.calibrate.device_sheet import check_sheet, read_sheet, shipped_sheet, shipped_sheets
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import read_measurement
from workbench.cli.predicting import predict_command
from workbench.cost.execution import Execution, load_execution, write_execution
from workbench.cost.profile import PROFILES, dump_profile, load_profile, write_profile
from workbench.elastic.availability import parse_trace
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

    def read(path: Path) -> None:
        with naming(path.name):
            profile = load_profile(path)
        predict_within(lowered, memory, cost_for(plan, profile))

    return Ready(
        seeds=[json.loads(dump_profile(load_profile(name))) for name in DEVICES],
        render=json_bytes,
        parse=json.loads,
        take=written(folder / "profile.json", read),
    )


def _sheet(folder: Path) -> Ready:
    shipped = [shipped_sheet(name) for name in shipped_sheets()]
    out = folder_in(folder)

    def read(path: Path) -> None:
        with naming(path.name):
            sheet = read_sheet(path)
        check_sheet(sheet, shipped)
        write_profile(profile_of(sheet, "H100", name="new"), out / "new.json")

    return Ready(
        seeds=[cells_of(PROFILES / "sheets" / f"{name}.csv") for name in shipped_sheets()],
        render=csv_bytes,
        parse=_parse_csv,
        take=written(folder / "sheet.csv", read),
        out=out,
    )


def _execution(folder: Path) -> Ready:
    good = folder / "good.json"
    write_execution(Execution(), good)
    plan = planned("cornstarch")
    lowered, memory = accept(plan)

    def read(path: Path) -> None:
        with naming(path.name):
            load_execution(path)
        predict_within(lowered, memory, under(cost_for(plan, load_profile("H100")), path))

    return Ready(
        seeds=[_fields(Execution()), json.loads(good.read_bytes())],
        render=json_bytes,
        parse=json.loads,
        take=written(folder / "execution.json", read),
    )


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass with its defaults, as its file would have them."""
    return {
        name: getattr(found, "value", found)
        for name in value.__dataclass_fields__
        for found in [getattr(value, name)]
    }


def _measured(folder: Path) -> Ready:
    def read(path: Path) -> None:
        with naming(path.name):
            measurement = read_measurement(path)
        fit("new", [measurement])

    return Ready(
        seeds=[parse_json_lines((CORPUS / "measured.jsonl").read_bytes())],
        render=json_lines,
        parse=parse_json_lines,
        take=written(folder / "measured.jsonl", read),
    )


def _table(folder: Path) -> Ready:
    out = folder_in(folder)

    def read(path: Path) -> None:
        written_to = out / "out.csv"
        try:
            predict_command(path, written_to, as_json=True)
        except SystemExit:
            raise
        except Exception as error:
            if type(error).__name__ != "Exit":  # some rows are bad, and say so in the file
                raise
            assert written_to.is_file()

    return Ready(
        seeds=[cells_of(CORPUS / "table.csv")],
        render=csv_bytes,
        parse=_parse_csv,
        take=written(folder / "table.csv", read),
        out=out,
    )


def _nodes(folder: Path) -> Ready:
    job = load_job(EXAMPLES / "elastic.yaml")
    found = elastic_templates(job, cost_of(job, None, None), num_nodes=4, num_faults=1)
    recovery = Recovery(recover_s=1.0, restart_s=60.0, checkpoint_every=100, storage_bytes_per_s=1e9)
    systems = recovery.systems(found)

    def read(path: Path) -> None:
        with naming(path.name):
            trace = parse_trace(path.name, read_bounded(path))
        for system in systems:
            simulate_failures(system, trace)

    return Ready(
        seeds=[cells_of(EXAMPLES / "elastic-spot.csv")],
        render=csv_bytes,
        parse=_parse_csv,
        take=written(folder / "nodes.csv", read),
    )


def _parse_csv(content: bytes) -> object:
    return list(csv.reader(io.StringIO(content.decode()), strict=True))


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
            "workbench.calibrate.measurement:_parse",
        ),
    ),
    Target(name="table-of-rows", make=_table, readers=("workbench.llm_table.csv_file:read_table",)),
    Target(
        name="availability",
        make=_nodes,
        readers=(
            "workbench.elastic.availability:parse_trace",
            "workbench.cli.resilience:_availability",
            "workbench.cli.searching:judging",
            "workbench.search.objectives.asked:_trace_of",
            "runtime.elastic.local_nodes:parsed_trace",
        ),
    ),
)
