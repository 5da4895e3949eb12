"""Entrain's worked pipeline as text to review. `UPDATE_GOLDEN=1` writes the files anew."""

import os
from collections import Counter
from pathlib import Path

import pytest

from experiments.entrain.figures4_9_11 import deferred, samples, variants
from tests.schedule_grids import parse_timeline

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = dict(variants())


def path_of(name: str) -> Path:
    return GOLDEN / f"entrain_{name.replace(',', '').replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", VARIANTS)
def test_timeline_is_the_reviewed_one(name: str):
    path, ours = path_of(name), VARIANTS[name].text()
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(ours)
    assert ours == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_timeline_does_all_the_work(name: str):
    """18 units in the encoder at two ticks and 36 halves on each LLM stage, thrice with backwards."""
    slots = parse_timeline(path_of(name).read_text())
    busy = Counter({ranks: sum(s.end_tick - s.start_tick for s in of) for ranks, of in slots.items()})
    assert set(busy.values()) == {3 * 36}


def test_loads_are_those_that_the_printed_table_implies():
    microbatches, encoder, llm = samples()
    loads = [sum(llm[s] for s in held) for held in microbatches]
    assert loads == [3, 4, 8, 6, 6, 9]
    assert [sum(encoder[s] for s in held) for held in microbatches] == [3] * 6
    printed = {(3, 1): 11, (3, 2): 12, (3, 5): 14, (4, 1): 9, (4, 2): 10, (4, 5): 12}
    printed |= {(6, 1): 12, (6, 2): 13, (6, 5): 15}
    assert {pair: loads[pair[0] - 1] + loads[pair[1] - 1] for pair in printed} == printed
    assert [sum(llm[s] for s in held) for held in deferred().llm] == [6] * 6
