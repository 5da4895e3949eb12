"""Published rows of other people's training runs, as tables and as rows of ours."""

import csv
from dataclasses import replace
from pathlib import Path

from workbench.cost.collectives import Collective
from workbench.cost.profile import CollectiveTable, Profile, Table
from workbench.llm_table.columns import read_row
from workbench.llm_table.llm_row import LlmRow

FOLDER = Path(__file__).parent.parent / "reference"
NS_PER_S = 1e9


def read(name: str) -> list[dict[str, str]]:
    """Rows of a reference file."""
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def vtrain_rows() -> tuple[list[LlmRow], list[float]]:
    """The single-node A100 rows and their seconds.

    What the file does not say is taken from the source's own model: GPT with 50,257 tokens, cut
    over tp without padding; scores stored; fp16; full recomputation, as its page says; untied tables would
    differ by one all-reduce.
    """
    cells = read("vtrain_a100_single_node.csv")
    rows = [
        read_row(
            {
                **cell,
                "vocab": str(50257 // int(cell["tp"]) * int(cell["tp"])),
                "vocab_multiple": "1",
                "attention": "stored",
                "precision": "fp16",
                "recompute": "full",
            }
        )
        for cell in cells
    ]
    return rows, [float(cell["iter_time_ms"]) / 1e3 for cell in cells]


def with_vtrain_all_reduce(profile: Profile) -> Profile:
    """The profile with the all-reduces that were measured on the rows' own node."""
    points = tuple(
        (float(c["n_gpus"]), float(c["bytes"]), float(c["bytes"]) / float(c["time_ns"]) * NS_PER_S)
        for c in read("vtrain_all_reduce_a100.csv")
    )
    table = Table(axes=("ranks", "bytes"), points=points, measured=True, source="vtrain_all_reduce_a100.csv")
    others = tuple(c for c in profile.collectives if c.collective != Collective.ALL_REDUCE)
    measured = CollectiveTable(collective=Collective.ALL_REDUCE.value, scope="intra", table=table)
    return replace(profile, collectives=(*others, measured))
