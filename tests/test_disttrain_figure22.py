"""Figure 22's pure parts: what is compared, and that its costs explain its gain."""

import pytest

from experiments.disttrain.figure22 import (
    BOUNDS,
    EACH_WAY,
    NOMINAL,
    PLAUSIBLE,
    TP_SIZES,
    Bench,
    block,
    llms,
)
from workbench.model.layer import Matmul

BENCH = Bench()


def test_settings_are_fixed_and_begin_with_the_nominal_one():
    assert PLAUSIBLE[0] == NOMINAL
    assert len(set(PLAUSIBLE)) == len(PLAUSIBLE) == 4 * 2 * 2
    assert EACH_WAY.bytes_per_s == 2 * NOMINAL.link.bytes_per_s


@pytest.mark.parametrize("llm", ["Llama3-7B", "Llama3-13B", "Llama3-70B"])
def test_blocks_have_the_weights_of_table_2(llm: str):
    assert llm in llms()
    sizes = {
        op.name: op.in_features * op.out_features for op in block(llm).operators if isinstance(op, Matmul)
    }
    assert len(sizes) == 4  # q, k and v together; gate and up together
    printed = {"Llama3-7B": 202e6, "Llama3-13B": 317e6, "Llama3-70B": 856e6}
    assert sum(sizes.values()) == pytest.approx(printed[llm], rel=0.01)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_without_its_own_costs_the_overlap_gains_more(tp: int):
    for llm in llms():
        modelled, no_remap, whole, both = (BENCH.bounded_gain(llm, tp, bound) for bound in BOUNDS)
        assert modelled == pytest.approx(BENCH.gain(llm, tp, NOMINAL), rel=1e-9)
        assert modelled < min(no_remap, whole) <= max(no_remap, whole) < both
