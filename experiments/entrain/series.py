"""Step times and unevenness of many global batches under every method: what figures and tables read.

Paper:   I. Jang, dissertation, section 4.7: batches of 512 samples, 4 replicas of 16 GPUs, tp 2.
Setup:   A step ends when the slowest replica does. Stage counts are those of the data set's mean ratio,
         for all methods alike; `disttrain-own` takes them from one sample, as the paper has DistTrain do.
Differs: pipelines without messages (`experiments.entrain.replica`), which stay within a few per cent of the
         simulator; `experiments.entrain.regrouping` runs single batches through that.
Ours:    about 1 s a batch; goes on where it stopped. The slow methods see the first batches only.
Run:     python -m experiments.entrain.series [--llm NAME] [--batches N]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.entrain.methods import METHODS, disttrain, replicas_of
from experiments.entrain.replica import BLOCKS, Replica, Taken
from experiments.entrain.workload import CORPUS_OF, LLM_OF, batch_of, work_pool
from experiments.harness.record import RESULTS
from workbench.balance.orchestration.allocation import proportional_allocation
from workbench.data.sample import Sample
from workbench.report.progress import ticking
from workbench.whole_file import write_text

BATCH_SAMPLES, NUM_REPLICAS, BATCHES = 512, 4, 100
SLOW = {"entrain-zb": 25, "entrain-graded-zb": 5}  # methods -> batches that they see
OWN = "disttrain-own"

Figures = dict[str, list[float]]  # "seconds", "vision_std_s", "llm_std_s" by batch


def path_of(llm: str) -> Path:
    """Where the series of a model is kept."""
    return RESULTS / f"entrain_series_{llm}.json"


def stable_stages(dataset: str, llm: str) -> tuple[int, int]:
    """Stages of both modules in proportion to their work over the whole data set."""
    work = work_pool(dataset, llm)
    encoder, text = proportional_allocation([sum(work.encoder_s), sum(work.llm_s)], BLOCKS)
    return encoder, text


def one_sample_stages(llm: str, sample: Sample) -> tuple[int, int]:
    """Stages in proportion to the work of a single sample, as DistTrain profiles it."""
    alone = Replica(llm=llm, samples=(sample,), stages=(1, 1))
    works = (alone.encoder_work(), alone.llm_work())
    encoder, text = proportional_allocation([sum(work.samples_s()) for work in works], BLOCKS)
    return encoder, text


def batch_figures(method: str, batch: Replica) -> tuple[float, float, float]:
    """Seconds of the slowest replica, and mean over replicas of both standard deviations."""
    taken: list[Taken] = []
    for replica in replicas_of(method, batch, NUM_REPLICAS):
        if method == OWN:
            own = replace(replica, stages=one_sample_stages(batch.llm, batch.samples[0]))
            taken.append(disttrain(own))
        else:
            taken.append(METHODS[method](replica))
    return (
        max(each.iteration_s for each in taken),
        statistics.fmean(float(each.encoder_forward_s.std()) for each in taken),
        statistics.fmean(float(each.llm_forward_s.std()) for each in taken),
    )


def batch(dataset: str, llm: str, seed: int) -> Replica:
    """A global batch, not yet shared out."""
    samples = batch_of(dataset, BATCH_SAMPLES, seed)
    return Replica(llm=llm, samples=samples, stages=stable_stages(dataset, llm))


def batches_of(method: str, num_batches: int) -> int:
    """How many batches a method sees."""
    return min(SLOW.get(method, num_batches), num_batches)


def read_series(llm: str) -> dict[str, dict[str, Figures]]:
    """Data set -> method -> figures by batch.

    Raises:
        ValueError: there is no such series yet.
    """
    path = path_of(llm)
    if not path.is_file():
        raise ValueError(f"{path} is not there; python -m experiments.entrain.series --llm {llm} writes it")
    record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {dataset: dict(methods) for dataset, methods in record["series"].items()}


def kept_series() -> dict[str, dict[str, dict[str, Figures]]]:
    """The series of every model that has one.

    Raises:
        ValueError: there is none at all.
    """
    found = {llm: read_series(llm) for llm in LLM_OF if path_of(llm).is_file()}
    return found or {llm: read_series(llm) for llm in LLM_OF}


def _write(llm: str, series: Mapping[str, Mapping[str, Figures]]) -> None:
    record = {
        "command": f"python -m experiments.entrain.series --llm {llm}",
        "batch_samples": BATCH_SAMPLES,
        "replicas": NUM_REPLICAS,
        "stages": {dataset: stable_stages(dataset, llm) for dataset in series},
        "series": series,
    }
    write_text(json.dumps(record) + "\n", path_of(llm))


def extend(llm: str, num_batches: int, *, is_quiet: bool) -> None:
    """Add what is missing up to so many batches of every data set, and keep it as it comes."""
    series = read_series(llm) if path_of(llm).is_file() else {}
    with ticking("batches", num_batches * len(CORPUS_OF), quiet=is_quiet) as ticker:
        for number in range(num_batches):
            for dataset in CORPUS_OF:
                ticker.step(dataset)
                _add(series.setdefault(dataset, {}), dataset, llm, number)
            if number % 5 == 4 or number + 1 == num_batches:
                _write(llm, series)


def _add(methods: dict[str, Figures], dataset: str, llm: str, number: int) -> None:
    """One batch under the methods that have not seen it."""
    missing = [
        method
        for method in (*METHODS, OWN)
        if len(methods.get(method, {}).get("seconds", ())) == number < batches_of(method, number + 1)
    ]
    if not missing:
        return
    drawn = batch(dataset, llm, number + 1)
    for method in missing:
        found = zip(("seconds", "vision_std_s", "llm_std_s"), batch_figures(method, drawn), strict=True)
        for name, value in found:
            methods.setdefault(method, {}).setdefault(name, []).append(float(f"{value:.5g}"))


def main() -> int:
    """Extend the series of one model or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llm", choices=tuple(LLM_OF), default=None)
    parser.add_argument("--batches", type=int, default=BATCHES)
    given = parser.parse_args()
    if given.batches < 1:
        parser.error(f"--batches must be >= 1, got {given.batches}")
    for llm in [given.llm] if given.llm else LLM_OF:
        extend(llm, given.batches, is_quiet=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
