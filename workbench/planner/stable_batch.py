"""The batch size from which on a static split of the ranks fits every batch of a job's data."""

import random

from workbench.balance.orchestration.allocation import num_trials, stable_batch_size
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.planner.sample_work import sample_work

CONFIDENCE, MOST_FAILURES = 0.95, 0.05
MOST_SAMPLES = 1 << 14


def stable_batch_samples(job: Job, cost: CostModel, num_ranks: int) -> int:
    """b_min, in samples, for a replica of `num_ranks` ranks.

    Source: Entrain (dissertation, section 4.4.2, Algorithm 2).
    Differs: the job's own batch stands for the data set; batches are drawn from it with replacement. All
    encoders count as one.

    Raises:
        ValueError: not stable up to `MOST_SAMPLES`, as `stable_batch_size`.

    Complexity: 60 draws of every size tried, O(samples) each.
    """
    work, rng = sample_work(job, cost), random.Random(0)
    indices = range(len(job.batch))

    def draw(num_samples: int) -> tuple[float, float]:
        drawn = rng.choices(indices, k=num_samples)
        return float_sum(work.encoder_s[index] for index in drawn), float_sum(
            work.llm_s[index] for index in drawn
        )

    trials = num_trials(CONFIDENCE, MOST_FAILURES)
    return stable_batch_size(draw, num_ranks, first=1, most=MOST_SAMPLES, trials=trials)[-1].num_samples


def too_small(job: Job, cost: CostModel, num_ranks: int) -> str | None:
    """A warning where the batch is smaller than b_min; None where it is not."""
    try:
        least = stable_batch_samples(job, cost, num_ranks)
    except ValueError as error:
        return f"job {job.name!r}: batches of any size need different splits of {num_ranks} ranks: {error}"
    if len(job.batch) >= least:
        return None
    return (
        f"job {job.name!r}: a batch of {len(job.batch)} samples is below b_min, {least}: other batches may "
        f"need another split of the {num_ranks} ranks between encoders and LLM"
    )
