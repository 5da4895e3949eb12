"""The gain of each question: searched alone from one strategy's plan, and all of them together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.search.joint.choice import choice_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.question import Question
from workbench.search.joint.result import SearchResult
from workbench.search.joint.starts import Start
from workbench.search.joint.terms import Scope, Stop
from workbench.search.joint.worker_pool import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One row of the ablation.

    Args:
        open: questions that were searched; the others keep the strategy's answers.
        before: value of the strategy's plan.
        found: result of the search.
    """

    open: tuple[Question, ...]
    before: float
    found: SearchResult

    @property
    def factor(self) -> float:
        """Ratio of the value before to the value after the search."""
        return self.before / self.found.value


def ablated(
    job: Job,
    cost: CostModel,
    judge: Judge,
    strategy: str,
    *,
    scope: Scope,
    stop: Stop,
    workers: WorkerSpec = 1,
) -> Iterator[Gain]:
    """Search each question alone, then all together, each with the same stopping rule.

    The last search also starts from the results of the others, so that it is never worse than any of them.

    Args:
        strategy: whose plan the results are compared with.
        scope: of all searches, with the starts of all strategies (see `searched_starts`) and nothing fixed.
        stop: of each search.

    Raises:
        ValueError: the strategy has no plan.

    Complexity: six searches.
    """
    first = next((start for start in scope.starts or () if start.name == strategy), None)
    if first is None or first.value is None:
        refusal = "there is no such strategy" if first is None else first.refusal
        raise ValueError(f"ablation: strategy {strategy!r} has no plan of job {job.name!r}: {refusal}")
    alone: list[Start] = []
    for question in Question:
        fixed = {other: strategy for other in Question if other is not question}
        one_open = replace(scope, fixed=fixed)
        result = joint_search(job, cost, judge, stop=stop, scope=one_open, workers=workers)
        choice = choice_of(job, result.plan, cost)
        alone.append(Start(name=f"{question} alone", plan=result.plan, choice=choice, value=result.value))
        yield Gain(open=(question,), before=first.value, found=result)
    scope = replace(scope, starts=(*(scope.starts or ()), *alone))
    result = joint_search(job, cost, judge, stop=stop, scope=scope, workers=workers)
    yield Gain(open=tuple(Question), before=first.value, found=result)
