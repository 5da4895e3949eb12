"""A script: one table or figure of a paper as a declaration, found on disk, with one command line for all.

@script(profile="A40")
def run() -> Parts:
    return [printed_evidence(), own_evidence()]

The declaration ends its module: `python -m experiments.<paper>.<script>` runs the script there.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.harness.command import command_line
from experiments.harness.drawing import save
from experiments.harness.outcome import Evidence, Outcome, outcome_of
from experiments.harness.reads import forget, modules_of
from experiments.harness.record import (
    FOLDER,
    RESULTS,
    as_record,
    results_folder,
    stored_records,
    table,
    uncommitted,
    write,
)
from experiments.harness.tally import summary_of

Parts = Evidence | Iterable[Evidence]
DECLARED = re.compile(r"^(@|run = )script\(", re.MULTILINE)
DRAWS = re.compile(r"\.figures(\[| =)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A declared script; calling it computes all evidence and judges it.

    Args:
        name: `<paper>/<script>`, as the module's path says.
        about: the module's docstring: paper, setup, what is given, what differs.
        compute: computes all evidence.
        profile: of the hardware that is priced, if any.
    """

    name: str
    about: str
    compute: Callable[[], Parts]
    profile: str | None = None

    def __call__(self) -> Outcome:
        modules_of(self.name)  # hashed before they may change on disk
        parts = self.compute()
        return outcome_of(self.name, [parts] if isinstance(parts, Evidence) else parts, profile=self.profile)


def main(run: Script) -> int:
    """Run the script as a command: table, result file, with `--json` one JSON object as the last line."""
    arguments = command_line(run.about).parse_args()
    return finished(run(), as_json=arguments.json)


def script(
    *, profile: str | None = None, command: Callable[[Script], int] = main
) -> Callable[[Callable[[], Parts]], Script]:
    """Declare a module's script, which is run at once where the module is the program.

    Args:
        profile: of the hardware that is priced, if any.
        command: runs the script as a program and returns the exit status.
    """

    def declared(compute: Callable[[], Parts]) -> Script:
        scope: Mapping[str, Any] = compute.__globals__
        name = scope["__spec__"].name.removeprefix("experiments.").replace(".", "/")
        declared_script = Script(name=name, about=scope["__doc__"], compute=compute, profile=profile)
        if scope["__name__"] == "__main__":
            raise SystemExit(command(declared_script))
        return declared_script

    return declared


def finished(outcome: Outcome, *, as_json: bool, more: Mapping[str, Any] | None = None) -> int:
    """Print the table, write the result file, draw the figures; exit status 1 on OFF or MISSING.

    Args:
        outcome: of the script.
        as_json: also print the record, merged with `more`.
    """
    print(table(outcome))
    keep(outcome)
    if as_json:
        print(json.dumps(as_record(outcome) | dict(more or {})))
    return outcome.exit_status


def keep(outcome: Outcome) -> None:
    """Write `results/<paper>_<script>.json` and the figures beside it.

    The checkout's own results must come from commits: a result whose modules have uncommitted changes is
    not written there.
    """
    changed = uncommitted(modules_of(outcome.script)) if results_folder() == RESULTS else []
    if changed:
        sys.stderr.write(
            f"{outcome.script}: the result is not kept, because {', '.join(changed[:3])} "
            f"{'and others differ' if len(changed) > 3 else 'differs' if len(changed) == 1 else 'differ'} "
            "from the commit: commit first\n"
        )
        return
    folder = write(outcome).parent / "plots"
    for name, grid in outcome.figures.items():
        save(grid, folder, name)


def scripts() -> tuple[str, ...]:
    """Scripts on disk, as `<paper>/<script>`: modules of a sub-package that declare one."""
    modules = (path for path in FOLDER.glob("*/*.py") if path.parent.name != "harness")
    names = (path for path in modules if DECLARED.search(path.read_text()))
    return tuple(sorted(f"{path.parent.name}/{path.stem}" for path in names))


def draws_itself(name: str) -> bool:
    """Whether a script has its own drawing."""
    path = FOLDER / f"{name}.py"
    return path.is_file() and DRAWS.search(path.read_text()) is not None


def reproduce(names: Sequence[str] = (), *, show: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run scripts, write their results, and return the counts of their verdicts (`tally.summary_of`).

    Args:
        names: `<paper>/<script>` or `<paper>` each; empty for all.
        show: called with the table of each script when it has finished.

    Raises:
        ValueError: no script has that name.
    """
    records = []
    for name in chosen(names, scripts()):
        forget()
        run: Script = importlib.import_module(f"experiments.{name.replace('/', '.')}").run
        outcome = run()
        keep(outcome)
        if show is not None:
            show(table(outcome))
        records.append(as_record(outcome))
    return summary_of(records)


def stored(names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the counts for stored results, judged by today's rules, without running anything.

    Raises:
        ValueError: there is no result of that name.
    """
    records = {record["script"]: record for record in stored_records()}
    return summary_of([records[name] for name in chosen(names, tuple(records))])


def chosen(names: Sequence[str], declared_scripts: Sequence[str]) -> list[str]:
    """Scripts of these names or papers, in order; ValueError for an unknown name."""
    for name in names:
        if not any(script == name or script.startswith(f"{name}/") for script in declared_scripts):
            raise ValueError(f"no script {name!r}: the scripts are {', '.join(declared_scripts)}")
    return [
        candidate
        for candidate in declared_scripts
        if not names or candidate in names or candidate.split("/")[0] in names
    ]
