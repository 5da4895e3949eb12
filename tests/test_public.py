"""Published rows: what is read, how numbers are fitted, and how errors are counted."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.public import korthikanti, vtrain
from experiments.public.fitted import Free, execution_of, fitted, ready, times_s
from experiments.public.korthikanti import MODES, continued_s, predictions, printed, rows
from experiments.public.vtrain import vtrain_rows, with_vtrain_all_reduce
from sim.predict import iteration_s
from workbench.cost.collectives import Collective, Collectives
from workbench.cost.execution import Execution
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import read_row
from workbench.llm_table.predict import RowPredictor

EXECUTION = Execution(matmul_rate=0.8, kernel_gap_s=2e-5, host_kernel_s=7e-5, reduction_rate=1.5)


def test_the_fit_sees_what_the_command_predicts():
    """On a random sample of the rows, to the last bit."""
    found, _ = vtrain_rows()
    sample = [found[i] for i in np.random.default_rng(1).choice(len(found), 12, replace=False)]
    profile = with_vtrain_all_reduce(load_profile("A100-80GB"))
    plain = RowPredictor(iteration_s, profile=profile)
    said = RowPredictor(iteration_s, profile=profile, execution=EXECUTION)
    fast = times_s(ready(sample, plain), plain, EXECUTION)
    assert fast.tolist() == [said.predict(row).iteration_s for row in sample]


def test_a_fit_finds_the_numbers_that_made_the_times():
    found, _ = vtrain_rows()
    sample = [found[i] for i in np.random.default_rng(2).choice(len(found), 10, replace=False)]
    predictor = RowPredictor(iteration_s)
    prepared = ready(sample, predictor)
    free = (Free("host_kernel_s", 3e-5, 1e-6, 1e-3), Free("matmul_rate", 1.0, 0.3, 1.5))
    true = execution_of(free, np.log([7e-5, 0.7]))
    again = fitted(prepared, times_s(prepared, predictor, true), predictor, free)
    assert again.host_kernel_s == pytest.approx(7e-5, rel=1e-3)
    assert again.matmul_rate == pytest.approx(0.7, rel=1e-3)


def test_the_split_is_a_fixed_tenth():
    kept, held = vtrain.split(1440)
    assert (len(kept), len(held)) == (144, 1296)
    assert sorted([*kept, *held]) == list(range(1440))
    assert kept.tolist() == vtrain.split(1440)[0].tolist()
    assert len(vtrain.FREE) <= 20


def test_rows_are_those_of_the_source():
    found, seconds = vtrain_rows()
    assert len(found) == len(seconds) == 1440
    assert {row.num_gpus for row in found} == {2, 4, 8}
    assert {row.padded_vocab for row in found} == {50257, 50256}
    assert all(row.num_microbatches >= 2 for row in found)
    assert vtrain.nonlinearity_s(found, np.array(seconds)) < 1e-12


def test_all_reduces_are_read_from_the_source():
    profile = with_vtrain_all_reduce(load_profile("A100-80GB"))
    link = profile.machine_link("intra").link
    found = Collectives(profile).seconds(Collective.ALL_REDUCE, 2**20, 2, link)
    assert found == pytest.approx(44.21e-6, rel=1e-9)  # first row of the file


def test_errors_are_counted_as_said():
    counted = vtrain.errors("x", np.array([1.1, 0.8, 3.0]), np.array([1.0, 1.0, 3.0]))
    assert counted["x/mape"] == pytest.approx(0.1)
    assert counted["x/median"] == pytest.approx(0.1)
    assert counted["x/worst"] == pytest.approx(0.2)
    assert counted["x/bias"] == pytest.approx(-0.1 / 3)
    ranked = vtrain.errors("x", np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 7.0]))
    assert ranked["x/kendall"] == ranked["x/spearman"] == 1.0


@pytest.mark.parametrize("virtual", [1, 2])
def test_iterations_go_on_by_steady_rounds(virtual):
    cells = {"hidden": 512, "layers": 8, "heads": 8, "sequence": 512, "pp": 4, "virtual_stages": virtual}

    def seconds(global_batch: int) -> float:
        row = read_row({k: str(v) for k, v in (cells | {"global_batch": global_batch}).items()})
        return RowPredictor(iteration_s).predict(row).iteration_s

    assert continued_s(seconds(4), seconds(8), 8) == pytest.approx(seconds(32), rel=2e-3)


def test_every_printed_number_has_one_of_ours():
    found = rows()
    assert list(found) == ["gpt3-175B", "megatron-1T", "megatron-22B", "turing-530B"]
    keys = [number.key for number in printed()]
    assert len(keys) == len(set(keys)) == 4 * (4 + 4 + 2)
    small = replace(found["megatron-22B"], hidden=1024, ffn=4096, heads=16, kv_heads=16, layers=8)
    each = predictions(small, RowPredictor(iteration_s))
    assert list(each) == list(MODES)
    assert each["seqsel"].activation_bytes < each["sel"].activation_bytes < each["none"].activation_bytes
    assert each["full"].iteration_s > each["sel"].iteration_s > each["none"].iteration_s
    assert korthikanti.SHAPES.keys() == found.keys()
