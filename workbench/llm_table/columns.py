"""The columns of a table of language models: their names, meaning, defaults, and the checks of a row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite
from typing import Any

from workbench.cost.device_names import shipped_device
from workbench.cost.profile import known_profiles
from workbench.llm_table.llm_row import Architecture, LlmRow, Number, Optimizer, Recomputed, Scores, YesNo

MOST = 10**7  # of any count; far above any model's
SIMILAR = 0.8  # an unknown name this like a column's is taken for a misspelling
LONGEST = 250  # characters of a cell, a path included

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: heading.
        about: what it says, with its unit.
        default: value of an absent or empty cell, out of the columns before it; None: required.
        choices: words it may hold; None: a number.
        real: whether the number may have a fraction.
        shown: the default in words.
    """

    name: str
    about: str
    default: Callable[[Values], Any] | None = None
    choices: type[StrEnum] | None = None
    real: bool = False
    shown: str = ""


def _always(value: Any) -> Callable[[Values], Any]:
    return lambda _: value


def _ffn(row: Values) -> int:
    """4 x hidden; a gated MLP of about as many weights: 8/3 x hidden, up to a multiple of 256."""
    if row["architecture"] is Architecture.GPT:
        return int(4 * row["hidden"])
    return -(-8 * int(row["hidden"]) // 3 // 256) * 256


COLUMNS = (
    Column("hidden", "width of the model"),
    Column("layers", "transformer blocks"),
    Column("heads", "query heads"),
    Column("sequence", "tokens of a sample"),
    Column("global_batch", "samples of an iteration"),
    Column("architecture", "gpt or llama", _always(Architecture.GPT), Architecture, shown="gpt"),
    Column("kv_heads", "key and value heads", lambda row: row["heads"], shown="heads"),
    Column("ffn", "inner width of the MLP", _ffn, shown="gpt: 4 x hidden, llama: 8/3 x hidden"),
    Column("vocab", "tokens of the vocabulary", _always(50257), shown="50257"),
    Column(
        "vocab_multiple",
        "the vocabulary is padded to a multiple of this times tp",
        _always(128),
        shown="128",
    ),
    Column("tied", "yes: token table and head are one weight", _always(YesNo.YES), YesNo, shown="yes"),
    Column("tp", "tensor-parallel ranks", _always(1), shown="1"),
    Column("cp", "context-parallel ranks", _always(1), shown="1"),
    Column("pp", "pipeline stages", _always(1), shown="1"),
    Column("virtual_stages", "stages of each rank (interleaved 1F1B)", _always(1), shown="1"),
    Column("dp", "data-parallel replicas", _always(1), shown="1"),
    Column(
        "sequence_parallel",
        "yes: norms and residuals are cut over tp too",
        _always(YesNo.NO),
        YesNo,
        shown="no",
    ),
    Column("micro_batch", "samples of a microbatch", _always(1), shown="1"),
    Column("recompute", "none, selective or full", _always(Recomputed.NONE), Recomputed, shown="none"),
    Column("attention", "flash or stored scores", _always(Scores.FLASH), Scores, shown="flash"),
    Column("precision", "bf16, fp16 or fp32", _always(Number.BF16), Number, shown="bf16"),
    Column("optimizer", "plain or distributed Adam", _always(Optimizer.PLAIN), Optimizer, shown="plain"),
    Column("gpu", "profile: a shipped name or a file", _always("A100-80GB"), shown="A100-80GB"),
    Column("gpus_per_node", "GPUs of a node", _always(8), shown="8"),
    Column("intra_gbytes_per_s", "GB/s of a rank inside a node", _always(None), real=True, shown="profile's"),
    Column("intra_latency_us", "latency inside a node", _always(None), real=True, shown="profile's"),
    Column(
        "inter_gbytes_per_s",
        "GB/s of a node to others, all its NICs",
        _always(None),
        real=True,
        shown="profile's",
    ),
    Column("inter_latency_us", "latency between nodes", _always(None), real=True, shown="profile's"),
)
NAMES = tuple(column.name for column in COLUMNS)
OUTPUTS = ("predicted_s", "predicted_bytes", "unmeasured")


def describe_columns() -> str:
    """One line a column: name, meaning, default."""
    width = max(map(len, NAMES))
    return "\n".join(
        f"{c.name:<{width}}  {c.about}" + ("; required" if c.default is None else f"; default {c.shown}")
        for c in COLUMNS
    )


def check_header(header: Sequence[str]) -> None:
    """ValueError for a heading that is missing, twice, an output's, or one letter from a column's.

    Other headings are carried along into the output.
    """
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"column {name!r} stands {header.count(name)} times; want each once")
        if name in OUTPUTS:
            raise ValueError(f"column {name!r} is one that the prediction adds; rename it")
        near = () if name in NAMES else get_close_matches(name.lower(), NAMES, n=1, cutoff=SIMILAR)
        if near and near[0] not in header:
            raise ValueError(f"unknown column {name!r}: want {near[0]!r}, or a name less like it")
    for column in COLUMNS:
        if column.default is None and column.name not in header:
            raise ValueError(f"no column {column.name!r} ({column.about}); it has: {', '.join(header)}")


def read_row(cells: Mapping[str, str]) -> LlmRow:
    """A row out of its cells; an absent or empty cell takes the column's default.

    Raises:
        ValueError: `column: rule, got value; nearest valid choice`.
    """
    values: dict[str, Any] = {}
    for column in COLUMNS:
        text = (cells.get(column.name) or "").strip()
        if text:
            values[column.name] = _read(column, text)
        elif column.default is not None:
            values[column.name] = column.default(values)
        else:
            raise ValueError(f"{column.name}: required ({column.about}), the cell is empty")
    row = LlmRow(**values)
    _check(row)
    return row


def _read(column: Column, text: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(
            f"{column.name}: want at most {LONGEST} characters, got {len(text):,} that begin {text[:20]!r}"
        )
    if column.name == "gpu":
        return text
    if column.choices is not None:
        words = [str(word) for word in column.choices]
        if text.lower() in words:
            return column.choices(text.lower())
        near = get_close_matches(text.lower(), words, n=1, cutoff=0.0)
        raise ValueError(f"{column.name}: want one of {', '.join(words)}, got {text!r}; nearest: {near[0]}")
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{column.name}: want a number, got {text!r}; nearest: 1") from None
    if column.real:
        least = 0.0 if column.name.endswith("latency_us") else 1e-6
        if not isfinite(number) or not least <= number <= MOST:
            raise ValueError(
                f"{column.name}: want a number from {least:g} to {MOST:,}, got {text}; nearest: "
                f"{min(max(number, least), MOST) if isfinite(number) else MOST:g}"
            )
        return number
    if not isfinite(number) or number != int(number) or not 1 <= number <= MOST:
        near_number = int(min(max(round(number), 1), MOST)) if isfinite(number) else 1
        raise ValueError(
            f"{column.name}: want a whole number from 1 to {MOST:,}, got {text}; nearest: {near_number}"
        )
    return int(number)


def _check(row: LlmRow) -> None:
    """Rules between columns."""
    if "." not in row.gpu and "/" not in row.gpu:
        try:
            shipped_device(row.gpu, known_profiles())
        except ValueError as error:
            raise ValueError(f"gpu: {error}") from None
    _divides("hidden", row.hidden, "heads", row.heads)
    _divides("heads", row.heads, "kv_heads", row.kv_heads)
    _divides("kv_heads", row.kv_heads, "tp", row.tp)
    _divides("ffn", row.ffn, "tp", row.tp)
    _divides("sequence", row.sequence, "2 x cp" if row.cp > 1 else "cp", 2 * row.cp if row.cp > 1 else 1)
    _divides("layers", row.layers, "pp x virtual_stages", row.pp * row.virtual_stages)
    _divides("global_batch", row.global_batch, "dp x micro_batch", row.dp * row.micro_batch)
    if row.virtual_stages > 1:
        if row.pp < 2:
            raise ValueError(f"virtual_stages: want 1 where pp is 1, got {row.virtual_stages}; nearest: 1")
        _divides("microbatches of a replica", row.num_microbatches, "pp (with virtual_stages)", row.pp)
    if row.sequence_parallel is YesNo.YES and row.sequence % row.tp:
        _divides("sequence", row.sequence, "tp (with sequence_parallel)", row.tp)
    if row.attention is Scores.FLASH and row.recompute is Recomputed.SELECTIVE:
        raise ValueError(
            "recompute: selective computes stored scores again, attention is flash; nearest: none"
        )


def _divides(whole: str, total: int, part: str, divisor: int) -> None:
    if total % divisor:
        fitting = [d for d in range(1, total + 1) if total % d == 0] if total <= 10**6 else [1]
        near = min(fitting, key=lambda d: (abs(d - divisor), d))
        raise ValueError(f"{part}: must divide {whole} = {total}, got {divisor}; nearest: {near}")
