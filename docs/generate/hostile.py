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
    """Rows of the summary: (what, command, figures)."""
    fuzz, chaos, soak = result("fuzz"), result("chaos"), result("soak")
    yield (
        "every input and message changed at random ends in one clear line",
        code("python -m experiments.fuzz"),
        f"{fuzz['inputs']:,} inputs, {sum(fuzz[key] for key in FOUND)} that did not",
    )
    yield (
        "faults of processes, disks, clocks and wires cost no step and leave nothing behind",
        code("python -m experiments.chaos"),
        f"{chaos['clean']} of {chaos['rounds']} rounds clean, "
        f"median recovery {chaos['recovery_p50_s']:.1f} s",
    )
    yield (
        "long runs hold what they held",
        code("python -m experiments.soak"),
        f"{len(soak['growth'])} series of memory, descriptors and threads, {len(soak['leaks'])} that grow",
    )


def _fuzz(record: Record) -> Iterator[str]:
    targets = record["targets"].values()
    commits = sorted({row["commit"] for row in targets})
    shares = [row["first_parse_share"] for row in targets]
    yield one_line(
        f"""{code("python -m experiments.fuzz --count 125000")} (commits {", ".join(map(code, commits))};
        {record["seconds"] / 60:.0f} minutes on two cores that others used, too): {record["inputs"]:,} inputs
        for {len(shares)} readers and kinds of messages, at least {min(row["inputs"] for row in targets):,}
        each, of which at least {100 * min(shares):.0f} % pass the first parse."""
    )
    yield table([key.replace("_", " ") for key in FOUND], [[record[key] for key in FOUND]])


def _chaos(record: Record) -> Iterator[str]:
    asked = record["asked"]
    commits = ", ".join(map(code, record["commits"]))
    yield one_line(
        f"""{code("python -m experiments.chaos")} ({record["date"]}, commits {commits}, seed {asked["seed"]},
        {asked["device"]}): {record["rounds"]} rounds of a random component, fault and instant,
        {record["clean"]} of them clean. Recovery, a new start included: median
        {record["recovery_p50_s"]:.2f} s, 95th percentile {record["recovery_p95_s"]:.2f} s. A process that is
        stopped was noticed after {record["noticed_max_s"]:.2f} s at most."""
    )
    yield table([key.replace("_", " ") for key in AGAINST], [[record[key] for key in AGAINST]])
    yield f"Rounds by component: {_counts(record['components'])}. By fault: {_counts(record['faults'])}."


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _soak(record: Record) -> Iterator[str]:
    yield one_line(
        f"""{code("python -m experiments.soak")} ({made(dict(record))}, {record["device"]}): 2,000 steps of a
        run with saves, 2,000 of elastic training and 20,000 requests of the preprocessing service, sampled
        100 times each. Growth of resident memory per {record["per"]:,} steps or requests with its 95 %
        interval, and what it grows from; descriptors and threads that grow: {_growing(record) or "none"}."""
    )
    rows = (
        (name.removesuffix("/rss_bytes"), *_of_memory(row), "yes" if row["is_flat"] else "NO")
        for name, row in record["growth"].items()
        if name.endswith("/rss_bytes")
    )
    yield table(("process", "kB per 1,000", "interval", "of MB", "flat"), rows)
    yield one_line(
        """Flat: the interval reaches zero, or less than 0.2 % of what is held. Private memory of forked
        processes grows while they write to pages that they had shared with their parent, which their resident
        memory counts already; it falls while a save is written by a fork that shares them again."""
    )
    yield f'<img src="../{PLOT.relative_to(ROOT)}" alt="what processes hold over steps and requests">'


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
