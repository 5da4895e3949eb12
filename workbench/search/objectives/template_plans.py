"""Pipeline templates as plans: what a job on templates runs on a number of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.build import with_programs
from workbench.plan.microbatches import chunked_microbatches
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import empty_draft, layout_of
from workbench.planner.stage_counts import Progress
from workbench.schedule.choice import Schedule
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates

NAME = "templates"


def templates_of(job: Job, cost: CostModel, faults: int) -> ElasticTemplates:
    """Templates of a job on all its nodes.

    Raises:
        ValueError: a schedule other than 1F1B, whose time templates are planned by, fewer ranks than the
            cluster's, or as `elastic_templates`.
    """
    if job.max_ranks not in (None, job.cluster.num_ranks):
        raise ValueError(
            f"{NAME}: pipelines take all {job.cluster.num_ranks} ranks, got max_ranks {job.max_ranks}"
        )
    if job.schedule.kind is not Schedule().kind:
        raise ValueError(f"{NAME}: pipelines run {Schedule().kind}, got schedule {job.schedule.kind}")
    return elastic_templates(job, cost, num_nodes=len(job.cluster.nodes), num_faults=faults)


@dataclass(frozen=True, slots=True)
class TemplatePlanner:
    """A planner that uses a job's templates on all its nodes; `faults` nodes may be lost at once."""

    faults: int

    def __call__(self, job: Job, cost: CostModel, progress: Progress) -> Plan:
        return plan_of_templates(templates_of(job, cost, self.faults), len(job.cluster.nodes))


def plan_of_templates(templates: ElasticTemplates, num_nodes: int) -> Plan:
    """The fastest pipelines on the first `num_nodes` nodes, as a plan with one replica per pipeline.

    Microbatches are consecutive samples, as many for each pipeline as Eq. 2.6 of the Oobleck chapter says.

    Raises:
        ValueError: too few nodes, as `ElasticTemplates.at`, or modules of several tp on one stage.
    """
    job, chosen = templates.job, templates.at(num_nodes)
    stages: list[Stage] = []
    first_rank = 0
    for replica, size in enumerate(chosen.sizes):
        for cut in templates.planned.of_size(size).stages:
            for module, first, end in templates.chain.runs_of(cut):
                tp = layout_of(job, module).tp
                ranks = (tuple(range(first_rank, first_rank + tp)),)
                layers = (first, end)
                stages.append(
                    Stage(id=len(stages), module=module, replica=replica, layers=layers, ranks=ranks)
                )
            first_rank += cut.num_gpus
    draft = replace(empty_draft(job, NAME), stages=tuple(stages))
    microbatches = chunked_microbatches(draft, _chunks(job, chosen.microbatches))
    return with_programs(replace(draft, microbatches=microbatches))


def _chunks(job: Job, counts: Sequence[int]) -> dict[int, list[tuple[Sample, ...]]]:
    """Microbatches of each pipeline."""
    size = job.microbatch_samples
    chunks = [job.batch[first : first + size] for first in range(0, len(job.batch), size)]
    ends = list(accumulate(counts))
    return {
        index: chunks[end - count : end] for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    }
