"""Holds plans, times, memory, losses and weights against `stored.json`, or writes it.

    python -m tests.guard --check              everything; several minutes
    python -m tests.guard --check --reduced    what `make test` runs
    python -m tests.guard --update             writes the file anew; the commit says which entries changed
    python -m tests.guard --update --only interleaved   cases with that in their name; the others stay

Exit code 1 where an entry changed or is gone; new ones are named and allowed.

What a step computes depends on the processor and on torch, which the file names. On another machine the
bits of losses, gradients and weights are not compared; losses and norms of gradients are, within 1e-12.
To compare bits there: at the commit that first wrote the file `--update --file HERE`, then, at the one in
question, `--check --file HERE`.

A file has the names of actions and the hashes of its version of plan files. One of an earlier version is
held against today's entries with those names, by `workbench.schedule.action.SPELLINGS`, and those hashes, by
`workbench.plan.codec.hash_of_version`, so `--check --file` of it says whether anything else has changed
since. Digests of the hashes in result files are of today's: they are listed and counted apart.

    git show 2aeb338:tests/guard/stored.json > /tmp/version_1.json
    python -m tests.guard --check --file /tmp/version_1.json
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.guard import entries, project
from tests.guard.entries import Facts
from tests.guard.stored import STORED, Stored, Verdict, compare, plan_hash, read, write


def everything(version: int = project.NEWEST) -> Stored:
    """Every entry of today's code."""
    found = {}
    with project.workers() as pool:
        maker = entries.Maker(pool, version=version)
        every = entries.cases()
        for number, case in enumerate(every, 1):
            found[str(case)] = maker.entry(case)
            if number % len(project.SCHEDULES) == 0:
                _tell(f"{number} of {len(every)} cases: {case.job}, {case.strategy}")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as executor:
        for name, entry in entries.result_entries(executor):
            found[name] = entry
            _tell(name)
    return Stored(project.machine(), found, version)


def check(before: Stored) -> Verdict:
    """Everything, held against the file."""
    now = everything(before.version)
    return compare(before, now, set(now.entries))


def check_few(before: Stored, pool: project.Pool) -> Verdict:
    """A few cases, the first and the last of them executed; and the names of all."""
    few = entries.few_cases()
    maker = entries.Maker(pool, (few[0], few[-1]), before.version)
    found = {str(case): maker.entry(case) for case in few}
    results = {name for name in before.entries if name.startswith(entries.RESULTS)}
    return compare(
        before, Stored(project.machine(), found, before.version), results | {str(c) for c in entries.cases()}
    )


def renewed(before: Stored, only: str) -> Stored:
    """The file with today's entries of the cases that have `only` in their name.

    On another machine than the file's, runs of plans that are as stored are kept, not made again.

    Raises:
        ValueError: no case has, or a plan is not as stored and the file is of another machine.
    """
    chosen = [case for case in entries.cases() if only in str(case)]
    if not chosen:
        raise ValueError(f"no case has {only!r} in its name; nearest: {entries.cases()[0]}")
    is_of_here = before.machine == project.machine()
    with project.workers() as pool:
        maker = entries.Maker(pool, None if is_of_here else (), before.version)
        new = {str(case): maker.entry(case) for case in chosen}
    if not is_of_here:
        new = {name: _with_stored_run(name, entry, before) for name, entry in new.items()}
    return Stored(before.machine, {**before.entries, **new}, before.version)


def _with_stored_run(name: str, entry: Facts, before: Stored) -> Facts:
    stored = before.entries.get(name, {})
    if plan_hash(entry) != plan_hash(stored):
        raise ValueError(
            f"{name}: another plan than the stored one, runs are of {dict(before.machine)}; want that machine"
        )
    return entry | {key: stored[key] for key in (entries.RUN,) if key in stored}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what differs; the exit code."""
    options = _parse(arguments)
    if options.update and options.only is None:
        write(everything(), options.file)
        return 0
    try:
        before = read(options.file)
        if options.update:
            write(renewed(before, options.only), options.file)
            return 0
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.reduced:
        with project.workers() as pool:
            verdict = check_few(before, pool)
    else:
        verdict = check(before)
    for line in verdict.lines():
        sys.stdout.write(f"{line}\n")
    if before.machine != project.machine():
        sys.stdout.write(
            f"executed on {project.machine()}, stored on {dict(before.machine)}: losses and norms are "
            "compared within 1e-12, bits are not\n"
        )
    if verdict.rehashed:
        sys.stdout.write(f"{len(verdict.rehashed)} have other digests of plan hashes\n")
    if verdict.changed:
        told = "; ".join(f"{count} {kind}" for kind, count in verdict.kinds.items())
        sys.stdout.write(f"changed are: {told}\n")
    counts = f"{len(verdict.changed)} changed, {len(verdict.gone)} gone, {len(verdict.new)} new"
    sys.stdout.write(f"{len(before.entries)} entries stored; {counts}\n")
    return 0 if verdict.holds else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.guard", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the file")
    what.add_argument("--update", action="store_true", help="write the file")
    parser.add_argument("--reduced", action="store_true", help="with --check: a few entries, in seconds")
    parser.add_argument("--file", type=Path, default=STORED, help="instead of the stored one")
    parser.add_argument("--only", help="with --update: cases with this in their name")
    options = parser.parse_args(arguments)
    if options.update and options.reduced:
        parser.error("--reduced goes with --check")
    if options.only is not None and not options.update:
        parser.error("--only goes with --update")
    return options


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
