"""Planning time of the next batch, compared with the step that hides it.

Setup:   the model of examples/valm.yaml on A40s, encoders on 2 ranks each, the language model in two stages
         of 8 context-parallel ranks. Batches of 4 samples of 16k, 32k and 64k tokens, with new lengths and
         masks every time.
Ours:    wall time of planning, checking and lowering, as the planner's process does it, the median over
         batches that follow the first; the step is simulated. Memory of the A40 is not checked.
Run:     python -m experiments.bench.next_batch [--json]
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.harness.command import command_line, finish
from runtime.next_plan import answer_for
from sim.predict import step_s
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.following import next_plan
from workbench.strategies import cornstarch
from workbench.units import ms

JOB = Path(__file__).parents[2] / "examples" / "valm.yaml"
LENGTHS = {"16k": 16_384, "32k": 32_768, "64k": 65_536}
MASKS = ("causal", "multimodal", "multimodal_items", "gemma")
NUM_SAMPLES = 4
NUM_BATCHES = 5
ENOUGH_BYTES = 2**42


def batch_of(job: Job, length: int, seed: int) -> tuple[Sample, ...]:
    """Samples of about that many tokens: text with one to eight images and a clip each."""
    rng = np.random.default_rng(seed)
    sizes = {s.modality: (s.tokens_in, s.tokens_out) for s in job.batch[0].segments if s.modality != "text"}
    samples = []
    for index in range(NUM_SAMPLES):
        segments: list[Segment] = []
        for modality, (tokens_in, tokens_out) in sizes.items():
            for k in range(int(rng.integers(1, 9)) if modality == "vision" else 1):
                text = int(rng.integers(50, length // 20))
                number = sum(s.modality == "text" for s in segments)
                segments += [Segment("text", number, text, text), Segment(modality, k, tokens_in, tokens_out)]
        rest = max(1, length - sum(s.tokens_out for s in segments))
        number = sum(s.modality == "text" for s in segments)
        mask = MASKS[int(rng.integers(len(MASKS)))]
        samples.append(
            Sample(NUM_SAMPLES * seed + index, (*segments, Segment("text", number, rest, rest)), mask)
        )
    return tuple(samples)


def job_of(length: int) -> Job:
    """The first batch on enough ranks with enough memory."""
    job = load_job(JOB)
    nodes = tuple(replace(node, memory_bytes=ENOUGH_BYTES) for node in job.cluster.nodes)
    layouts = tuple(
        ModuleLayout(module=module, pp=pp, cp=cp)
        for module, pp, cp in (("vision", 1, 2), ("audio", 1, 2), ("llm", 2, 8))
    )
    cluster = replace(job.cluster, nodes=nodes)
    return replace(job, cluster=cluster, layouts=layouts, batch=batch_of(job, length, 0))


def measured(length: int) -> dict[str, float]:
    """Milliseconds of planning (median and longest) and of the shortest step."""
    job, cost = job_of(length), CostModel(load_profile("A40"))
    plan = cornstarch.plan(job, cost)
    answers = [answer_for(plan, batch_of(job, length, seed), next_plan) for seed in range(1, NUM_BATCHES + 1)]
    refused = [answer.refusal for answer in answers if answer.lowered is None]
    if refused:
        raise ValueError(refused[0])
    took = [answer.end_s - answer.start_s for answer in answers[1:]]  # the first compiles
    steps = [step_s(answer.lowered, cost) for answer in answers if answer.lowered is not None]
    return {
        "planning_ms_p50": ms(statistics.median(took)),
        "planning_ms_most": ms(max(took)),
        "shortest_step_ms": ms(min(steps)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = command_line(__doc__).parse_args(argv)
    milliseconds = {name: measured(length) for name, length in LENGTHS.items()}
    for name, of_length in milliseconds.items():
        print(f"{name:6}" + "".join(f"{key:>20} {value:10.1f}" for key, value in of_length.items()))
    hidden = all(row["planning_ms_most"] <= row["shortest_step_ms"] for row in milliseconds.values())
    claims = {"planning takes less than the shortest step": hidden}
    return finish({**milliseconds, "claims": claims}, claims, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
