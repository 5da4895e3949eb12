"""Every system of the Oobleck chapter on a trace, and rows of printed averages and ours."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.table import Cell, Table
from experiments.oobleck import systems
from experiments.oobleck.published_rules import restated_average
from sim.failures.run import FailureRun, Spent
from sim.failures.simulate import simulate_failures
from sim.failures.training_system import Restart, System
from workbench.elastic.availability import Availability, warned

REL_TOL = 0.03
SPARES_BEYOND = 24  # nodes of the plain job; what else there is stands by
WINDOW = (
    "window of every average, of all systems: from the first iteration, on 30 nodes, to the 15th loss; "
    "the iteration running then counts by its part, what is cut off or undone does not"
)

_RESTART = (
    "whether training stops while the job restarts, whether the restart time contains saving, and when "
    "the first checkpoint follows a failure"
)
UNSTATED = {
    "varuna": _RESTART,
    "varuna_no_ckpt": _RESTART,
    "bamboo": (
        "whether iterations last longer after the loss of a node that only waits, and whether training "
        "stops while it reconfigures"
    ),
}

BUILDERS: Mapping[str, Callable[[str], System]] = {
    "bamboo": systems.bamboo,
    "varuna": systems.varuna,
    "varuna_no_ckpt": systems.varuna_without_checkpoint_cost,
    "oobleck": systems.oobleck,
    "restart_24": lambda model: systems.with_spares(model, SPARES_BEYOND),
}


def runs(system: str, model: str) -> bool:
    """Whether the system can run the model at all."""
    return system != "bamboo" or bool(systems.published_rates("bamboo", model))


@cache
def controlled(system: str, model: str, interval: str) -> FailureRun:
    """Failures of one node every interval, from 30 to 15 nodes, without a warning."""
    return simulate_failures(BUILDERS[system](model), systems.trace(f"failures_{interval}"))


@cache
def on_spot(system: str, model: str, trace: str, notice_s: float) -> FailureRun:
    """Failures of a spot trace, with the notice that providers give."""
    events = warned(systems.spot_trace(trace), notice_s)
    return simulate_failures(BUILDERS[system](model), events, until_s=events.end_s)


def average_rows(table: str, where: str) -> Evidence:
    """Average throughput of every cell of a table, by published throughputs per node count.

    Where ours is outside the tolerance, the range over unstated inputs is shown.
    """
    evidence = Evidence(notes=[WINDOW])
    for row in printed_rows(table):
        system, model, interval = row["system"], row["model"], row["failure_interval"]
        if not row["tput_samples_per_s"]:
            continue
        key = f"published/{model.replace(' ', '-')}/{interval}/{system}"
        number = PaperNumber(key, float(row["tput_samples_per_s"]), "samples/s", where, REL_TOL)
        ours = controlled(system, model, interval).samples_per_s
        if number.near(ours) or system not in UNSTATED:
            evidence.add(number, ours)
            continue
        happens = systems.trace(f"failures_{interval}")
        values = {"as built": ours} | readings(BUILDERS[system](model), happens)
        values["the published simulator's rules"] = restated_average(system, model, happens)
        evidence.add_range(number, values, UNSTATED[system])
    return evidence


def readings(built: System, happens: Availability) -> dict[str, float]:
    """Average samples per second, by reading of what is unstated."""
    return {name: simulate_failures(reading, happens).samples_per_s for name, reading in plausible(built)}


def restated_rows(table: str, where: str) -> Evidence:
    """The cells of Varuna and Bamboo by the published simulator's rules, which produced them."""
    return Table(
        csv=table,
        where=where,
        key=lambda row: (
            f"restated/{row['model'].replace(' ', '-')}/{row['failure_interval']}/{row['system']}"
        ),
        cells={"": Cell(column="tput_samples_per_s", unit="samples/s", rel_tol=REL_TOL)},
        compute=lambda row: {"": [_restated(row)]},
        holds=lambda row: row["system"] != "oobleck",
    ).evidence()


def _restated(row: PrintedRow) -> float:
    happens = systems.trace(f"failures_{row['failure_interval']}")
    return restated_average(row["system"], row["model"], happens)


def plausible(built: System) -> Iterator[tuple[str, System]]:
    """Plausible readings of what is unstated, by name, including the published simulator's rules."""
    for restart in Restart:
        meanwhile = f"training {restart.value} meanwhile"
        if built.checkpoints is None:
            yield meanwhile, replace(built, restart=restart)
            continue
        for first, when in ((None, "first checkpoint as any other"), (1, "first checkpoint after one step")):
            for extra_s, saving in (
                (0.0, "saving in the restart"),
                (built.checkpoints.save_s, "saving apart"),
            ):
                yield (
                    f"{meanwhile}, {when}, {saving}",
                    replace(
                        built,
                        restart=restart,
                        recover_s=built.recover_s + extra_s,
                        checkpoints=replace(built.checkpoints, first=first),
                    ),
                )


def breakdown(run: FailureRun) -> dict[str, float]:
    """Fractions of the window by activity."""
    return {kind.value.replace(" ", "_"): run.fraction(kind) for kind in Spent}
