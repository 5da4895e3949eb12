"""The authors' attention backward as their stage times have it: one rate for each width of a head.

With the implied stages our LLM forwards are near the printed ones, and our backwards, two forwards, far
below. What they lack is in proportion to the attention of a layer, 5.4 times as much for heads of 128 as for
heads of 64 over the same width: what a kernel does that spills registers. The rates are fitted on one printed
backward for each width; all others follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.cornstarch.attention_layers import attention_of
from experiments.cornstarch.frozen_rows import FrozenRow
from experiments.cornstarch.modelled import Setting, layer_times, total
from experiments.cornstarch.modelled_tables import ModelledTable
from experiments.cornstarch.models import llm_family
from workbench.cost.execution import Execution, HeadRate
from workbench.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class Published:
    """The fitted execution, and the rows that it was fitted on."""

    execution: Execution
    fitted_on: tuple[FrozenRow, ...]


def published_kernel(table: ModelledTable, rows: Sequence[FrozenRow], cost: CostModel) -> Published:
    """Rates that give the printed LLM backward of each of `rows`, which have heads of different widths."""
    rates = tuple(HeadRate(head_dim=head_dim(row), rate=_rate(table, row, cost)) for row in rows)
    return Published(Execution(attention_backward_rates=rates), tuple(rows))


def head_dim(row: FrozenRow) -> int:
    """Of the row's LLM."""
    return attention_of(llm_family()[row.llm_size]()).head_dim


def _rate(table: ModelledTable, row: FrozenRow, cost: CostModel) -> float:
    """The backward is a constant plus a share over the rate, so two rates say which gives the printed one."""
    setting = table.guesses_of(row)[0].setting
    whole_s, half_s = (_backward_s(table, row, setting, rate, cost) for rate in (1.0, 0.5))
    attention_s = half_s - whole_s
    printed_s = row.llm.backward_s * table.pipelines[row].llm_stages
    return attention_s / (printed_s - whole_s + attention_s)


def _backward_s(
    table: ModelledTable, row: FrozenRow, setting: Setting, rate: float, cost: CostModel
) -> float:
    """Of the whole LLM over one microbatch."""
    model = table.model_of(row)
    run = Execution(attention_backward_rates=(HeadRate(head_dim=head_dim(row), rate=rate),))
    (llm,) = (module.name for module in model.modules if module.name == "llm")
    return total(layer_times(model, setting, CostModel(cost.profile, run))[llm]).backward_s
