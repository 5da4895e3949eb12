"""Attention by tiles beside the table: where both can tell, and how far they are apart."""

import json

import pytest

from experiments.bench import tiled_attention as bench
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@pytest.mark.parametrize("device", bench.DEVICES)
def test_a_long_row_takes_what_the_table_says(device):
    """Tiles have their rate from it."""
    row = bench.beside(device, CostModel(load_profile(device)), 16384)
    assert row.forward == pytest.approx(1.0, abs=0.05)
    assert row.backward == pytest.approx(1.0, abs=0.05)


def test_the_command_prints_rows_and_the_last_line_has_the_keys(monkeypatch, capsys):
    monkeypatch.setattr(bench, "LENGTHS", (512, 1024))
    monkeypatch.setattr("sys.argv", ["tiled_attention", "--json"])
    assert bench.main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert len(record["rows"]) == 4
    assert record["A40_least"] <= record["A40_most"]
    assert sum(line.startswith(("A40", "H100")) for line in lines) >= 4
