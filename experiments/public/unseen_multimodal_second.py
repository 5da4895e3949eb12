"""A second round of published multimodal runs, predicted before anybody here had seen their figures.

Source:  experiments/public/data/unseen/multimodal_second.csv: vlm-training, MobileVLM, Video-ChatGPT,
         MiniCPM-V, F5-TTS, Cosmos, CogVideoX, LTX-Video, HunyuanVideo and others, of reports and recipes.
         Others transcribed inputs and figures apart; `multimodal_second_predictions.csv` was committed while
         figures were kept apart, unopened; so was `multimodal_lora_predictions.csv`, later, of runs that
         train adapters, when jobs could say these.
Ours:    each run becomes a job and a plan with its layouts; step and memory are the simulator's
         (`experiments.public.multimodal`). `inside_80`: the interval that `simulate` prints for a job;
         `inside_80_of_system`: with what a row of a system that was never compared has besides.
Setup:   rows are judged unless `why_not` says why not, chosen by their recipes alone; `unsaid` says what no
         job can say. Figures of runs with adapters are under `lora/`. A run's hours are divided by its
         steps. Memory is compared in GiB, also where a tool prints it as GB; of several figures with the
         smallest (allocated, not reserved). Above zero: predicted too slow, or too much.
Run:     python -m experiments.public.unseen_multimodal_second [--predict] [--json]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, Seconds, figures, predicting, rows_of
from experiments.public.multimodal import (
    Row,
    job_of,
    measured_gib,
    measured_s,
    models_of,
    peak_gib,
    prediction_of,
)
from workbench.cost.profile import load_profile
from workbench.units import GIB
from workbench.whole_file import write_text

RUNS, MODELS = FOLDER / "multimodal_second.csv", FOLDER / "multimodal_second_models.yaml"
PREDICTIONS = FOLDER / "multimodal_second_predictions.csv"
LORA_PREDICTIONS = FOLDER / "multimodal_lora_predictions.csv"
MEASURED = FOLDER / "multimodal_second_measured.csv"
COLUMNS = "id,predicted_s,low_s,high_s,system_low_s,system_high_s,peak_gib,refused"
DOES_NOT_FIT = ("oom", "fit", "out of memory")  # words in place of a figure


@dataclass(slots=True)
class Printed:
    """What was measured of a run: seconds of a step, GiB, and whether it did not fit."""

    seconds: list[float] = field(default_factory=list)
    gib: list[float] = field(default_factory=list)
    is_too_large: bool = False


def judged() -> list[dict[str, str]]:
    """The rows that are judged, those that no job can say among them."""
    return [row for row in rows_of(RUNS) if not row["why_not"]]


def judged_lora() -> list[dict[str, str]]:
    """Those of them that train adapters."""
    return [row for row in judged() if row["trains"] == "lora"]


def cells_of(row: Row) -> dict[str, str]:
    """The prediction of a run as cells of `COLUMNS`; a refusal's reason in its place."""
    cells = dict.fromkeys(COLUMNS.split(","), "") | {"id": row["id"], "refused": row["unsaid"]}
    if row["unsaid"]:
        return cells
    job = job_of(row, models_of(MODELS))
    try:
        if row["covers"] != "memory":
            found = prediction_of(row, job)
            numbers = (found.step.value, found.step.low, found.step.high, *found.of_system)
            cells |= dict(zip(COLUMNS.split(",")[1:6], (f"{each:.6g}" for each in numbers), strict=True))
        if row["memory"] == "yes":
            cells["peak_gib"] = f"{peak_gib(row, job):.6g}"
    except ValueError as error:
        cells["refused"] = str(error)
    return cells


def write_predictions() -> None:
    """Write the prediction of every judged run with adapters; ValueError if one was measured already."""
    rows, measured = judged_lora(), {line["id"] for line in rows_of(MEASURED)}
    if seen := [row["id"] for row in rows if row["id"] in measured]:
        raise ValueError(f"{MEASURED.name} has {seen[0]}: predictions are written before it")
    lines = [COLUMNS]
    for row in rows:
        *numbers, refused = cells_of(row).values()
        lines.append(f'{",".join(numbers)},"{refused}"')
    write_text("\n".join(lines) + "\n", LORA_PREDICTIONS)


def printed_of(row: Row, measured: Sequence[Row]) -> Printed:
    """What the lines of a run say; a line has a figure with its unit, a peak of memory, or both."""
    printed = Printed()
    for line in measured:
        value, unit = (line.get("value") or "").strip(), line.get("unit") or ""
        peak = (line.get("peak_gib") or "").strip()
        if _is_number(peak):
            printed.gib.append(float(peak))
        if not _is_number(value):
            printed.is_too_large |= any(word in f"{value} {unit} {peak}".lower() for word in DOES_NOT_FIT)
        elif (gib := measured_gib(float(value), unit)) is not None:
            printed.gib.append(gib)
        elif (seconds := measured_s(row, float(value), unit)) is not None:
            printed.seconds.append(seconds)
        else:
            raise ValueError(f"run {row['id']}: no seconds and no bytes are known of the unit {unit!r}")
    return printed


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _parts(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """All rows, and those of each project."""
    for name in ("all", *dict.fromkeys(row["project"] for row in rows)):
        if part := [row for row in rows if name in ("all", row["project"])]:
            yield name, part


def _of_times(
    name: str,
    rows: Sequence[Row],
    before: Mapping[str, Row],
    today: Mapping[str, Row],
    of: Mapping[str, Printed],
) -> Iterator[tuple[str, float]]:
    """Errors of steps; of a project's rows each one's as well."""
    took = {row["id"]: of[row["id"]].seconds[0] for row in rows}
    found = figures([(_seconds(before[each]), took_s) for each, took_s in took.items()])
    wider = figures([(_seconds(before[each], "system_"), took_s) for each, took_s in took.items()])
    newer = figures([(_seconds(today[each]), took_s) for each, took_s in took.items()])
    yield from ((f"{name}/{key}", value) for key, value in found.items())
    yield f"{name}/inside_80_of_system", wider["inside_80"]
    yield from ((f"{name}/{key}_today", newer[key]) for key in ("mean", "signed"))
    if name != "all":
        for each, took_s in took.items():
            yield f"{name}/{each}/error", float(before[each]["predicted_s"]) / took_s - 1


def _of_memory(
    name: str,
    rows: Sequence[Row],
    before: Mapping[str, Row],
    today: Mapping[str, Row],
    of: Mapping[str, Printed],
) -> Iterator[tuple[str, float]]:
    """Errors of peaks, likewise."""
    peaks = {row["id"]: min(of[row["id"]].gib) for row in rows}
    errors = {each: float(before[each]["peak_gib"]) / peak - 1 for each, peak in peaks.items()}
    newer = [float(today[each]["peak_gib"]) / peak - 1 for each, peak in peaks.items()]
    sizes = np.abs(list(errors.values()))
    yield f"{name}/memory_rows", float(len(errors))
    yield f"{name}/memory_mean", float(sizes.mean())
    yield f"{name}/memory_median", float(np.median(sizes))
    yield f"{name}/memory_signed", float(np.mean(list(errors.values())))
    yield f"{name}/memory_worst", float(sizes.max())
    yield f"{name}/memory_mean_today", float(np.abs(newer).mean())
    if name != "all":
        yield from ((f"{name}/{each}/memory_error", error) for each, error in errors.items())


def _fits(
    rows: Sequence[Row], before: Mapping[str, Row], of: Mapping[str, Printed]
) -> Iterator[tuple[str, float]]:
    """Rows of whose memory is known whether it fits: those that did not, and those rightly predicted."""
    known = [row for row in rows if of[row["id"]].is_too_large or of[row["id"]].gib]
    asked = [row for row in known if before[row["id"]]["peak_gib"]]
    right = 0
    for row in asked:
        has_gib = load_profile(row["gpu"]).memory_bytes / GIB
        is_too_large = float(before[row["id"]]["peak_gib"]) > has_gib
        right += is_too_large == of[row["id"]].is_too_large
    yield "fits/rows", float(len(asked))
    yield "fits/too_large", float(sum(of[row["id"]].is_too_large for row in asked))
    yield "fits/right", float(right)


def _seconds(cells: Row, which: str = "") -> Seconds:
    value, low, high = (float(cells[name]) for name in ("predicted_s", f"{which}low_s", f"{which}high_s"))
    return Seconds(value, low, high)


def _figures(
    asked: Sequence[Row], before: Mapping[str, Row], lines: Mapping[str, Sequence[Row]]
) -> Iterator[tuple[str, float]]:
    """Figures of the runs that were asked for and predicted."""
    rows = [row for row in asked if not before[row["id"]]["refused"]]
    printed = {row["id"]: printed_of(row, lines.get(row["id"], ())) for row in rows}
    today = {row["id"]: cells_of(row) for row in rows}
    timed = [row for row in rows if before[row["id"]]["predicted_s"] and printed[row["id"]].seconds]
    held = [row for row in rows if before[row["id"]]["peak_gib"] and printed[row["id"]].gib]
    for name, part in _parts(timed):
        yield from _of_times(name, part, before, today, printed)
    for name, part in _parts(held):
        yield from _of_memory(name, part, before, today, printed)
    yield from _fits(rows, before, printed)
    yield "predicted", float(len(rows))
    yield "not_said", float(len(asked) - len(rows))


def _by_id(file: Path) -> dict[str, Row]:
    return {row["id"]: row for row in rows_of(file)}


@script(command=predicting(write_predictions))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    lines: dict[str, list[Row]] = {}
    for line in rows_of(MEASURED):
        lines.setdefault(line["id"], []).append(line)
    evidence = Evidence()
    evidence.ours |= dict(_figures(judged(), _by_id(PREDICTIONS), lines))
    adapted = judged_lora()
    if any(row["id"] in lines for row in adapted):
        found = _figures(adapted, _by_id(LORA_PREDICTIONS), lines)
        evidence.ours |= {f"lora/{name}": value for name, value in found}
    return evidence
