"""Figure 17, simulated: stalls by number and size of images, and how many producers an iteration needs.

Paper:   Z. Zhang et al., "DistTrain", section 7.3, Figure 17: preprocessing takes the trainer seconds without
         disaggregation and milliseconds with it; iterations take seconds to tens of seconds. The bars' values
         are not printed.
Setup:   one data-parallel group, iterations of 2 s, 8 to 128 images of 512 and 1,024 pixels a side; the
         seconds to decode and to produce an image are the row that `experiments.bench.preprocess` measured on
         one core; a server's work for it counts as its producer's.
Ours:    simulated by `sim.preprocess`: CPU nodes of 16 cores, as many of them as hide the work.
Differs: the trainer without disaggregation decodes between its steps on the CPU cores of one GPU; the paper
         does not say how many cores its baseline has. Both one core and eight are shown.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.outcome import Claim, Evidence
from experiments.harness.record import RESULTS
from experiments.harness.script import script
from sim.preprocess import CpuNode, Preprocessing, colocated_stalls_s, disaggregated_stalls_s
from workbench.units import ms

MEASURED = RESULTS / "bench_preprocess.json"
ROWS = {512: "40 x 512", 1024: "40 x 1024"}
IMAGES_OF_ROW = 40
NUM_IMAGES = (8, 32, 128)
ITERATIONS, WINDOW, STEP_S = 8, 3, 2.0
CORES_OF_NODE, CORES_OF_GPU = 16, 8
SECONDS, MILLISECONDS = 1.0, 0.01


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """The cost of one image."""

    decode_s: float
    produce_s: float
    unpack_s: float


def measured_rows(path: Path = MEASURED) -> dict[int, SimulatedRow]:
    """Rows by side in pixels; ValueError where they have not been measured here."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; run python -m experiments.bench.preprocess first")
    rows = json.loads(path.read_text(encoding="utf-8"))["predicted"]
    return {
        side: SimulatedRow(
            *(rows[name][f"{part}_ms"] / 1000 / IMAGES_OF_ROW for part in ("decode", "produce", "unpack"))
        )
        for side, name in ROWS.items()
    }


def apart_s(row: SimulatedRow, num_images: int, producers: int) -> float:
    """The steady stall with a number of producers, each on its own core."""
    whole, num_left = divmod(producers, CORES_OF_NODE)
    cores = [CORES_OF_NODE] * whole + ([num_left] if num_left else [])
    setup = Preprocessing(
        produce_s=((row.produce_s,) * num_images,) * ITERATIONS,
        step_s=STEP_S,
        window=WINDOW,
        nodes=tuple(CpuNode(cores=num_producers, num_producers=num_producers) for num_producers in cores),
        unpack_s=row.unpack_s * num_images,
    )
    return disaggregated_stalls_s(setup)[-1]


def producers_needed(row: SimulatedRow, num_images: int) -> int:
    """The fewest producers that leave no stall but unpacking, by simulation from one on."""
    limit = 2 * fewest_producers(row, num_images)
    nothing_s = row.unpack_s * num_images
    for producers in range(1, limit + 1):
        if apart_s(row, num_images, producers) <= nothing_s + 1e-9:
            return producers
    raise ValueError(f"{num_images} images: {limit} producers do not hide {row.produce_s:g} s an image")


def fewest_producers(row: SimulatedRow, num_images: int) -> int:
    """The number of producers below which producing takes longer than the steps."""
    return max(1, math.ceil(row.produce_s * num_images / STEP_S))


@script()
def run() -> Evidence:
    ours: dict[str, float] = {}
    together, apart, spare = [], [], []
    for side, row in measured_rows().items():
        for num_images in NUM_IMAGES:
            key = f"simulated/{num_images} x {side}"
            batch = ((row.decode_s,) * num_images,)
            together.append(colocated_stalls_s(batch)[0])
            producers = producers_needed(row, num_images)
            apart.append(apart_s(row, num_images, producers))
            spare.append(producers - fewest_producers(row, num_images))
            ours[f"{key}/one_core_ms"] = ms(together[-1])
            ours[f"{key}/eight_cores_ms"] = ms(colocated_stalls_s(batch, cores=CORES_OF_GPU)[0])
            ours[f"{key}/apart_ms"] = ms(apart[-1])
            ours[f"{key}/producers"] = producers
    rows = [
        Claim("without disaggregation the largest iterations stall for seconds", max(together) >= SECONDS),
        Claim("with it, all stalls are milliseconds", max(apart) <= MILLISECONDS),
        Claim("producing over iteration time, and at most one more, are producers enough", max(spare) <= 1),
    ]
    notes = [f"{name.removeprefix('simulated/')} {value:.4g}" for name, value in ours.items()]
    return Evidence(ours=ours, claims=rows, notes=notes)
