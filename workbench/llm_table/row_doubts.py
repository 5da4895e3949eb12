"""Unmeasured costs that matter for a row's prediction."""

from collections.abc import Iterable, Mapping

from workbench.float_sum import float_sum
from workbench.llm_table.llm_row import LlmRow, Number

SMALL = 0.05  # share of the time below which a cost's doubts are omitted
PARTS_OF = (
    ("inter link", ("in_layers", "data", "optimizer", "idle")),
    ("card_", ("in_layers", "data", "optimizer", "idle")),
    ("collectives", ("in_layers", "data", "optimizer")),
    ("experts", ("in_layers",)),
    ("moe_overlap", ("in_layers",)),
    ("gated delta rule", ("attention", "launches")),
    ("matmul", ("products", "launches")),
    ("product", ("products", "launches")),
    ("attention", ("attention", "launches")),
    ("memory-bound", ("memory_bound", "launches")),
    ("optimizer", ("optimizer",)),
    ("between ranks", ("data", "optimizer")),
)  # words of a doubt -> the parts of the time that it concerns; slower kernels would leave less to launches
ALWAYS = ("executor overhead",)  # applies to every plan on a GPU, so that it distinguishes no rows
OTHER_FORMATS = ("float32", "float64")
IN_NODES = ("inter link", "card_")


def relevant_doubts(doubts: Iterable[str], shares: Mapping[str, float], row: LlmRow) -> tuple[str, ...]:
    """The doubts about notable parts of the row's time, sorted and without duplicates.

    A doubt that another says with a reason is left to that one.
    """
    relevant = {each for each in doubts if _matters(each, shares, row)}
    return tuple(
        sorted(each for each in relevant if not any(other.startswith(f"{each}: ") for other in relevant))
    )


def _matters(doubt: str, shares: Mapping[str, float], row: LlmRow) -> bool:
    if doubt.startswith(ALWAYS) or (doubt.startswith(OTHER_FORMATS) and row.precision is not Number.FP32):
        return False
    if doubt.startswith(IN_NODES) and row.num_gpus <= row.gpus_per_nvlink_domain:
        return False
    for word, parts in PARTS_OF:
        if word in doubt:
            return float_sum(shares[part] for part in parts) >= SMALL
    return "presumed" not in doubt
