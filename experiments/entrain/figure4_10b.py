"""Figure 4.10b: LLM work of both microbatches of a pair after deferral, for every pair of the worked example.

Paper:   I. Jang, dissertation, section 4.5.2, Figure 4.10b.
Setup:   six microbatches of 3, 4, 8, 6, 6 and 9 units of LLM work; MB3, MB4 and MB6 are overloaded.
Given:   the loads before deferral, which `experiments.entrain.figures4_9_11` derives from the figure.
Differs: samples inside a microbatch are not printed: shown are those of `figures4_9_11`, the range covers all
         ways to cut the overloaded microbatch's load into samples. Of two subsets equally near to half the
         difference ours moves the smaller one, so MB3 and MB5 stay at 8 and 6 where the paper prints 6 and 8;
         which of them moves is not stated either, so the range has both.
         The samples shown lower the heavier of MB6 and MB5 from 9 to 8, which the paper leaves at 9; MB6 as
         samples of 6 and 3 gives 9 there, and the heavier of its other pairs as printed.
Ours:    `workbench.balance.microbatches.deferral`, at once.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

from experiments.entrain.figures4_9_11 import LLM_UNITS
from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, script
from experiments.harness.table import Cell, Table, Values
from workbench.balance.microbatches.deferral import pairwise_deferral

Samples = tuple[int, ...]  # units of each
CSV = "entrain_figure4_10b"
CELLS = {"row": "row_llm_workload_after_units", "col": "col_llm_workload_after_units"}


def samples_of(name: str) -> Samples:
    """Units of the samples of a microbatch of the example, such as MB3."""
    return LLM_UNITS[int(name.removeprefix("MB")) - 1]


def pair_of(row: PrintedRow) -> tuple[Samples, Samples]:
    """The overloaded and the other microbatch."""
    return samples_of(row["row_microbatch"]), samples_of(row["col_microbatch"])


def loads_after(overloaded: Samples, other: Samples) -> tuple[int, int]:
    """Units of both microbatches after the deferral that balances the pair best."""
    units = (*overloaded, *other)
    numbers = range(len(units))
    microbatches = (tuple(numbers[: len(overloaded)]), tuple(numbers[len(overloaded) :]))
    deferral = pairwise_deferral(microbatches, units)
    after = dict(zip(deferral.order, deferral.llm_microbatches(microbatches), strict=True))
    first, second = (sum(units[sample] for sample in after[index]) for index in (0, 1))
    return first, second


def loads_after_larger(overloaded: Samples, other: Samples) -> tuple[int, int]:
    """As `loads_after`, but of two subsets equally near to half the difference the larger one moves."""
    before, after = sum(overloaded), sum(other)
    subsets = (units for count in range(len(overloaded) + 1) for units in combinations(overloaded, count))
    moved = min(map(sum, subsets), key=lambda units: (abs(2 * units - (before - after)), -units))
    return before - moved, after + moved


def cuts(load: int) -> Iterator[Samples]:
    """All ways to cut a load into samples of whole units, whatever their order; 2 ** (load - 1) of them."""
    for inner in range(2 ** (load - 1)):
        bounds = [0, *(at for at in range(1, load) if inner >> (at - 1) & 1), load]
        samples = tuple(end - start for start, end in pairwise(bounds))
        if list(samples) == sorted(samples, reverse=True):
            yield samples


def ours(row: PrintedRow) -> Values:
    """Loads with the example's samples first, then with every other cut of the overloaded microbatch."""
    overloaded, other = pair_of(row)
    loads_of = {"the samples shown": loads_after(overloaded, other)}
    for samples in cuts(sum(overloaded)):
        name = f"samples of {', '.join(map(str, samples))}"
        loads_of[name] = loads_after(samples, other)
        loads_of[f"{name}, the larger of equal subsets"] = loads_after_larger(samples, other)
    return {
        cell: {name: loads[index] for name, loads in loads_of.items()} for index, cell in enumerate(CELLS)
    }


def explains(samples: Samples, name: str) -> bool:
    """Whether a cut of a microbatch reproduces the printed heavier load in all its pairs."""
    rows = [row for row in printed_rows(CSV) if row["row_microbatch"] == name]
    return all(
        max(loads_after(samples, samples_of(row["col_microbatch"])))
        == max(int(row[column]) for column in CELLS.values())
        for row in rows
    )


@script()
def run() -> Parts:
    table = Table(
        csv=CSV,
        where="Figure 4.10b",
        key=lambda row: f"modelled/{row['row_microbatch']}+{row['col_microbatch']}/",
        cells={name: Cell(column=column, unit="units", rel_tol=0.0) for name, column in CELLS.items()},
        compute=ours,
        unstated="samples of the overloaded microbatch, which of two equal subsets moves",
    )
    evidence = table.evidence()
    for name in dict.fromkeys(row["row_microbatch"] for row in printed_rows(CSV)):
        load = sum(samples_of(name))
        explaining = [samples for samples in cuts(load) if explains(samples, name)]
        text = (
            f"{name}: the heavier of each pair is as printed for {len(explaining)} of {len(list(cuts(load)))}"
        )
        evidence.claim(
            f"{text} ways to cut its {load} units into samples (want one at least):", bool(explaining)
        )
    return [evidence]
