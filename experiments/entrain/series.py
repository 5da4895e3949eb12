"""Step times and imbalance of many global batches under every method, which figures and tables read.

Paper:   I. Jang, dissertation, section 4.7: batches of 512 samples, 4 replicas of 16 GPUs, tp 2.
Setup:   a step ends when the slowest replica does. Stage counts are those of the data set's mean ratio for
         all methods alike, but `-own` ones have DistTrain's, from one sample; or all are as printed. Other
         studies change the costs that evaluate a step, what the encoder's backward recomputes, or the charts'
         assumed sizes. What a method fixes before it runs, as DIP its sub-microbatches, it fixes on another
         batch.
Differs: pipelines without messages (`experiments.entrain.replica`), which stay within a few per cent of the
         simulator; `experiments.entrain.regrouping` runs single batches through that.
Ours:    about 3 s a batch of all data sets and 8 s with the slow methods, which see the first batches only;
         resumes where it stopped.
Run:     python -m experiments.entrain.series [--llm NAME] [--study NAME] [--batches N] [--compared]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from experiments.entrain.methods import METHODS, replicas_of
from experiments.entrain.replica import BLOCKS, Replica, Taken
from experiments.entrain.stage_work import Judge
from experiments.entrain.workload import CORPUS_OF, LLM_OF, VARIED, batch_of, work_pool
from experiments.harness.printed import printed_rows
from experiments.harness.record import RESULTS
from workbench.balance.orchestration.allocation import proportional_allocation
from workbench.data.sample import Sample
from workbench.float_sum import float_sum
from workbench.plan.plan import Recompute
from workbench.report.progress import ticking
from workbench.whole_file import write_text

BATCH_SAMPLES, NUM_REPLICAS, BATCHES = 512, 4, 100
SLOW = {  # methods -> batches that they see
    "disttrain-vpp": 25,
    "exchanges": 25,
    "optimus": 25,
    "entrain-zb": 25,
    "entrain-graded": 25,
    "entrain-graded-zb": 5,
}
OWN, PLAIN_OWN = "disttrain-own", "1f1b-own"
OWN_STAGES = {OWN: "disttrain", PLAIN_OWN: "1f1b"}  # with the stages that DistTrain derives
EVERY = (*METHODS, *OWN_STAGES)
COMPARED = ("1f1b", "disttrain", "dip", "entrain-in-turn", "entrain", *OWN_STAGES)
SEEN = 0  # the seed of the batch that methods see before they run

Figures = dict[str, list[float]]  # "seconds", "vision_std_s", "llm_std_s" by batch


class Layouts(StrEnum):
    """Whose stage counts: by our costs of the data set, or Tables 4.1 and C.1's."""

    OURS = "ours"
    PRINTED = "printed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One setup of the comparison; the first of `STUDIES` is the paper's as far as stated.

    Args:
        name: as users type it.
        layouts: whose stage counts.
        judge: whose seconds a step takes.
        recompute: of the encoder's backward, which the paper does not state.
        datasets: that are drawn from.
        methods: that are tried.
    """

    name: str
    layouts: Layouts = Layouts.OURS
    judge: Judge = Judge.EXACT
    recompute: Recompute = Recompute.NONE
    datasets: tuple[str, ...] = tuple(CORPUS_OF)
    methods: tuple[str, ...] = COMPARED


OURS = Study(name="ours", methods=EVERY)
STUDIES = {
    study.name: study
    for study in (
        OURS,
        Study(name="printed", layouts=Layouts.PRINTED),
        Study(name="noise", judge=Judge.NOISE),
        Study(name="printed-noise", layouts=Layouts.PRINTED, judge=Judge.NOISE),
        Study(name="attention", judge=Judge.ATTENTION),
        Study(name="recompute", recompute=Recompute.FULL),
        Study(name="charts", datasets=tuple(VARIED)),
    )
}


def path_of(llm: str, study: Study = OURS) -> Path:
    """The file of a model's series."""
    suffix = "" if study.name == OURS.name else f"_{study.name}"
    return RESULTS / f"entrain_series_{llm}{suffix}.json"


@cache
def printed_stages() -> Mapping[tuple[str, str, str], tuple[int, int]]:
    """(data set, LLM, system) -> stages of encoder and LLM in Tables 4.1 and C.1."""
    rows = (*printed_rows("entrain_table4_1"), *printed_rows("entrain_tableC_1"))
    return {
        (row["dataset"], row["model"].rpartition("+")[2], row["system"]): (
            int(row["enc_pp"]),
            int(row["llm_pp"]),
        )
        for row in rows
    }


def stable_stages(dataset: str, llm: str, blocks: int = BLOCKS) -> tuple[int, int]:
    """Stages of both modules in proportion to their work over the whole data set."""
    work = work_pool(dataset, llm)
    encoder, text = proportional_allocation([float_sum(work.encoder_s), float_sum(work.llm_s)], blocks)
    return encoder, text


def encoder_share(batch: Replica) -> float:
    """The encoder's share of the work of a batch, each sample called alone."""
    encoder_s, llm_s = (float_sum(work.samples_s()) for work in (batch.encoder_work(), batch.llm_work()))
    return encoder_s / (encoder_s + llm_s)


def excess(share: float, stages: tuple[int, int]) -> float:
    """By how much the longer module exceeds an even share of all stages' work, with the encoder's share."""
    return max(share / stages[0], (1 - share) / stages[1]) * float_sum(stages) - 1


def one_sample_stages(llm: str, sample: Sample) -> tuple[int, int]:
    """Stages in proportion to the work of a single sample, as DistTrain profiles it."""
    alone = Replica(llm=llm, samples=(sample,), stages=(1, 1))
    works = (alone.encoder_work(), alone.llm_work())
    encoder, text = proportional_allocation([float_sum(work.samples_s()) for work in works], BLOCKS)
    return encoder, text


def batch_figures(
    method: str, batch: Replica, own_stages: tuple[int, int] | None = None
) -> tuple[float, float, float]:
    """Seconds of the slowest replica, and mean over replicas of both standard deviations.

    Args:
        own_stages: of methods with DistTrain's stages; those of the batch's first sample by default.
    """
    outcomes: list[Taken] = []
    for replica in replicas_of(method, batch, NUM_REPLICAS):
        if method in OWN_STAGES:
            stages = own_stages or one_sample_stages(batch.llm, batch.samples[0])
            outcomes.append(METHODS[OWN_STAGES[method]](replace(replica, stages=stages)))
        else:
            outcomes.append(METHODS[method](replica))
    return (
        max(outcome.iteration_s for outcome in outcomes),
        statistics.fmean(float(outcome.encoder_forward_s.std()) for outcome in outcomes),
        statistics.fmean(float(outcome.llm_forward_s.std()) for outcome in outcomes),
    )


def study_figures(method: str, dataset: str, llm: str, study: Study, seed: int) -> tuple[float, float, float]:
    """`batch_figures` for a study's batch."""
    own_stages = printed_stages()[dataset, llm, "disttrain"] if study.layouts is Layouts.PRINTED else None
    return batch_figures(method, batch(dataset, llm, seed, study), own_stages)


@cache
def batch(dataset: str, llm: str, seed: int, study: Study = OURS) -> Replica:
    """A global batch before it is divided among replicas."""
    is_printed = study.layouts is Layouts.PRINTED
    stages = printed_stages()[dataset, llm, "entrain"] if is_printed else stable_stages(dataset, llm)
    return Replica(
        llm=llm,
        samples=batch_of(dataset, BATCH_SAMPLES, seed),
        stages=stages,
        judge=study.judge,
        recompute=study.recompute,
        seen=batch_of(dataset, BATCH_SAMPLES // NUM_REPLICAS, SEEN),
    )


def batches_of(method: str, num_batches: int) -> int:
    """The number of batches that a method sees."""
    return min(SLOW.get(method, num_batches), num_batches)


def read_series(llm: str, study: Study = OURS) -> dict[str, dict[str, Figures]]:
    """Data set -> method -> figures by batch.

    Raises:
        ValueError: there is no such series yet.
    """
    path = path_of(llm, study)
    if not path.is_file():
        raise ValueError(f"{path} is not there; {command_of(llm, study)} writes it")
    record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {dataset: dict(methods) for dataset, methods in record["series"].items()}


def kept_series(study: Study = OURS) -> dict[str, dict[str, dict[str, Figures]]]:
    """The series of every model that has one.

    Raises:
        ValueError: there is none at all.
    """
    series_of = {llm: read_series(llm, study) for llm in LLM_OF if path_of(llm, study).is_file()}
    return series_of or {llm: read_series(llm, study) for llm in LLM_OF}


def command_of(llm: str, study: Study) -> str:
    """The command that writes a series."""
    return f"python -m experiments.entrain.series --llm {llm} --study {study.name}"


def _write(llm: str, study: Study, series: Mapping[str, Mapping[str, Figures]]) -> None:
    record = {
        "command": command_of(llm, study),
        "batch_samples": BATCH_SAMPLES,
        "replicas": NUM_REPLICAS,
        "stages": {dataset: batch(dataset, llm, 1, study).stages for dataset in series},
        "series": series,
    }
    write_text(json.dumps(record) + "\n", path_of(llm, study))


def extend(llm: str, study: Study, num_batches: int, *, is_quiet: bool) -> None:
    """Add missing batches up to `num_batches` of every data set, and store them on the way."""
    series = read_series(llm, study) if path_of(llm, study).is_file() else {}
    with ticking("batches", num_batches * len(study.datasets), quiet=is_quiet) as ticker:
        for number in range(num_batches):
            for dataset in study.datasets:
                ticker.step(dataset)
                _add(series.setdefault(dataset, {}), dataset, llm, study, number)
            batch.cache_clear()
            if number % 5 == 4 or number + 1 == num_batches:
                _write(llm, study, series)


def _add(methods: dict[str, Figures], dataset: str, llm: str, study: Study, number: int) -> None:
    """Add one batch under the methods that have not seen it."""
    for method in study.methods:
        if len(methods.get(method, {}).get("seconds", ())) != number or number == batches_of(
            method, number + 1
        ):
            continue
        values = study_figures(method, dataset, llm, study, number + 1)
        for name, value in zip(("seconds", "vision_std_s", "llm_std_s"), values, strict=True):
            methods.setdefault(method, {}).setdefault(name, []).append(float(f"{value:.5g}"))


def main() -> int:
    """Extend the series of one model or of all, of one study or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llm", choices=tuple(LLM_OF), default=None)
    parser.add_argument("--study", choices=tuple(STUDIES), default=None)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument(
        "--compared", action="store_true", help="without the slow methods, which few figures read"
    )
    arguments = parser.parse_args()
    if arguments.batches < 1:
        parser.error(f"--batches must be >= 1, got {arguments.batches}")
    studies = [STUDIES[arguments.study]] if arguments.study else list(STUDIES.values())
    if arguments.compared:
        studies = [replace(study, methods=COMPARED) for study in studies]
    for study in studies:
        for llm in [arguments.llm] if arguments.llm else LLM_OF:
            extend(llm, study, arguments.batches, is_quiet=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
