"""Hostile input, faults and long runs: tables out of the records of the fuzzer, chaos and the soak."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.markdown import code, one_line, table
from docs.generate.results import RESULTS, ROOT, made, result

Record = Mapping[str, Any]
FOUND = ("tracebacks", "hangs", "native_crashes", "over_2gb", "half_written", "unclear_lines")
AGAINST = ("orphans", "lost_steps", "wrong_losses", "unnamed_causes", "leftover_files", "late_notices")
PLOT = RESULTS / "plots" / "soak.png"


def hostile_section() -> Iterator[str]:
    """What was tried, how much of it, and what went wrong."""
    yield from _fuzz(result("fuzz"))
    yield from _chaos(result("chaos"))
    yield from _soak(result("soak"))


def hostile_in_short() -> Iterator[tuple[str, str, str]]:
    """Rows of the summary: (what was tested, result, command)."""
    fuzz, chaos, soak = result("fuzz"), result("chaos"), result("soak")
    yield (
        "**Fuzzing**: damaged files and messages give one clear error line",
        f"{fuzz['inputs']:,} inputs, {sum(fuzz[key] for key in FOUND)} failures",
        code("python -m experiments.fuzz"),
    )
    yield (
        "**Fault injection**: killed processes, full disks, clock jumps, lost messages",
        f"{chaos['clean']} of {chaos['rounds']} rounds lose no step and leave nothing behind; median "
        f"recovery {chaos['recovery_p50_s']:.1f} s",
        code("python -m experiments.chaos"),
    )
    yield (
        "**Soak test**: memory, file descriptors and threads of every process",
        f"{len(soak['growth'])} series, {len(soak['leaks'])} leaks",
        code("python -m experiments.soak"),
    )


def _fuzz(record: Record) -> Iterator[str]:
    targets = record["targets"].values()
    commits = sorted({row["commit"] for row in targets})
    shares = [row["first_parse_share"] for row in targets]
    yield one_line(
        f"""{code("python -m experiments.fuzz --count 125000")} (commits {", ".join(map(code, commits))};
        {record["seconds"] / 60:.0f} minutes on two cores shared with other programs): {record["inputs"]:,}
        damaged inputs for {len(shares)} file readers and message types, at least
        {min(row["inputs"] for row in targets):,} each. At least {100 * min(shares):.0f} % of them pass the
        first parse. Failures:"""
    )
    yield table([key.replace("_", " ") for key in FOUND], [[record[key] for key in FOUND]])


def _chaos(record: Record) -> Iterator[str]:
    asked = record["asked"]
    commits = ", ".join(map(code, record["commits"]))
    yield one_line(
        f"""{code("python -m experiments.chaos")} ({record["date"]}, commits {commits}, seed {asked["seed"]},
        {asked["device"]}): {record["rounds"]} rounds, each with a random component, fault and
        time; {record["clean"]} without a failure. Recovery, including a restart, takes
        {record["recovery_p50_s"]:.2f} s (median; 95th percentile {record["recovery_p95_s"]:.2f} s). Stopped
        processes were detected within {record["noticed_max_s"]:.2f} s. Failures:"""
    )
    yield table([key.replace("_", " ") for key in AGAINST], [[record[key] for key in AGAINST]])
    yield f"Rounds by component: {_counts(record['components'])}. By fault: {_counts(record['faults'])}."


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _soak(record: Record) -> Iterator[str]:
    yield one_line(
        f"""{code("python -m experiments.soak")} ({made(dict(record))}, {record["device"]}): 2,000 steps of a
        run with checkpoints, 2,000 of elastic training and 20,000 requests to the preprocessing service,
        each sampled 100 times. The table shows the growth of resident memory per {record["per"]:,} steps or
        requests, with its 95 % interval. Processes whose file descriptors or threads grow:
        {_growing(record) or "none"}."""
    )
    rows = (
        (name.removesuffix("/rss_bytes"), *_of_memory(row), "yes" if row["is_flat"] else "NO")
        for name, row in record["growth"].items()
        if name.endswith("/rss_bytes")
    )
    yield table(("process", "growth, kB per 1,000", "95 % interval", "memory, MB", "flat"), rows)
    yield one_line(
        """Flat: the interval includes zero, or growth is below 0.2 % of the memory. Private memory of a
        forked process may grow while its resident memory is flat, as it copies pages that it shared with its
        parent; this is not counted as a leak."""
    )
    yield f'<img src="../{PLOT.relative_to(ROOT)}" alt="memory, descriptors and threads over time">'


def _growing(record: Record) -> str:
    return ", ".join(
        name
        for name, row in record["growth"].items()
        if not row["is_flat"] and name.endswith(("/descriptors", "/threads"))
    )


def _of_memory(row: Record) -> tuple[str, str, str]:
    return (
        f"{row['per_1000'] / 1e3:.1f}",
        f"{row['low'] / 1e3:.1f} to {row['high'] / 1e3:.1f}",
        f"{row['level'] / 1e6:.0f}",
    )
