"""A trainer's stalls for its images, if it preprocesses them itself or leaves that to a server.

Setup:   JPEG images of 512 and 1,024 pixels a side, 10 and 40 an iteration, brought to Qwen2-VL's sizes and
         cut into patches. One data-parallel group. The training step is an idle wait of 1.5 times the decode,
         and once of half of it, where no prefetching can hide everything. Server and one producer on one
         core, the trainer on another. Then 1,000 iterations over small images while producers, trainers and
         the server itself are killed at random.
Ours:    executed. The simulator's stalls are recorded before anything is executed, from core seconds of
         single images on this machine: their decode where the trainer does it, and all work to produce them
         (`preprocess_produce`) where a server does.
Paper:   DistTrain, section 7.3, Figure 17: seconds without, milliseconds with disaggregation.
Differs: the baseline decodes on one core between two steps; the paper does not say how many loader
         processes its baseline has, nor how large its values are except by words and bars.
Run:     python -m experiments.bench.preprocess [--json]
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.bench.preprocess_chaos import Chaos, survived
from experiments.bench.preprocess_folder import draw_photographs, on_cores, server_process
from experiments.bench.preprocess_produce import produce_s
from experiments.harness.command import Found, bench, timed
from experiments.harness.record import RESULTS, commit
from runtime.data.records import IMAGE, read_records
from runtime.preprocess.answers import parse_answer
from runtime.preprocess.connection import Message
from runtime.preprocess.example import example_frames, packed, preprocess
from runtime.preprocess.images import QwenRule, preprocess_image
from runtime.preprocess.loader import (
    Batch,
    ColocatedLoader,
    ServedLoader,
    Subscription,
    batch_of_message,
    stalls_of,
)
from runtime.preprocess.order import OrderSettings
from runtime.preprocess.producer import keep_freed_memory
from sim.preprocess import CpuNode, Preprocessing, colocated_stalls_s, disaggregated_stalls_s
from workbench.float_sum import float_sum
from workbench.units import ms

OUT = RESULTS / "bench_preprocess.json"
RULE = QwenRule(max_pixels=2**22)
BATCHES_OF_FOLDER = 2
WINDOW = 2
FEWEST, MOST, BUDGET_S = 8, 50, 8.0  # iterations, and what they may take together
SIMULATED = 12
HIDING, STARVING = 1.5, 0.5  # the step over the decode of a batch
WAIT_S = 60.0
NOTHING_S = 0.010  # "milliseconds"
CHAOS_ITERATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One bar of the figure."""

    num_images: int
    side_px: int
    step_over_decode: float = HIDING

    @property
    def name(self) -> str:
        starved = "" if self.step_over_decode >= 1 else ", starved"
        return f"{self.num_images} x {self.side_px}{starved}"


CELLS = (
    Cell(num_images=10, side_px=512),
    Cell(num_images=10, side_px=512, step_over_decode=STARVING),
    Cell(num_images=10, side_px=1024),
    Cell(num_images=40, side_px=512),
    Cell(num_images=40, side_px=1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The simulated stall of a cell and its inputs: seconds to decode, produce and unpack a batch."""

    decode_ms: float
    produce_ms: float
    unpack_ms: float
    step_ms: float
    colocated_ms_p50: float
    disaggregated_ms_p50: float


def predicted(cell: Cell, folder: Path, core: int) -> Predicted:
    """Measure decoding, producing and unpacking for a cell, then simulate it."""
    keep_freed_memory()  # as producers do, so that a trainer's own decode is not charged for less
    num = cell.num_images
    decoded = [decode_s(folder / record.of(IMAGE)[0]) for record in read_records(folder)]
    produced = produce_s(folder, RULE, batch_size=num, window=WINDOW, core=core)
    decode_of_batch_s, produce_of_batch_s = (
        float_sum(seconds) / BATCHES_OF_FOLDER for seconds in (decoded, produced)
    )
    step_s = cell.step_over_decode * decode_of_batch_s
    setup = Preprocessing(
        produce_s=in_batches(produced, num),
        step_s=step_s,
        window=WINDOW,
        nodes=(CpuNode(cores=1, num_producers=1),),
        unpack_s=unpack_s(folder, num),
    )
    stalls_s = disaggregated_stalls_s(setup)
    return Predicted(
        decode_ms=ms(decode_of_batch_s),
        produce_ms=ms(produce_of_batch_s),
        unpack_ms=ms(setup.unpack_s),
        step_ms=ms(step_s),
        colocated_ms_p50=ms(statistics.median(colocated_stalls_s(in_batches(decoded, num)))),
        disaggregated_ms_p50=ms(statistics.median(stalls_s[WINDOW:])),
    )


def in_batches(seconds: Sequence[float], num_images: int) -> tuple[tuple[float, ...], ...]:
    """Return seconds of a folder's examples by batch, repeated up to `SIMULATED` batches."""
    starts = range(0, len(seconds), num_images)
    batches = [tuple(seconds[start : start + num_images]) for start in starts]
    return tuple(batches[position % len(batches)] for position in range(SIMULATED))


def decode_s(path: Path) -> float:
    """Core seconds to decode one image: the faster of two passes, as the first may miss caches."""
    return min(timed(lambda: preprocess_image(path, RULE), time.process_time)[0] for _ in range(2))


def unpack_s(folder: Path, num_images: int) -> float:
    """Seconds to unpack a batch that has arrived: the median of five."""
    framed = [
        example_frames(preprocess(record, folder, RULE)) for record in read_records(folder)[:num_images]
    ]
    header = packed("batch", position=0, microbatches=[[header] for header, _ in framed], skipped=[])
    buffers = tuple(buffer for _, buffers_of_example in framed for buffer in buffers_of_example)

    def unpack() -> Batch:
        return batch_of_message(Message(parse_answer(header), buffers))

    return statistics.median(timed(unpack)[0] for _ in range(5))


def measured(cell: Cell, folder: Path, expected: Predicted, core: int) -> dict[str, float]:
    """Stalls of both loaders in milliseconds; the disaggregated ones after its window is full."""
    step_s = expected.step_ms / 1000
    num = min(MOST, max(FEWEST, int(BUDGET_S / step_s)))
    colocated_loader = ColocatedLoader(folder, RULE, batch_size=cell.num_images, order=OrderSettings())
    colocated = stalls_of(colocated_loader, max(FEWEST // 2, num // 2), step_s=step_s)
    with server_process(folder, cell.num_images, WINDOW, cores={core}) as server:
        loader = ServedLoader(Subscription(address=server.address, timeout_s=WAIT_S))
        try:
            stalls_of(loader, WINDOW, step_s=step_s)
            disaggregated = stalls_of(loader, num, step_s=step_s)
        finally:
            loader.close()
    return {
        "iterations": num,
        "colocated_ms_p50": ms(colocated.quantile_s(0.5)),
        "colocated_ms_p99": ms(colocated.quantile_s(0.99)),
        "disaggregated_ms_p50": ms(disaggregated.quantile_s(0.5)),
        "disaggregated_ms_p99": ms(disaggregated.quantile_s(0.99)),
    }


def claims(
    cells: dict[str, dict[str, float]], expected: dict[str, dict[str, float]], chaos: Chaos | None
) -> dict[str, bool]:
    """Return claim -> whether it holds; the paper only says "seconds" and "milliseconds"."""
    hiding = {name: cell for name, cell in cells.items() if "starved" not in name}
    holds = {
        f"apart, the median stall is below {ms(NOTHING_S):g} ms where the step is as long as the decode": all(
            cell["disaggregated_ms_p50"] < ms(NOTHING_S) for cell in hiding.values()
        ),
        "apart, it is a hundredth of the colocated one or less": all(
            100 * cell["disaggregated_ms_p50"] <= cell["colocated_ms_p50"] for cell in hiding.values()
        ),
        "the largest colocated stall is of the order of a second": max(
            cell["colocated_ms_p50"] for cell in cells.values()
        )
        > 500,
        "colocated stalls are predicted within 25 %": all(
            abs(cell["colocated_ms_p50"] / expected[name]["colocated_ms_p50"] - 1) <= 0.25
            for name, cell in cells.items()
        ),
        "apart, stall and step together are predicted within 15 %": all(
            abs(_iteration_ms(cell, expected[name]) / _iteration_ms(expected[name], expected[name]) - 1)
            <= 0.15
            for name, cell in cells.items()
        ),
    }
    if chaos is not None:
        holds["every example exactly once in every epoch"] = chaos.exactly_once
    return holds


def _iteration_ms(cell: dict[str, float], expected: dict[str, float]) -> float:
    return cell["disaggregated_ms_p50"] + expected["step_ms"]


def executed(scratch: Path, cells: Sequence[Cell], chaos_iterations: int, out: Path) -> dict[str, Any]:
    """Draw, predict and write the prediction, then execute and write the measurement beside it."""
    folders = {}
    for cell in cells:
        folder = scratch / f"{cell.num_images}-{cell.side_px}"
        if not folder.exists():
            draw_photographs(folder, BATCHES_OF_FOLDER * cell.num_images, cell.side_px, seed=cell.side_px)
        folders[cell.name] = folder
    cores = os.sched_getaffinity(0)
    with on_cores({min(cores)}):
        expected = {cell.name: predicted(cell, folders[cell.name], max(cores)) for cell in cells}
    record: dict[str, Any] = {
        "script": "bench/preprocess",
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores; server and producer on one of them",
        "predicted": {name: asdict(cell_prediction) for name, cell_prediction in expected.items()},
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    with on_cores({min(cores)}):
        record["executed"] = {
            cell.name: measured(cell, folders[cell.name], expected[cell.name], max(cores)) for cell in cells
        }
    out.write_text(json.dumps(record, indent=1) + "\n")
    chaos = survived(scratch / "chaos", chaos_iterations, cores=cores) if chaos_iterations else None
    record["chaos"] = None if chaos is None else asdict(chaos)
    record["claims"] = claims(record["executed"], record["predicted"], chaos)
    out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def show(record: dict[str, Any]) -> None:
    columns = (
        "decode",
        "produced",
        "colocated p50",
        "predicted",
        "p99",
        "apart p50",
        "predicted",
        "p99",
    )
    print(f"{'ms of stall':20}" + "".join(f"{column:>14}" for column in columns))
    for name, executed in record["executed"].items():
        expected = record["predicted"][name]
        values = (
            expected["decode_ms"],
            expected["produce_ms"],
            executed["colocated_ms_p50"],
            expected["colocated_ms_p50"],
            executed["colocated_ms_p99"],
            executed["disaggregated_ms_p50"],
            expected["disaggregated_ms_p50"],
            executed["disaggregated_ms_p99"],
        )
        print(f"{name:20}" + "".join(f"{value:14.3f}" for value in values))
    if record["chaos"] is not None:
        print("chaos: " + ", ".join(f"{key} {value}" for key, value in record["chaos"].items()))


@bench(cells="only the first so many", chaos="iterations; 0: none")
def run(cells: int = len(CELLS), chaos: int = CHAOS_ITERATIONS, out: Path = OUT) -> Found:
    with tempfile.TemporaryDirectory() as scratch:
        record = executed(Path(scratch), CELLS[:cells], chaos, out)
    show(record)
    return Found(record, record["claims"])
