"""Experiments on Oobleck's tables and figures."""

import json
import math
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench import planner
from experiments.cornstarch.models import icml_model
from experiments.harness.drawing import save
from experiments.harness.outcome import Verdict
from experiments.harness.printed import is_true, printed_rows
from experiments.harness.record import RESULTS, results_in
from experiments.oobleck import donors, figure2_2, figure2_11, runs, spot, systems, table2_1, table2_2
from experiments.oobleck.by_nodes import PLANNED, seconds_of, simulated_rate
from experiments.oobleck.figure2_11 import COLOURS, FIGURES, bars_by_model, drawings
from experiments.oobleck.modelled import (
    bamboo_stages,
    bamboo_useful_share,
    kept_bytes,
    layer_s,
    oobleck_rates,
    pipeline_s,
    stored,
)
from experiments.oobleck.published_rules import restated_average
from experiments.oobleck.table2_1 import bamboo_kept_bytes, block_bytes_per_token
from sim.failures.simulate import simulate_failures
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.model_chain import chain_order, model_chain
from workbench.plan.plan import Recompute


@pytest.fixture(scope="module")
def averages():
    return table2_2.run()


def test_oobleck_averages_lie_within_three_percent(averages):
    rows = [row for row in averages.rows if row.number.key.endswith("/oobleck")]
    assert len(rows) == 15
    assert all(row.verdict is Verdict.OK for row in rows)


def test_no_average_lies_outside_what_is_unstated(averages):
    assert averages.count(Verdict.OFF) == 0
    assert averages.count(Verdict.MISSING) == 0
    ours = [row for row in averages.rows if row.number.key.startswith("published/")]
    assert sum(row.verdict is Verdict.OK for row in ours if row.number.key.endswith("/varuna")) >= 9


def test_the_published_rules_give_the_printed_averages(averages):
    rows = [row for row in averages.rows if row.number.key.startswith("restated/")]
    assert len(rows) == 21
    assert all(row.verdict is Verdict.OK for row in rows)
    assert restated_average("varuna", "GPT-3 6.7b", systems.spot_trace("spot_ec2_p3_scaled30")) == 0
    with pytest.raises(ValueError, match="no restated rules for 'oobleck'"):
        restated_average("oobleck", "GPT-2", systems.trace("failures_6h"))


def test_claims_of_the_text_hold(averages):
    assert all(claim.holds for claim in averages.claims)
    assert all(claim.holds for claim in figure2_11.run().claims)


def test_no_lost_node_copies_more_than_the_best_donor_makes_necessary():
    found = list(islice(donors.failures(), donors.DRAWS))
    assert all(0 < each.ours <= each.best_donor <= each.last_of_largest for each in found)
    assert any(each.best_donor < each.last_of_largest for each in found)


@pytest.mark.parametrize("system", ["bamboo", "varuna", "oobleck"])
def test_fractions_of_time_sum_up_to_one(system):
    assert sum(runs.breakdown(runs.controlled(system, "BERT-Large", "10m")).values()) == pytest.approx(1)


def test_as_many_nodes_may_fail_at_once_as_figure_2_2_says():
    found = figure2_2.run()
    assert [(row.ours, row.verdict) for row in found.rows] == [(2, Verdict.OK), (8, Verdict.OK)]
    assert all(claim.holds for claim in found.claims)


def test_memory_predicts_which_cells_run():
    cells = [(is_true(row["runnable"]), table2_1.cell(row)[1]) for row in printed_rows("oobleck_table2_1")]
    assert len(cells) == 15
    assert all(printed is ours for printed, ours in cells)


def test_spot_traces_are_those_of_the_text():
    assert systems.spot_trace("spot_ec2_p3_scaled30").mean_between_leaves_s / 60 == pytest.approx(
        7.7, rel=0.01
    )
    assert systems.spot_trace("spot_gcp_scaled30").mean_between_leaves_s / 60 == pytest.approx(10.3, rel=0.01)
    real = systems.spot_trace("spot_gcp_a100_scaled30")
    assert {count for _, count in real.num_nodes()[1:]} <= set(range(15, 31))


def test_bins_hold_all_samples():
    run = runs.on_spot("oobleck", "BERT-Large", "spot_gcp_scaled30", 30.0)
    lengths_s = spot.bin_lengths_s(run.window_s)
    samples = [rate * lasts_s for rate, lasts_s in zip(spot.in_bins(run), lengths_s, strict=True)]
    assert sum(samples) == pytest.approx(run.samples)
    assert sum(lengths_s) == pytest.approx(run.window_s)
    assert 0 < lengths_s[-1] < spot.BIN_S


def test_plots_are_drawn_from_the_series_alone(tmp_path):
    with results_in(tmp_path):
        path = spot.write_series("oobleck/some", ("GPT-2",))
    assert set(json.loads(path.read_text())["series"]["GPT-2"]) == set(spot.TRACES)
    assert all(path.stat().st_size > 0 for path in save(spot.drawing(path), tmp_path, "some"))


def test_spares_keep_a_job_running_until_they_are_used_up():
    run = simulate_failures(systems.with_spares("BERT-Large", 24), systems.trace("failures_1h"))
    rates = {round(each.samples / (each.end_s - each.start_s), 3) for each in run.iterations if each.samples}
    assert rates == {round(systems.published_rates("varuna", "BERT-Large")[24], 3)}
    assert run.iterations[-1].end_s < 8 * 3600


def test_bamboo_cannot_run_what_is_not_published():
    with pytest.raises(ValueError, match=r"bamboo cannot run GPT-3 6\.7b"):
        systems.bamboo("GPT-3 6.7b")


def test_bench_has_every_cell_of_the_table(monkeypatch):
    assert [cell[:3] for cell in planner.grid()[-2:]] == [(96, 24, 8), (256, 64, 8)]
    assert len(planner.grid()) == 37
    cells = [planner.measure(24, 8, gpus, 0.28, limit_s=30.0) for gpus in (1, 4)]
    result = planner.as_json(cells)
    assert result["never_worse_than_divide_and_conquer"] is True
    assert set(result["grid"]["24"]["8"]) == {"1", "4"}
    assert {"ours_s", "paper_s"} <= result["grid"]["24"]["8"]["4"].keys()


def test_replanning_takes_a_fraction_of_a_second():
    assert planner.replan_s() < 1.0


def test_templates_span_all_modules_of_a_dag():
    model = icml_model("SSS")
    found = model_chain(model, (1, 2), lambda *_: 1.0, lambda *_: 1, 1e9)
    assert found.owners == chain_order(model)
    assert len(found.owners) == sum(len(module.layers) for module in model.modules)
    template = exact_templates(found.chain, 2, (2,))[2]
    covered = [
        (name, layer)
        for stage in template.stages
        for name, first, end in found.runs_of(stage)
        for layer in range(first, end)
    ]
    assert tuple(covered) == found.owners
    assert pipeline_s(model, found, template, 4) > 0


def test_the_breakdown_is_drawn_from_its_result_and_every_bar_is_whole(tmp_path):
    ours = json.loads((RESULTS / "oobleck_figure2_11.json").read_text())["ours"]
    models = bars_by_model(ours, FIGURES["figure2_11"])
    assert list(models) == ["BERT-Large", "GPT-3-6.7b"]
    for bars in models.values():
        for parts in bars.values():
            assert sum(parts.values()) == pytest.approx(1, abs=1e-4)
            assert parts.keys() == COLOURS.keys()
    assert bars_by_model(ours, ("varuna",))["BERT-Large"].keys() == {
        "6h\nvaruna",
        "10m\nvaruna",
    }
    grids = drawings(ours)
    assert list(grids) == ["oobleck_figure2_1", "oobleck_figure2_11"]
    for name, grid in grids.items():
        assert all(path.stat().st_size > 0 for path in save(grid, tmp_path, name))


def test_seconds_of_a_sample_are_split_without_rest():
    found = seconds_of("GPT-2", oobleck_rates("GPT-2")[30])
    parts = found.parts()
    names = (
        "layers_with_fused_attention",
        "stored_scores",
        "spelled_out_operators",
        "idle",
        "unexplained",
    )
    assert sum(parts[name] for name in names) == pytest.approx(parts["published"])
    assert 0 < parts["products_at_tf32_peak"] < parts["layers_with_fused_attention"]
    assert parts["stored_scores"] > parts["layers_with_fused_attention"]  # what the gap was
    assert abs(parts["unexplained"]) < 0.25 * parts["published"]
    assert "12.1 TFLOP/s a GPU" in found.line("GPT-2")


def test_simulated_throughput_is_that_of_the_formula_for_every_system():
    for system, rates in PLANNED.items():
        assert simulated_rate(system, "BERT-Large", 15) == pytest.approx(rates("BERT-Large")[15], rel=0.01)
    with pytest.raises(ValueError, match="want one of oobleck, varuna, bamboo"):
        simulated_rate("restart", "GPT-2", 16)


def test_a_bamboo_stage_runs_its_own_passes_and_its_successors_forward():
    stages = bamboo_stages("GPT-2")
    times = layer_s("GPT-2", 1, Recompute.NONE, stored("GPT-2"))
    forward_s = sum(time.forward_s for time in times)
    assert sum(stage.forward_s for stage in stages) == pytest.approx(2 * forward_s)
    assert sum(stage.backward_s for stage in stages) == pytest.approx(sum(t.backward_s for t in times))
    whole_s = sum(time.total_s for time in times)
    assert bamboo_useful_share("GPT-2") == pytest.approx(whole_s / (whole_s + forward_s))


# Shape suffixes: B = samples, T = tokens, D = width, H = heads, K = width of a head.
WIDTH, HEADS, TOKENS, SAMPLES, RATE = 64, 4, 48, 3, 0.1
CPU_MASK_BYTES = 4  # a mask is a tensor of floats on the CPU, of single bytes on a GPU


def spelled_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    mean, deviation = x_BTD.mean(-1, keepdim=True), x_BTD.std(-1, keepdim=True)
    return weight_D * (x_BTD - mean) / (deviation + 1e-6) + bias_D


class Block(nn.Module):
    """Pre-norm: one attention or two, the second over another sequence, then a ReLU network."""

    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(WIDTH) * value) for _ in range(attentions + 1) for value in (1, 0)
        )
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 * attentions))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attentions = attentions

    def attend(self, place: int, x_BTD: Tensor, other_BTD: Tensor) -> Tensor:
        q_layer, k_layer, v_layer, out = self.projections[4 * place : 4 * place + 4]
        q_BHTK, k_BHTK, v_BHTK = (
            layer(given).view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2)
            for layer, given in ((q_layer, x_BTD), (k_layer, other_BTD), (v_layer, other_BTD))
        )
        scores = torch.matmul(q_BHTK, k_BHTK.transpose(-2, -1)) / math.sqrt(WIDTH // HEADS)
        weights = functional.dropout(functional.softmax(scores, dim=-1), RATE)
        mixed_BTD = torch.matmul(weights, v_BHTK).transpose(1, 2).contiguous().view(SAMPLES, TOKENS, WIDTH)
        return out(mixed_BTD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        other_BTD = torch.sqrt(1 - x_BTD) if self.attentions == 2 else None
        for index in range(self.attentions):
            y_BTD = spelled_norm(x_BTD, self.norms[2 * index], self.norms[2 * index + 1])
            read_BTD = y_BTD if other_BTD is None or index == 0 else other_BTD
            x_BTD = x_BTD + functional.dropout(self.attend(index, y_BTD, read_BTD), RATE)
        y_BTD = spelled_norm(x_BTD, self.norms[-2], self.norms[-1])
        hidden = functional.dropout(functional.relu(self.up(y_BTD)), RATE)
        return x_BTD + functional.dropout(self.down(hidden), RATE)


@pytest.mark.parametrize("attentions", [1, 2])
def test_a_block_keeps_what_autograd_keeps(attentions):
    block = Block(attentions)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        wide = tensor.shape[-1:] != (1,)  # single numbers per token: a norm's mean and deviation
        if storage.data_ptr() not in own and wide and tensor.dim() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x_BTD = (torch.rand(SAMPLES, TOKENS, WIDTH) * 0.5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_BTD = block(x_BTD)
    out_BTD.sum().backward()
    each = block_bytes_per_token(WIDTH, HEADS, TOKENS, attentions, CPU_MASK_BYTES)
    assert sum(kept.values()) == SAMPLES * TOKENS * each


def test_bamboo_keeps_more_than_fused_kernels_and_in_proportion_to_samples():
    for model in ("BERT-Large", "GPT-2"):
        ours, fused = bamboo_kept_bytes(model, 2), kept_bytes(model, 2)
        assert all(mine >= theirs for mine, theirs in zip(ours, fused, strict=True))
        assert ours[1] == 2 * bamboo_kept_bytes(model, 1)[1]
