"""The pure parts of the study of distributed experts, and a fresh router's rows."""

import pytest
import torch

from experiments.bench.expert_parallel import DEGREES, busiest, routing


def test_the_busiest_rank_is_counted_over_neighbours() -> None:
    choices = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0]])  # experts 0 to 3: 4, 2, 1, 1 rows
    assert busiest(choices, 4, 4) == pytest.approx(4 / 2)
    assert busiest(choices, 4, 2) == pytest.approx(6 / 4)
    assert busiest(torch.full((3, 2), 3), 4, 2) == pytest.approx(2.0)


def test_rows_of_a_fresh_router_are_counted_and_assumed() -> None:
    found = routing()
    for ep in DEGREES:
        assert 1.0 <= found[f"busiest.ep{ep}.counted"] <= ep
        assert 1.0 < found[f"busiest.ep{ep}.assumed"] <= ep
