"""The joint search held against every strategy's own: tables out of the suite's record."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.markdown import code, one_line, table
from docs.generate.results import made, percent, result

Record = Mapping[str, Any]


def joint_search_section() -> Iterator[str]:
    """Gains, ablation, regret and speed; parts that were not run are said to be missing."""
    record = result("search_joint")
    yield _intro(record)
    yield table(
        (
            "job",
            "objective",
            "GPUs",
            "best single strategy",
            "its value",
            "joint search",
            "gain",
            "joint search, longer",
            "gain",
            "gap",
        ),
        (_row(name, row, record["longer"][name]) for name, row in record["jobs"].items()),
    )
    yield one_line(
        f"""Values are seconds per step, dollars per sample, or seconds per sample of useful work (goodput).
        The gap is the distance to a lower bound. Never worse: {_yes(record["never_worse"])} with the same
        time, {_yes(record["longer_overall"]["never_worse"])} with more. Geometric mean of the gains:
        {record["geomean_gain"]:.3f} and {record["longer_overall"]["geomean_gain"]:.3f}; the goal was 1.15,
        and the lower bounds allow at most {record["most_geomean_gain"]:.3f}. Over the strategies that the
        source papers propose or compare with, without FSDP and HSDP and without this project's own:
        {record["geomean_gain_over_papers"]:.3f} and
        {record["longer_overall"]["geomean_gain_over_papers"]:.3f}."""
    )
    yield _aware(record) if "aware" in record else _missing("aware")
    if "spaces" in record:
        yield table(
            ("space, enumerated", "plans", "optimum", "found", "regret", "candidates"),
            (_space_row(name, row) for name, row in record["spaces"].items()),
        )
    else:
        yield _missing("regret")
    if "ablation" in record:
        yield from _ablation(record["ablation"])
    else:
        yield _missing("ablation")
    yield _speed(record) if "speed_searches" in record else _missing("speed")
    yield from _executed(result("search_executed"))


def _missing(part: str) -> str:
    return f"Not measured: {code(f'python -m experiments.search.joint --part {part}')}."


def _ablation(jobs: Record) -> Iterator[str]:
    heads = list(next(iter(jobs.values()))["gains"])
    yield one_line(
        """Ablation: gain over the best starting plan of the joint search when one dimension is searched and
        the others stay as they are; last, all dimensions together."""
    )
    yield table(
        ("job", "from", *heads),
        (
            (name, code(row["start"]), *(f"{row['gains'][head]:.3f}" for head in heads))
            for name, row in jobs.items()
        ),
    )


def _speed(record: Record) -> str:
    searches = record["speed_searches"]
    return one_line(
        f"""Speed: {record["candidates_per_s_24"]:.0f} candidates per second and core on 24 GPUs (goal 200),
        {record["candidates_per_s_1296"]:.1f} on 1,296 GPUs (goal 5), and
        {record["candidates_per_s_1296_long"]:.1f} in a search of {searches["1296, long"]["candidates"]}
        candidates there. Each is lowered, priced, checked for memory and simulated. A search on
        {searches["10000"]["gpus"]:,} GPUs with two workers took {record["seconds_10000"]:.0f} s and ended
        with a gap of {percent(searches["10000"]["gap"])}."""
    )


def _intro(record: Record) -> str:
    longer = next(iter(record["longer"].values()))
    commits = {each["commit"] for part in record["made"].values() for each in part.values()}
    dates = {each["date"][:10] for part in record["made"].values() for each in part.values()}
    told = f"{', '.join(sorted(dates))}, commits {', '.join(map(code, sorted(commits)))}"
    return one_line(
        f"""{code(record["command"])} ({told}; {record["device"]}). Every registered strategy searches the
        space of its own paper for {record["budget_s"]:g} CPU seconds, with open layouts, on the same devices
        and with the same simulator. The joint search has {record["budget_s"]:g} CPU seconds in all. In the
        last three columns it has about {longer["seconds"]:.0f}, less than all strategies together."""
    )


def _row(name: str, row: Record, longer: Record) -> tuple[object, ...]:
    return (
        name,
        row["objective"],
        row["gpus"],
        code(row["best_single"]),
        f"{row['best_single_s']:.4g}",
        f"{row['joint_s']:.4g}",
        f"{row['gain']:.3f}",
        f"{longer['joint_s']:.4g}",
        f"{row['best_single_s'] / longer['joint_s']:.3f}",
        percent(longer["gap"]),
    )


def _space_row(name: str, row: Record) -> tuple[object, ...]:
    return (
        name,
        f"{row['plans']:,}",
        f"{row['optimum_s']:.4g} s",
        f"{row['joint_s']:.4g} s",
        percent(row["regret"], 2),
        row["candidates"],
    )


def _aware(record: Record) -> str:
    rows = record["aware"].values()
    planned = [row for row in rows if row["cornstarch"] is not None]
    faster = sum(row["cornstarch"] < row["cornstarch-frozen-unaware"] for row in planned)
    return one_line(
        f"""With the simulator as judge, as in `workbench search`, `cornstarch` is never slower than
        `cornstarch-frozen-unaware`: {_yes(record["cornstarch_never_slower_than_unaware"])}. It is faster on
        {faster} of the {len(planned)} jobs that it can plan."""
    )


def _executed(record: Record) -> Iterator[str]:
    parts: Record = record["parts"]
    yield one_line(
        f"""Executed ({code(record["command"])}, {made(record)}, {record["device"]}), with all predictions
        written before the first run. A gain is the step time of the best single strategy's plan over that of
        the joint search's plan: medians over {record["rounds"]} rounds, with bootstrap intervals."""
    )
    yield table(
        (
            "ranks",
            "best single strategy",
            "plans executed",
            "predicted gain",
            "executed gain",
            "95 % interval",
        ),
        (_executed_row(name, part) for name, part in parts.items()),
    )


def _executed_row(name: str, part: Record) -> tuple[object, ...]:
    interval = part["interval_95"]
    return (
        f"{part['ranks']}, {name}",
        code(part["best_single"]),
        len(part["plans"]),
        f"{part['predicted_gain']:.3f}",
        f"{part['executed_gain']:.3f}",
        "one plan" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
    )


def _yes(holds: bool) -> str:  # noqa: FBT001  (a word for it)
    return "yes" if holds else "no"
