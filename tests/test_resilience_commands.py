"""`templates` and `failures`: numbers that follow from the templates, and one line for bad input."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import JOB, answered, workbench
from workbench.cost import nccl
from workbench.cost.group_link import GroupLink
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.elastic.availability import Rates
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.plan.plan import Precision
from workbench.search.objectives.template_plans import plan_of_templates
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates
from workbench.timing.accept import accept
from workbench.timing.price import price

NODES = """cluster:
  device: H100
  nodes: 6
  ranks_per_node: 2
  intra: {gb_per_s: 100.0, latency_us: 5.0}
  inter: {gb_per_s: 25.0, latency_us: 5.0}
batch:
  samples: 12
"""
STEADY = "t_s,event,node\n" + "".join(f"0,add,n{k}\n" for k in range(6))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    head, tail = JOB.split("cluster:")
    path = tmp_path / "job.yaml"
    path.write_text(head + NODES + tail.partition("  samples: 4\n")[2])
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six nodes, of which one leaves in the middle of two minutes and one at their end."""
    path = tmp_path / "trace.csv"
    path.write_text(STEADY + "60,remove,n0\n120,remove,n1\n")
    return path


def planned(job: Path, **settings: int) -> ElasticTemplates:
    wanted = {"num_nodes": 6, "num_faults": 1} | settings
    return elastic_templates(load_job(job), CostModel(load_profile("H100")), **wanted)


def with_links(job: Path, inter: str) -> Path:
    """On nodes of four GPUs, in microbatches of two samples, which two GPUs can split."""
    path = job.with_name("linked.yaml")
    said = (
        job.read_text()
        .replace("ranks_per_node: 2", "ranks_per_node: 4")
        .replace("inter: {gb_per_s: 25.0, latency_us: 5.0}", inter)
    )
    path.write_text(said.replace("  samples: 12\n", "  samples: 12\n  microbatch_samples: 2\n"))
    return path


def test_the_samples_of_a_microbatch_are_those_that_fit_beside_the_state_of_a_stage(job):
    found = planned(job)
    memory_bytes = found.job.cluster.nodes[0].memory_bytes
    for template in found.planned.templates:
        capacity = found.microbatch_capacity(template)
        for index, stage in enumerate(template.stages):
            layers = found.layers[stage.first : stage.end]
            held = found.chain.chain.stage_bytes(stage.first, stage.end, stage.num_gpus)
            passes = len(template.stages) - index
            for samples, fits in ((capacity[index], True), (capacity[index] + 1, False)):
                kept = passes * sum(layer.kept_bytes for layer in layers) * samples
                working = max(layer.working_bytes for layer in layers) * samples
                size = found.job.microbatch_samples
                assert (held * size + kept + working <= memory_bytes * size) is fits
    assert answered("templates", job)["microbatch_capacity"] == {
        str(template.num_nodes): list(found.microbatch_capacity(template))
        for template in found.planned.templates
    }


def test_a_template_spans_all_modules_and_every_layer_has_one_place(job):
    found = planned(job)
    names = [name for name, _ in found.chain.owners]
    assert list(dict.fromkeys(names)) == ["vision", "audio", "llm"]
    for template in found.planned.templates:
        runs = [run for stage in template.stages for run in found.chain.runs_of(stage)]
        assert sum(end - first for _, first, end in runs) == len(names) == template.num_layers


def test_throughput_is_the_slowest_pipeline_and_the_sum_of_gradients(job):
    found = planned(job)
    for nodes in range(2, 7):
        slowest_s = found.at(nodes).iteration_s
        assert 12 / found.samples_per_s(nodes) > slowest_s  # projectors are trained: their sum is in it
        assert found.samples_per_s(nodes) >= found.grid_samples_per_s(nodes) * (1 - 1e-9)
    assert found.grid_samples_per_s(0) == 0


@pytest.mark.parametrize("sharing", [1, 2])
def test_gradients_are_summed_over_the_cards_between_the_pipelines(job, sharing):
    """One node of each pipeline is in a sum, with the cards of the GPUs of one stage."""
    found = planned(with_links(job, "inter: {cards: 4, gb_per_s: 1.0e-5, latency_us: 0.0}"), sharing=sharing)
    for nodes in range(2, 7):
        pipelines = found.at(nodes)
        stages = [stage for size in pipelines.sizes for stage in found.planned.of_size(size).stages]
        trained = max(sum(layer.held.trained for layer in found.layers[s.first : s.end]) for s in stages)
        link = GroupLink(
            name="cards",
            bytes_per_s=sharing * 1e4,
            latency_s=0.0,
            near=found.job.cluster.intra,
            num_nodes=len(pipelines.sizes),
            members=sharing,
            rank_bytes_per_s=1e4,
            cards_bytes_per_s=sharing * 1e4,
            neighbour_bytes_per_s=1e4,
        )
        group = nccl.Group(len(pipelines.sizes) * sharing, link, link.near.bytes_per_s)
        expected_s = pipelines.iteration_s + nccl.all_reduce_s(trained * 4, group)
        assert 12 / found.samples_per_s(nodes) == pytest.approx(expected_s, rel=1e-4)


def test_gradients_take_as_long_as_in_the_plan_of_the_templates(job):
    """Which has a sum for each layer's, over the links between its ranks; latencies are short beside them."""
    found = planned(with_links(job, "inter: {cards: 4, gb_per_s: 1.0e-5, latency_us: 0.0}"))
    for nodes in (3, 6):
        lowered, _ = accept(plan_of_templates(found, nodes))
        prices, of_ranks = price(lowered, CostModel(load_profile("H100"))), Counter()
        for action in lowered.reductions:
            (rank,) = lowered.plan.stage[action.stage].flat_ranks
            of_ranks[rank] += prices.duration_s(action)
        expected_s = found.at(nodes).iteration_s + max(of_ranks.values())
        assert 12 / found.samples_per_s(nodes) == pytest.approx(expected_s, rel=1e-4)


def test_what_a_node_held_is_copied_over_all_its_cards(job):
    """A node of two GPUs and one stage each: over two cards as long as the fuller GPU's share takes."""
    one = planned(job)
    path = job.with_name("cards.yaml")
    path.write_text(job.read_text().replace("gb_per_s: 25.0", "cards: 2, gb_per_s: 25.0"))
    two = planned(path)
    stages = [
        sum(one.layer_bytes[stage.first : stage.end])
        for template in one.planned.templates
        for stage in template.stages
    ]
    nodes = [sum(pair) for pair in zip(stages[::2], stages[1::2], strict=True)]
    assert one.copy_s == pytest.approx(5e-6 + max(nodes) / 25e9)
    assert two.copy_s == pytest.approx(5e-6 + max(stages) / 25e9)
    assert max(stages) < max(nodes)


@pytest.mark.parametrize("wide", [None, Precision.FLOAT32, Precision.BFLOAT16])
def test_a_checkpoint_holds_what_the_optimizer_works_in(job, wide):
    given = load_job(job)
    settings = replace(given.settings, precision=Precision.BFLOAT16, optimizer_precision=wide)
    given = replace(given, settings=settings)
    found = elastic_templates(given, CostModel(load_profile("H100")), num_nodes=6, num_faults=1)
    of_trained = {None: 14, Precision.FLOAT32: 14, Precision.BFLOAT16: 6}[wide]
    held = [layer.held for layer in found.layers]
    assert sum(each.trained for each in held) < sum(each.weights for each in held)
    expected = sum(2 * each.weights + (of_trained - 2) * each.trained for each in held)
    assert found.checkpoint_bytes == expected


def test_a_module_of_smaller_tp_is_copied_to_the_gpus_that_hold_it(job):
    """Nodes are stages of two GPUs: an encoder's layer is cut and held by both, others are on the first."""
    path = job.with_name("cut.yaml")
    path.write_text(job.read_text().replace("vision: {pp: 1}", "vision: {tp: 2}"))
    found = planned(path)
    gpus_of = [2 if module == "vision" else 1 for module, _ in found.chain.owners]
    nodes = [
        sum(found.layer_bytes[layer] * gpus_of[layer] for layer in range(stage.first, stage.end))
        for template in found.planned.templates
        for stage in template.stages
    ]
    assert set(gpus_of) == {1, 2}
    assert found.copy_s == pytest.approx(5e-6 + max(nodes) / 25e9)


def test_a_checkpoint_does_not_depend_on_tensor_parallelism(job):
    """Two ranks that cut the encoder's layers each have its norms, and a module of tp 1 is on one of them."""
    path = job.with_name("cut.yaml")
    path.write_text(job.read_text().replace("vision: {pp: 1}", "vision: {tp: 2}"))
    whole, cut = planned(job), planned(path)
    assert cut.planned.templates[0].stages[0].num_gpus == 2
    assert cut.checkpoint_bytes == whole.checkpoint_bytes


def test_templates_says_what_each_number_of_nodes_does(job):
    said = answered("templates", job)
    found = planned(job)
    assert said["threshold"] == 2
    assert {int(count) for count in said["samples_per_s"]} == {2, 3, 4, 5, 6}
    assert said["samples_per_s"]["5"] == pytest.approx(found.samples_per_s(5))
    assert "training needs at least 2 nodes: 2 pipelines" in workbench("templates", job).stdout


def test_failures_counts_training_on_a_trace_to_the_sample(job, trace):
    found = planned(job)
    said = answered("failures", job, "--trace", trace, "--dollars-per-node-hour", 3)["systems"]["templates"]
    recover_s = 2.0 + found.copy_s
    expected = 60 * found.samples_per_s(6) + (60 - recover_s) * found.samples_per_s(5)
    assert said["window_s"] == 120
    assert said["samples"] == pytest.approx(expected, rel=1e-3)  # the step that was cut off is lost
    assert said["recovery"] == pytest.approx(recover_s / 120)
    assert said["dollars_per_sample"] == pytest.approx((6 + 5) / 60 * 3 / said["samples"])


def test_failures_takes_the_price_of_the_job_unless_another_is_given(job, trace):
    priced = job.with_name("priced.yaml")
    priced.write_text(
        job.read_text().replace("  ranks_per_node: 2\n", "  ranks_per_node: 2\n  dollars_per_gpu_hour: 1.5\n")
    )

    def of(path: Path, *options: object) -> float:
        said = answered("failures", path, "--trace", trace, *options)["systems"]["templates"]
        return said["dollars_per_sample"]

    assert of(priced) == of(job, "--dollars-per-node-hour", 3)
    assert of(priced, "--dollars-per-node-hour", 1) == of(job, "--dollars-per-node-hour", 1)


def test_a_job_that_restarts_gets_less_of_a_stormy_trace(job):
    rates = ("--leaves-per-node-hour", 20, "--joins-per-missing-hour", 200)
    said = answered("failures", job, *rates, "--hours", 0.05, "--restart-s", 5)
    templates, restarts = said["systems"]["templates"], said["systems"]["restarts"]
    assert templates["recoveries"] > 3
    assert templates["samples"] > restarts["samples"] > 0


def test_templates_of_unlike_nodes_name_the_pool_that_takes_all_modules() -> None:
    job = load_job("examples/pools.yaml")
    cost = cost_of(job, None, None)
    with pytest.raises(ValueError, match=r"nearest: a job of pool 'faster' alone, 2 nodes$"):
        elastic_templates(job, cost, num_nodes=4, num_faults=1)
    with pytest.raises(ValueError, match=r"nearest: a job of 2 nodes of \d+ ranks alone$"):
        elastic_templates(replace(job, pools=()), cost, num_nodes=4, num_faults=1)


def test_a_rate_of_losses_has_two_spellings(job):
    """Five nodes that each leave 20 times an hour lose one every 36 s."""
    assert Rates.of_losses(36.0, 5) == Rates(leaves_per_node_h=20.0)
    assert Rates(leaves_per_node_h=20.0).mtbf_s(5) == 36.0
    others = ("--nodes", 5, "--joins-per-missing-hour", 200, "--hours", 0.05)
    by_node = answered("failures", job, "--leaves-per-node-hour", 20, *others)
    assert by_node == answered("failures", job, "--mtbf", "36s", *others)


@pytest.mark.parametrize("mtbf", ["20h", "100000d"])  # some losses in a day, and none
def test_a_drawn_trace_is_a_day_and_does_not_end_at_its_last_loss(job, mtbf):
    rates = ("--mtbf", mtbf, "--joins-per-missing-hour", 0.5)
    assert answered("failures", job, *rates) == answered("failures", job, *rates, "--hours", 24)


def test_failures_shows_a_line_for_each_system(job, trace):
    shown = workbench("failures", job, "--trace", trace).stdout
    assert "small on trace.csv, 0.03333 h" in shown
    seconds = planned(job).checkpoint_bytes / 2e9
    again = workbench(
        "failures", job, "--trace", trace, "--storage-gb-per-s", 2, "--checkpoint-every", 7
    ).stdout
    assert f"stops every 7 steps for {seconds:.3g} s" in again
    assert "written at 2 GB/s" in again
    assert [
        line.split()[0] for line in shown.splitlines() if line.startswith((" templates", " restarts"))
    ] == [
        "templates",
        "restarts",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("templates", "--faults", 6), "faults 6 wants 7 pipelines; want faults 5, or 7 nodes"),
        (("templates", "--nodes", 0), "want 1 node or more, got 0"),
        (("failures",), "want one of --trace, --mtbf and --leaves-per-node-hour"),
        (("failures", "--leaves-per-node-hour", 1, "--hours", 0), "--hours must be > 0, got 0.0"),
        (("failures", "--leaves-per-node-hour", -1), "rates must be >= 0"),
        (("failures", "--leaves-per-node-hour", 1, "--storage-gb-per-s", 0), "storage of > 0 GB/s"),
        (("failures", "--leaves-per-node-hour", 1, "--checkpoint-every", 0), "checkpoint every 1 iteration"),
        (("failures", "--leaves-per-node-hour", 1, "--dollars-per-node-hour", -1), "must be >= 0, got -1.0"),
    ],
)
def test_bad_options_are_one_line(job, arguments, message):
    result = workbench(arguments[0], job, *arguments[1:])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STEADY + "60,remove,n9\n", "node 'n9' is removed at 60.0 s but is not there"),
        ("t_s,event,node\n60,remove,n9\n", "want an add event before, for initial nodes 0,add,n9"),
        ("time,event,node\n0,add,n1\n", "line 1: want the columns t_s, event, node"),
        ("t_s,event,node\n", "no node joins"),
    ],
)
def test_bad_traces_are_one_line(job, tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    result = workbench("failures", job, "--trace", path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("", "none joined, {n} at the end"),
        ("60,remove,n1\n70,add,n1\n80,remove,n1\n", "2 left, 1 joined, {less} at the end"),
        ("60,remove,n1\n7200,add,n1\n", "1 left, none joined, {less} at the end"),
    ],
)
def test_changes_of_nodes_in_the_window_are_counted(job, tmp_path, changes, said):
    path = tmp_path / "nodes.csv"
    path.write_text(STEADY + changes)
    initial = STEADY.count("0,add,")
    done = workbench("failures", job, "--trace", path, "--hours", 1)
    assert f"nodes: {initial} at first" in done.stdout
    assert said.format(n=initial, less=initial - 1) in done.stdout


def test_what_templates_cannot_be_made_of_is_named(job):
    text = job.read_text()
    job.write_text(text.replace("llm: {pp: 2}", "llm: {cp: 2}"))
    with pytest.raises(ValueError, match="'llm' has cp 2, ep 1; want 1"):
        planned(job)
    job.write_text(text.replace("  samples: 12", "  samples: 12\n  microbatch_samples: 12"))
    with pytest.raises(ValueError, match="1 microbatches"):
        planned(job).at(4)
    job.write_text(
        text.replace("vision: {pp: 1}", "vision: {tp: 2}").replace("ranks_per_node: 2", "ranks_per_node: 1")
    )
    with pytest.raises(ValueError, match=r"stages of .2,. GPUs do not fit into nodes of 1"):
        planned(job)
