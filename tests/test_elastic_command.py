"""`elastic`: events checked by name, layouts foreseen, and a training that is killed, joined and goes on."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.oobleck import chaos_job
from runtime.data.scenes import make
from runtime.elastic.forecast import StepPrediction, forecast_layouts, predict_steps
from runtime.elastic.history import Cause, Reshaped, StepDone
from runtime.elastic.local_nodes import Shape
from runtime.elastic.outcome import detection_s, layout_times, next_step_s
from runtime.elastic.run import Ran, elastic_job
from runtime.elastic.step_data import drawn, read_folder
from sim.predict import predict
from tests.command_line import JOB, accept, refuse, workbench
from workbench.cli.elastic_training import sizes_text
from workbench.elastic.availability import Rates, parse_trace, random_trace
from workbench.elastic.reconfigure import CannotContinueError
from workbench.elastic.step_events import told_events, traced_events
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.report.elastic_plot import draw_elastic
from workbench.strategies.elastic_templates import elastic_templates

EXAMPLES = Path(__file__).parents[1] / "examples"
REL_TOL = 2e-6  # of a loss in float32
REL_TOL_64 = 1e-11


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("  samples: 4\n", "  samples: 8\n"))  # long steps, for a kill to come into
    return path


def test_a_folder_is_read_over_and_over_and_drawn_samples_are_new_in_every_step(job: Path):
    folder = job.with_name("data")
    make(folder, num_samples=12, seed=0)
    found = load_job(job)
    read = read_folder(found, folder)
    taken = [[sample.id for sample in read.batch(step)] for step in range(3)]
    assert taken == [[*range(8)], [*range(8, 12), *range(4)], [*range(4, 12)]]
    assert read.job.batch == read.batch(0)
    new = drawn(found, 0)
    ids = [sample.id for step in range(5) for sample in new.batch(step)]
    assert len(set(ids)) == len(ids)
    assert [replace(sample, id=0) for sample in new.batch(4)] == [replace(s, id=0) for s in found.batch]


class TestForecast:
    @settings(max_examples=30)
    @given(st.integers(0, 10**6), st.integers(0, 2), st.integers(2, 6))
    def test_every_step_has_one_layout_of_the_nodes_there_are_until_training_must_stop(
        self, seed: int, faults: int, nodes: int
    ):
        job = chaos_job.elastic_job(6, num_faults=faults, layers_per_rank=4)
        threshold = job.templates.specification.threshold
        trace = random_trace(nodes, Rates(leaves_per_node_h=60.0, joins_per_missing_h=90.0), 600.0, seed)
        events, _ = traced_events(trace, 20.0, 0.0, first=0, steps=30)
        if nodes < threshold:
            with pytest.raises(CannotContinueError, match="are needed to start"):
                forecast_layouts(job, events, 30)
            return
        found = forecast_layouts(job, events, 30)
        ends = [interval.end for interval in found.intervals]
        assert [interval.first for interval in found.intervals] == [0, *ends][: len(ends)]
        present = Counter(events.start)
        for interval in found.intervals:
            for step in range(interval.first if interval.first else 0, interval.end):
                now = events.at(step)
                present.update(now.joins)
                present.subtract(now.killed)
            at_work = {node for pipeline in interval.layout.pipelines for node in pipeline}
            assert at_work == {node for node, count in present.items() if count > 0}
            assert len(at_work) >= threshold
        if found.refusal is None:
            assert ends[-1] == 30
        else:
            step = ends[-1] if ends else 0
            assert found.refusal.startswith(f"step {step}: ")

    def test_a_node_that_waits_takes_the_room_of_a_killed_one_or_leaves_when_it_is_warned(self):
        job = chaos_job.elastic_job(3)
        full = told_events(["1:join:new", "2:kill:node0"], 3, first=0, steps=4)
        layouts = [interval.layout for interval in forecast_layouts(job, full, 4).intervals]
        assert [sorted(sum(layout.pipelines, ())) for layout in layouts] == [
            ["node0", "node1", "node2"],
            ["node0", "node1", "node2"],
            ["new", "node1", "node2"],
        ]
        waits = told_events(["1:join:new", "2:warn:new", "3:kill:node0"], 3, first=0, steps=4)
        last = forecast_layouts(job, waits, 4).intervals[-1].layout
        assert sorted(sum(last.pipelines, ())) == ["node1", "node2"]


class TestTables:
    def done(self, *ends_s: float) -> tuple[StepDone, ...]:
        sizes = [(1, 1), (1, 1), (1, 1), (1,), (1,)]
        return tuple(
            StepDone(step=step, loss=1.0, end_s=end_s, sizes=sizes[step]) for step, end_s in enumerate(ends_s)
        )

    def change(self, step: int, noticed_s: float, cause: Cause, lost: tuple[str, ...]) -> Reshaped:
        return Reshaped(
            step=step,
            cause=cause,
            lost=lost,
            joined=(),
            attempts=1,
            noticed_s=noticed_s,
            stopped_s=noticed_s + 0.1,
            ready_s=noticed_s + 0.5,
            planning_s=0.1,
            groups_s=0.1,
            copying_s=0.1,
            num_bytes=5,
            sizes=(1,),
        )

    def test_a_step_that_a_change_came_into_is_not_measured(self):
        loss = self.change(3, 4.5, Cause.LOSS, ("b", "c"))
        ran = Ran(
            steps=self.done(1.0, 2.0, 3.5, 9.0, 11.0),
            changes=(self.change(0, 0.0, Cause.START, ()), loss),
            killed_s={"b": 4.0, "c": 4.2},
            refusal=None,
            signal=None,
            saved=None,
        )
        predicted = StepPrediction(
            sizes=(1, 1),
            simulated_s=0.9,
            planning_s=0.3,
            feeding_s=0.05,
            update_s=0.2,
            core_s=2.0,
            num_cores=2,
            unmeasured=(),
        )
        both, one = layout_times(ran, {(1, 1): predicted})
        assert both.measured_s == (1.0, 1.5)
        assert both.error == pytest.approx(1.05 / 1.25 - 1)
        assert replace(predicted, core_s=3.0).step_s == 1.5  # both cores at work all the time
        assert (one.predicted_s, one.measured_s, one.error) == (None, (2.0,), None)
        assert detection_s(ran, loss) == pytest.approx(0.5)
        assert next_step_s(ran, loss) == pytest.approx(4.0)
        assert [sizes_text(sizes) for sizes in ((2, 3), (1, 1, 1, 2))] == ["2 + 3", "3x1 + 2"]


def test_the_example_can_be_trained_on_its_trace():
    found = load_job(EXAMPLES / "elastic.yaml")
    trace = parse_trace("spot", (EXAMPLES / "elastic-spot.csv").read_text())
    shape = Shape(job=found, nodes=None, ranks_per_node=1, trace=trace)
    whole, cost = shape.on_nodes(), cost_of(found, None, None)
    templates = elastic_templates(whole, cost, num_nodes=shape.num_nodes, num_faults=1)
    assert templates.planned.specification.smallest == 2
    job = elastic_job(templates, drawn(whole, 0), seed=0, wait_s=5.0, num_cores=shape.num_cores)
    events, num_late = traced_events(trace, 50.0, 0.0, first=0, steps=40)
    forecast = forecast_layouts(job, events, 40)
    assert (num_late, forecast.refusal) == (0, None)
    assert [interval.layout.num_nodes for interval in forecast.intervals] == [6, 5, 4, 5, 6, 5, 4, 5]
    predictions = predict_steps(templates, job, forecast, shape.job.cluster, partial(predict, cost=cost), 1)
    assert {costs for each in predictions.values() for costs in each.unmeasured} == set()


def test_a_node_is_killed_one_joins_and_predictions_stand_beside_what_was_measured(job: Path):
    out = job.with_name("out")
    told = accept(
        "elastic", job, "--nodes", 3, "--steps", 5, "--event", "1:kill:node1", "--event", "3:join:spare",
        "--out", out, "--json",
    )  # fmt: skip
    record = json.loads(told.stdout.splitlines()[-1])
    assert json.loads((out / "elastic.json").read_text()) == record
    assert json.loads((out / "predictions.json").read_text()) == record["predicted"]
    assert (out / "elastic.png").read_bytes().startswith(b"\x89PNG")
    assert [(c["step"], c["cause"], c["lost"], c["joined"]) for c in record["changes"]] == [
        (0, "start", [], []),
        (1, "loss", ["node1"], []),
        (3, "join", [], ["spare"]),
    ]
    assert record["changes"][1]["detection_s"] > 0
    assert [step["step"] for step in record["steps"]] == list(range(5))
    foreseen = {
        step: [len(pipeline) for pipeline in stretch["pipelines"]]
        for stretch in record["predicted"]["stretches"]
        for step in range(stretch["first"], stretch["end"])
    }
    assert {step["step"]: step["pipelines"] for step in record["steps"]} == foreseen
    copied = [change["num_bytes"] for change in record["changes"]]
    assert copied == [stretch["copied_bytes"] for stretch in record["predicted"]["stretches"]]
    assert all(found["predicted_s"] > 0 for found in record["layouts"])
    assert record["stopped"] is None


def test_a_node_killed_while_another_kill_is_recovered_from_is_lost_with_it(pairs: Path):
    told = accept(
        "elastic", pairs, "--nodes", 4, "--steps", 4, "--faults", 1, "--json",
        "--event", "1:kill:node1", "--event", "recovery:kill:node2",
    )  # fmt: skip
    record = json.loads(told.stdout.splitlines()[-1])
    assert [(c["step"], sorted(c["lost"]), c["attempts"]) for c in record["changes"]] == [
        (0, [], 1),
        (1, ["node1", "node2"], 2),
    ]
    assert [change["num_bytes"] for change in record["changes"]] == [
        stretch["copied_bytes"] for stretch in record["predicted"]["stretches"]
    ]
    whole = accept("elastic", pairs, "--nodes", 2, "--steps", 4, "--json")
    undisturbed = json.loads(whole.stdout.splitlines()[-1])
    assert [step["loss"] for step in record["steps"]] == pytest.approx(
        [step["loss"] for step in undisturbed["steps"]], rel=REL_TOL_64
    )


def test_without_a_checkpoint_it_says_that_nothing_was_saved(job: Path):
    cut = workbench("elastic", job, "--nodes", 2, "--steps", 4, "--event", "2:kill:node0", "--json")
    assert cut.exit_code == 2
    assert "training stops; progress was not saved: no --checkpoint folder was given" in cut.stderr


def test_below_the_threshold_progress_is_saved_and_resumed_with_the_losses_of_an_undisturbed_run(job: Path):
    saves = job.with_name("saves")
    whole = accept("elastic", job, "--nodes", 2, "--steps", 4, "--json")
    cut = workbench(
        "elastic", job, "--nodes", 2, "--steps", 4, "--event", "2:kill:node0", "--checkpoint", saves, "--json"
    )
    assert cut.exit_code == 2
    assert "1 nodes are left" in cut.stderr
    assert f"progress after 2 steps is in {saves / 'step2'}" in cut.stderr
    rest = accept("elastic", job, "--nodes", 2, "--steps", 4, "--resume", saves, "--json")
    losses = [
        [step["loss"] for step in json.loads(result.stdout.splitlines()[-1])["steps"]]
        for result in (whole, cut, rest)
    ]
    assert losses[1] + losses[2] == pytest.approx(losses[0], rel=REL_TOL)
    refuse(
        "elastic", job, "--nodes", 2, "--steps", 2, "--resume", saves,
        words="want --steps 3 or more, got 2, 2 are taken already", folder=job.parent,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", 3, "--event", "30:kill:node1"), "training ends after 20 steps; nearest: 19:kill:node1"),
        (("--nodes", 3, "--event", "3:kill:node1", "--event", "4:kill:node1"), "gone since '3:kill:node1'"),
        (("--nodes", 3, "--faults", 3), "faults 3 wants 4 pipelines; want faults 2, or 4 nodes"),
        (("--nodes", 9, "--faults", 8), "8 microbatches cannot be distributed to 9 pipelines"),
        (("--nodes", 65,), "65 processes of this machine: want at most 64; nearest: --nodes 64"),
        (("--ranks-per-node", 3, "--ranks-per-stage", 2), "3 ranks cannot be assigned to stages of 2"),
        (
            ("--nodes", 3, "--ranks-per-node", 2, "--ranks-per-stage", 2),
            "2 ranks of a stage cannot split microbatches of 1 samples; nearest: microbatch_samples 2",
        ),
        (("--nodes", 3, "--sharding", "parameters"), "stages have one rank; want templates of 2 or more"),
        (("--nodes", 3, "--sharding", "optimizer"), "got 'optimizer'; want 'none' or 'parameters'"),
        (("--faults", -1), "failures to tolerate must be >= 0, got -1"),
        (("--ranks-per-node", 0), "want --ranks-per-node 1 or more, got 0"),
        (("--ranks-per-node", 9), "want 1 node or more, got 0 of 9 ranks"),
        (("--step-s", 4), "--step-s and --notice-s belong to --trace"),
        (("--checkpoint-every", 4), "--checkpoint-every wants --checkpoint FOLDER"),
        (("--timeout", 1e-4), "every wait ends after 0.0001 s; want --timeout"),
        (("--timeout", "inf"), "want --timeout > 0 and at most 86400 s, got inf"),
        (("--checkpoint", "x", "--checkpoint-every", 0), "want a save every 1 step or more, got 0"),
        (("--resume", "nowhere"), "no whole save in it"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_process(job: Path, arguments: tuple[object, ...], words: str):
    refuse("elastic", job, *arguments, words=words, folder=job.parent)


def test_templates_fit_the_memory_that_plans_are_checked_against(job: Path):
    """Ranks of one machine share its memory: a part for each, which holds what the plans need."""
    text = job.read_text()
    smallest = {}
    for gib in (0.003, 0.004, 0.006):
        job.write_text(text.replace("memory_gib: 1", f"memory_gib: {gib}"))
        found = load_job(job)
        shape = Shape(job=found, nodes=6, ranks_per_node=1, trace=None)
        cost, whole = cost_of(found, None, None), shape.on_nodes()
        templates = elastic_templates(whole, cost, num_nodes=6, num_faults=1)
        trained = elastic_job(templates, drawn(whole, 0), seed=0, wait_s=5.0, num_cores=2)
        forecast = forecast_layouts(trained, told_events((), 6, first=0, steps=1), 1)
        predict_steps(templates, trained, forecast, found.cluster, partial(predict, cost=cost), 1)
        smallest[gib] = templates.planned.specification.smallest
    assert smallest[0.003] > smallest[0.006]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("llm: {pp: 2}", "llm: {pp: 2, recompute: full}"), "'llm' sets one"),
        (("audio: {pp: 1}", "audio: {pp: 1, cp: 2}"), "'audio' has tp 1, cp 2, ep 1; want 1"),
        (("memory_gib: 1", "memory_gib: 0.0001"), "the model fits no template"),
        (("local: {ranks: 4, cores: 2}", "device: H100\n  nodes: 2\n  ranks_per_node: 2"), "cluster.local"),
        (("precision: float32", "optimizer_precision: float64"), "as precision, got 'float64'"),
        (("precision: float32", "schedule: {kind: gpipe}"), "want schedule 1f1b, got gpipe"),
        (("  samples: 8\n", "  samples: 8\n  replicas: 2\n"), "want replicas 1, got 2"),
    ],
)  # fmt: skip
def test_what_elastic_training_does_not_do_is_refused(job: Path, change: tuple[str, str], words: str):
    text = job.read_text()
    assert change[0] in text
    job.write_text(text.replace(*change))
    refuse("elastic", job, "--nodes", 3, words=words, folder=job.parent)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of microbatches of two samples, in float64: sums come in the order in which ranks are ready, and
    Adam makes whole steps of the rounding errors of gradients that are zero."""
    path = tmp_path_factory.mktemp("pairs") / "job.yaml"
    text = JOB.replace("  samples: 4\n", "  samples: 8\n  microbatch_samples: 2\n")
    path.write_text(text.replace("precision: float32", "precision: float64"))
    return path


@pytest.fixture(scope="module")
def narrow(pairs: Path) -> dict[str, Any]:
    """What stages of one rank come to."""
    told = accept("elastic", pairs, "--nodes", 2, "--steps", 3, "--json")
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_ranks_of_a_stage_share_out_samples_and_weights(pairs: Path, narrow: dict[str, Any], sharding: str):
    told = accept(
        "elastic", pairs, "--nodes", 3, "--ranks-per-node", 2, "--ranks-per-stage", 2, "--steps", 3,
        "--sharding", sharding, "--event", "1:kill:node0", "--json",
    )  # fmt: skip
    wide = json.loads(told.stdout.splitlines()[-1])
    assert [step["loss"] for step in wide["steps"]] == pytest.approx(
        [step["loss"] for step in narrow["steps"]], rel=REL_TOL_64
    )
    assert [change["cause"] for change in wide["changes"]] == ["start", "loss"]
    assert [stretch["copied_bytes"] for stretch in wide["predicted"]["stretches"]] == [
        change["num_bytes"] for change in wide["changes"]
    ]
    shared = [record["layouts"][0]["predicted_core_s"] for record in (narrow, wide)]
    assert shared[1] > shared[0]  # sums of gradients have twice the holders


def test_a_trace_says_who_is_there(job: Path):
    trace = job.with_name("trace.csv")
    trace.write_text("t_s,event,node\n60,add,a\n60,add,b\n60,add,c\n75,remove,a\n")
    told = accept("elastic", job, "--trace", trace, "--step-s", 10, "--notice-s", 5, "--json")
    record = json.loads(told.stdout.splitlines()[-1])
    assert [(c["step"], c["cause"], c["lost"]) for c in record["changes"]] == [
        (0, "start", []),
        (1, "warning", ["a"]),
    ]
    assert len(record["steps"]) == 2
    trace.write_text("t_s,event,node\n60,add,a\n")
    refuse(
        "elastic", job, "--trace", trace, "--step-s", 10,
        words="number of nodes 1, of which a pipeline needs 1: faults 1 wants 2 pipelines", folder=job.parent,
    )  # fmt: skip


def test_the_plot_is_of_any_record_with_steps(tmp_path: Path):
    step = {"step": 0, "loss": 1.0, "end_s": 1.0, "seconds": None, "samples_per_s": None, "pipelines": [1, 1]}
    change = {
        "cause": "start",
        "lost": [],
        "joined": [],
        "pipelines": [1, 1],
        "noticed_s": 0.0,
        "ready_s": 0.5,
    }
    layout = {"pipelines": [1, 1], "predicted_s": 0.5}
    record = {
        "job": "one", "samples": 4, "threshold": 2, "steps": [step], "changes": [change], "layouts": [layout]
    }  # fmt: skip
    draw_elastic(record, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
