"""The package's own functions: from a job to a comparison, without a command."""

import dataclasses
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench import api
from workbench.job.device import Device
from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import Program
from workbench.planner.strategy_spec import First
from workbench.schedule.choice import ScheduleKind
from workbench.search.drive import Candidate
from workbench.strategies.registry import BY_NAME

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"


@pytest.fixture(scope="module")
def job() -> workbench.Job:
    return workbench.load_job(EXAMPLE)


@pytest.fixture(scope="module")
def plan(job: workbench.Job) -> workbench.Plan:
    return workbench.plan(job, profile="A40")


def test_from_a_job_to_a_comparison(plan: workbench.Plan, tmp_path: Path):
    lowered = workbench.lower(plan)
    assert lowered.plan == plan
    assert len(lowered.transfers) > 0
    predicted = workbench.simulate(plan, profile="A40")
    assert predicted.iteration_s > 0
    options = workbench.RunOptions(steps=2, warmup=1, trace=tmp_path / "run.json")
    ran = workbench.run(plan, options)
    assert len(ran.losses) == 3
    assert len(ran.traces) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["run.1.json", "run.2.json"]
    comparison = workbench.compare(predicted, ran.traces)
    [total] = [row for row in comparison.rows if row.name == "iteration"]
    assert total.simulated == predicted.iteration_s


def test_search_ranks_what_plan_makes(job: workbench.Job, plan: workbench.Plan):
    found = workbench.search(job, profile="A40")
    assert found[0].plan is not None
    times_s = [one.trace.iteration_s for one in found if one.trace is not None]
    assert times_s == sorted(times_s)
    assert next(one.plan for one in found if one.strategy == "cornstarch") == plan


def test_a_layout_that_the_strategy_does_not_keep_is_warned_of(job: workbench.Job):
    first, rest = 1, len(job.model.llm.layers) - 1
    layouts = (ModuleLayout(module="llm", pp=2, stage_layers=(rest, first)),)
    with pytest.warns(
        UserWarning, match="megatron-homogeneous changes the layout of 'llm': the job has stage_layers"
    ):
        workbench.plan(dataclasses.replace(job, layouts=layouts), "megatron-homogeneous", profile="A40")
    with pytest.warns(UserWarning, match=" changes the layout of 'llm': the job has ") as told:
        best, *_ = workbench.search(dataclasses.replace(job, layouts=layouts), profile="A40")
    assert str(told[0].message).startswith(best.strategy)


def test_names_are_there_before_and_after_their_packages_are_imported():
    script = (
        "import workbench\n"
        "before = workbench.plan, workbench.search\n"
        "import workbench.plan.lower, workbench.search.drive\n"
        "from workbench import plan, search\n"
        "assert (plan, search) == before == (workbench.plan, workbench.search)\n"
        "assert callable(plan) and callable(search)\n"
        "assert workbench.plan.lower.lower is workbench.lower\n"
        "assert {*workbench.__all__} <= {*dir(workbench)}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=EXAMPLE.parents[1])


@pytest.mark.parametrize("name", workbench.__all__)
def test_every_name_says_what_it_is(name: str):
    found = getattr(workbench, name)
    found = getattr(api, name) if inspect.ismodule(found) else found
    assert inspect.getdoc(found)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        hints = [each.annotation for each in signature.parameters.values()]
        assert inspect.Parameter.empty not in (*hints, signature.return_annotation)


def test_what_is_not_there_is_named(job: workbench.Job, plan: workbench.Plan):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = workbench.nothing
    with pytest.raises(ImportError):
        importlib.import_module("workbench.nothing")
    with pytest.raises(ValueError, match=r"strategy 'cornstrach': want one of .*; nearest: cornstarch"):
        workbench.plan(job, "cornstrach", profile="A40")
    with pytest.raises(ValueError, match="processes of this machine run on the CPU"):
        workbench.run(plan, workbench.RunOptions(device=Device.CUDA))


class _Printer(list[str]):
    def text(self, text: str) -> None:
        self.append(text)


def test_notebooks_show_one_line(job: workbench.Job, plan: workbench.Plan):
    trace = workbench.simulate(plan, profile="A40")
    candidate = Candidate(strategy="cornstarch", plan=plan, trace=trace)
    refused = Candidate(strategy="dip", refusal="too few ranks")
    shown = _Printer()
    for value in (job, plan, workbench.lower(plan), trace, candidate, refused):
        value._repr_pretty_(shown, False)
        assert pickle.loads(pickle.dumps(value)) == value
    assert all(len(line) < 200 and "\n" not in line for line in shown)
    assert shown[1] in shown[2]
    assert shown[0] == "<Job 'tiny': vision, audio, llm; 4 ranks, 8 samples a step>"
    assert shown[5] == "<Candidate dip: no plan: too few ranks>"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schedules": ["1f2b"]}, r"schedule '1f2b': want one of 1f1b, .*; nearest: 1f1b"),
        ({"objective": "goodputs"}, r"objective 'goodputs': want one of iteration, throughput, dollars-per-"),
        ({"objective": "goodput"}, r"objective 'goodput': want one of iteration, throughput, dollars-per-"),
        ({"strategies": ["fdsp"]}, r"strategy 'fdsp': want one of cornstarch, .*; nearest: fsdp"),
        ({"judge": "sim"}, r"judge 'sim': want one of simulator, planner; nearest: simulator"),
    ],
)
def test_a_name_that_is_not_there_is_told_those_that_are(job: workbench.Job, arguments, words: str):
    with pytest.raises(ValueError, match=words):
        workbench.search(job, profile="A40", **arguments)


def test_schedules_are_kinds_or_their_names(job: workbench.Job):
    by_name = workbench.search(job, profile="A40", schedules=["gpipe"])
    assert by_name == workbench.search(job, profile="A40", schedules=[ScheduleKind.GPIPE])
    assert all(one.strategy.endswith(" gpipe") for one in by_name)


def test_strategies_are_names_or_of_ones_own(job: workbench.Job, plan: workbench.Plan):
    """One that is not registered is judged and ranked like the others."""
    own = dataclasses.replace(BY_NAME["cornstarch"], name="mine", planner=First(_mine), shortlist=_mine)
    assert workbench.plan(job, own, profile="A40") == dataclasses.replace(plan, strategy="mine")
    found = workbench.search(job, strategies=["encoders-colocated", own], profile="A40")
    assert {one.strategy for one in found} == {"encoders-colocated", "mine"}
    assert [one.strategy for one in workbench.search(job, strategies=["entrain"], profile="A40")] == [
        "entrain"
    ]
    with pytest.raises(ValueError, match="names must be unique, 'mine' is twice"):
        workbench.search(job, strategies=[own, own], profile="A40")


def test_strategies_may_be_a_generator(job: workbench.Job):
    """It can be read but once, and an empty result would look like a job without plans."""
    found = workbench.search(job, strategies=(name for name in ("entrain", "dip")), profile="A40")
    assert {one.strategy for one in found} == {"entrain", "dip"}


def _mine(job, cost, progress, most):
    plans = BY_NAME["cornstarch"].shortlist(job, cost, progress, most)
    return tuple(dataclasses.replace(each, strategy="mine") for each in plans)


def test_files_are_paths_or_their_text(plan: workbench.Plan):
    eager = str(EXAMPLE.with_name("transformers-execution.json"))
    by_text = workbench.simulate(plan, profile="A40", execution=eager)
    assert by_text == workbench.simulate(plan, profile="A40", execution=Path(eager))
    assert by_text.iteration_s > workbench.simulate(plan, profile="A40").iteration_s


def test_an_argument_of_another_kind_is_named(job: workbench.Job, plan: workbench.Plan):
    trace = workbench.simulate(plan, profile="A40")
    for call, words in (
        (lambda: workbench.compare(trace, trace), "compare: want .* a sequence .*, got Trace"),
        (lambda: workbench.compare(plan, [trace]), "compare: want a simulated Trace .*, got Plan"),
        (lambda: workbench.search(job, schedules="gpipe"), r"want a sequence .* nearest: \['gpipe'\]"),
        (
            lambda: workbench.search(job, strategies="dip", profile="A40"),
            r"strategies: want a sequence .* \['dip'\]",
        ),
        (
            lambda: workbench.search(job, strategies=BY_NAME["dip"], profile="A40"),
            "strategies: want a sequence, got StrategySpec; nearest: a list of it",
        ),
        (
            lambda: workbench.plan(job, _mine, profile="A40"),
            "strategy: want a name or a StrategySpec, got function",
        ),
        (lambda: workbench.plan(str(EXAMPLE)), "plan: want a Job, as workbench.load_job returns it, got str"),
        (lambda: workbench.search(str(EXAMPLE)), "search: want a Job, "),
        (lambda: workbench.simulate(job), "simulate: want a Plan, as workbench.plan returns it, got Job"),
        (lambda: workbench.run(job), "run: want a Plan"),
        (lambda: workbench.run(plan, {"steps": 1}), "run: want RunOptions, got dict"),
        (
            lambda: workbench.simulate(dataclasses.replace(plan, programs=list(plan.programs))),
            "simulate: programs of a Plan are a tuple, got list",
        ),
        (
            lambda: workbench.run(dataclasses.replace(plan, programs=tuple(map(_listed, plan.programs)))),
            r"run: actions of the program of ranks \(0,\) of a Plan are a tuple, got list",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def _listed(program: Program) -> Program:
    return dataclasses.replace(program, actions=list(program.actions))


def test_called_packages_have_the_signature_of_their_function():
    assert inspect.signature(workbench.plan) == inspect.signature(api.plan)
    assert inspect.signature(workbench.search) == inspect.signature(api.search)


@pytest.mark.parametrize("name", ["plan", "search"])
def test_called_packages_say_where_their_function_is_documented(name: str):
    assert f"see `{name}` of `workbench.api`" in (inspect.getdoc(getattr(workbench, name)) or "")
