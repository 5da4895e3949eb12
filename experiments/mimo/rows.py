"""Rows of the paper's tables: both layouts and their printed step times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.harness.printed import PrintedRow, printed_rows
from experiments.mimo.models import LLM, VISION, Workload
from workbench.plan.plan import Recompute
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice

RECOMPUTED_FROM_B = 3.0  # billions of parameters from which the paper's encoders are computed again
THOUSAND = 1024
MS = 1e3


class Timed(StrEnum):
    """What a table measures, by the suffix of its columns."""

    STEP = "step_ms"
    FORWARD_BACKWARD = "fwd_bwd_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: layouts H and another, on their numbers of GPUs.

    Args:
        key: names the row.
        baseline, other: the workloads, equal but for the GPUs.
        baseline_layout, other_layout: as printed.
        timed: what the seconds are of.
        printed_s: seconds of both.
        printed_gb: peak memory of both.
    """

    key: str
    baseline: Workload
    other: Workload
    baseline_layout: LayoutChoice
    other_layout: LayoutChoice
    timed: Timed
    printed_s: tuple[float, float]
    printed_gb: tuple[float, float]

    @property
    def printed_gain(self) -> float:
        """The gain of the other's speed over the baseline's, by the printed step times."""
        return self.printed_s[0] / self.printed_s[1] - 1


def table_a2() -> list[Compared]:
    """C against H at 8K."""
    return _table("A2", "{model}/{vision_token_pct}", colocated, columns=("h_llm", "c"))


def table_a3() -> list[Compared]:
    """C against H at long contexts."""
    key = "{model}/{seq_len_k}K/{vision_token_pct}"
    return _table("A3", key, colocated, columns=("h", "c"), timed=Timed.FORWARD_BACKWARD)


def table_a4() -> list[Compared]:
    """NC against H with a 120B LLM."""
    key = "{model}/{seq_len_k}K/{vision_token_pct}/{h_n_gpus}"
    return _table("A4", key, apart, columns=("h", "nc"))


def tables() -> dict[str, Sequence[Compared]]:
    """The tables whose rows have two step times."""
    return {"A2": table_a2(), "A3": table_a3(), "A4": table_a4()}


def colocated(row: PrintedRow) -> LayoutChoice:
    """Layout C of a row of Tables A2 and A3, of which the latter has one optimizer instance."""
    encoder = encoder_of(row, "c_enc", instances=int(row.get("enc_opt_instances", "1")))
    return LayoutChoice(mode=Mode.COLOCATED, encoders=(encoder,), llm=llm_of(row, "c_llm"))


def apart(row: PrintedRow) -> LayoutChoice:
    """Layout NC of a row of Table A4."""
    return LayoutChoice(mode=Mode.APART, encoders=(encoder_of(row, "nc_enc"),), llm=llm_of(row, "nc_llm"))


def workload_of(row: PrintedRow, num_gpus: str) -> Workload:
    """The row's model and batch, by default at a context of 8K."""
    return Workload(
        encoder=f"{row['enc_params_b']}B",
        llm=f"{row['llm_params_b']}B",
        sequence_tokens=int(row.get("seq_len_k", "8")) * THOUSAND,
        vision_pct=float(row["vision_token_pct"]),
        num_gpus=int(num_gpus),
        num_samples=int(row["global_batch_samples"]),
    )


def encoder_of(row: PrintedRow, prefix: str, *, instances: int = 1) -> ModuleChoice:
    """The encoder's printed degrees; recomputed from 3B on."""
    again = float(row["enc_params_b"]) >= RECOMPUTED_FROM_B
    tp, cp, pp, dp = _degrees(row, prefix)
    recompute = Recompute.FULL if again else Recompute.NONE
    return ModuleChoice(module=VISION, tp=tp, cp=cp, pp=pp, dp=dp, recompute=recompute, instances=instances)


def llm_of(row: PrintedRow, prefix: str) -> ModuleChoice:
    """The LLM's printed degrees, without recomputation."""
    tp, cp, pp, dp = _degrees(row, prefix)
    return ModuleChoice(module=LLM, tp=tp, cp=cp, pp=pp, dp=dp)


def homogeneous(row: PrintedRow, prefix: str) -> LayoutChoice:
    """Layout H: the LLM's grid for all modules, the encoder on its first stage."""
    llm, encoder = llm_of(row, prefix), encoder_of(row, prefix)
    on_first = ModuleChoice(module=VISION, tp=llm.tp, cp=llm.cp, dp=llm.dp, recompute=encoder.recompute)
    return LayoutChoice(mode=Mode.HOMOGENEOUS, encoders=(on_first,), llm=llm)


def _table(
    table: str,
    key: str,
    other: Callable[[PrintedRow], LayoutChoice],
    *,
    columns: tuple[str, str],
    timed: Timed = Timed.STEP,
) -> list[Compared]:
    """Rows comparing H with `other`; `columns` are prefixes of H's degrees and the other's times."""
    degrees, prefix = columns
    rows = []
    for row in printed_rows(f"mimo_table{table}"):
        h_s, other_s = (float(row[f"{layout}_{timed}"]) / MS for layout in ("h", prefix))
        compared = Compared(
            key=f"{table}/{key.format_map(row)}",
            baseline=workload_of(row, row.get("n_gpus") or row["h_n_gpus"]),
            other=workload_of(row, row.get("n_gpus") or row[f"{prefix}_n_gpus"]),
            baseline_layout=homogeneous(row, degrees),
            other_layout=other(row),
            timed=timed,
            printed_s=(h_s, other_s),
            printed_gb=(float(row["h_peak_mem_gb"]), float(row[f"{prefix}_peak_mem_gb"])),
        )
        rows.append(compared)
    return rows


def _degrees(row: PrintedRow, prefix: str) -> tuple[int, int, int, int]:
    tp, cp, pp, dp = (int(row[f"{prefix}_{axis}"]) for axis in ("tp", "cp", "pp", "dp"))
    return tp, cp, pp, dp
