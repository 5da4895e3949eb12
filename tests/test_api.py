"""The package's own functions: from a job to a comparison, without a command."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench import api

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
        workbench.run(plan, workbench.RunOptions(device="cuda"))
