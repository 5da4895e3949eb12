"""The systems of the Oobleck chapter as the failure simulator sees them, and the traces they run on.

Throughputs and times to recover are those of the authors' published simulator. Its use of them is not copied:
`sim.failures.simulate` has rules of its own, see `simulate_failures`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from experiments.harness.printed import REFERENCE, PrintedRow, printed_rows
from sim.failures.training_system import Checkpoints, Joins, System
from workbench.elastic.availability import Availability, by_nodes, parse_trace, rescaled

MODELS = ("BERT-Large", "GPT-2", "GPT-3 Medium", "GPT-3 2.7b", "GPT-3 6.7b")
INTERVALS = ("6h", "1h", "10m")
MOST_NODES = 30
CHECKPOINT_EVERY = 10  # section 2.7.1
CHECKPOINT_EVERY_FREE = 2  # section 2.7.4.3, where saving costs nothing
BAMBOO_USEFUL_SHARE = 0.1971  # of an iteration, at a failure every 10 minutes
DOLLARS_PER_NODE_H = 0.91  # spot price of the published simulator

Table = Mapping[int, float]


def published_rates(system: str, model: str) -> Table:
    """Samples per second by number of nodes; empty where the system cannot run the model."""
    return {int(row["n_nodes"]): float(row["samples_per_s"]) for row in _rows(system, model)}


def oobleck(model: str, rates: Table | None = None) -> System:
    """Oobleck: keeps its state in memory and reconfigures."""
    times = recovery("oobleck", model)
    return System(
        name="oobleck",
        samples_per_s=by_nodes(rates or published_rates("oobleck", model), MOST_NODES),
        samples_per_step=float(times["samples_per_step"]),
        recover_s=float(times["recover_s"]),
    )


def varuna(model: str, rates: Table | None = None) -> System:
    """Varuna: checkpoints every 10 iterations, restarts on the largest grid that the nodes allow.

    Differs: the published restart time includes saving a checkpoint (the published simulator
    takes it off after a failure), so it is taken off here.
    """
    times = recovery("varuna", model)
    idle = {int(row["n_nodes"]): float(row["idle_gpus"] or 0) for row in _rows("varuna", model)}
    save_s = float(times["checkpoint_s"])
    return System(
        name="varuna",
        samples_per_s=by_nodes(rates or published_rates("varuna", model), MOST_NODES),
        samples_per_step=float(times["samples_per_step"]),
        recover_s=float(times["recover_s"]) - save_s,
        checkpoints=Checkpoints(every=CHECKPOINT_EVERY, save_s=save_s),
        idle_nodes=[int(count) for count in by_nodes(idle, MOST_NODES)],
    )


def varuna_without_checkpoint_cost(model: str, rates: Table | None = None) -> System:
    """Varuna with free saves every 2 iterations; restarts still load."""
    return replace(
        varuna(model, rates),
        name="varuna_no_ckpt",
        checkpoints=Checkpoints(every=CHECKPOINT_EVERY_FREE, save_s=0.0),
    )


def bamboo(model: str, rates: Table | None = None) -> System:
    """Bamboo: computes every stage twice, so that a neighbour takes over; nodes rejoin by reconfiguring.

    Raises:
        ValueError: the system cannot run the model.
    """
    table = rates or published_rates("bamboo", model)
    if not table:
        raise ValueError(f"bamboo cannot run {model}: its copies of the model states do not fit")
    times = recovery("bamboo", model)
    return System(
        name="bamboo",
        samples_per_s=by_nodes(table, MOST_NODES),
        samples_per_step=float(times["samples_per_step"]),
        recover_s=float(times["recover_s"]),
        redundant_share=1 - BAMBOO_USEFUL_SHARE,
    )


def with_spares(model: str, num_used: int) -> System:
    """Plain restart from a checkpoint on a fixed number of nodes; the others are spares."""
    table = published_rates("varuna", model)
    return replace(
        varuna(model),
        name=f"restart_{num_used}",
        samples_per_s=[table[num_used] if n >= num_used else 0.0 for n in range(MOST_NODES + 1)],
        idle_nodes=[max(0, n - num_used) for n in range(MOST_NODES + 1)],
        joins=Joins.AT_RECOVERY,
    )


@cache
def trace(name: str) -> Availability:
    """A trace of `experiments/reference`."""
    return parse_trace(name, (REFERENCE / f"{name}.csv").read_text(encoding="utf-8"))


@cache
def spot_trace(name: str) -> Availability:
    """A spot trace; a missing `..._scaled30` is made by the published rule of scaling."""
    if (REFERENCE / f"{name}.csv").is_file():
        return trace(name)
    return rescaled(trace(name.removesuffix("_scaled30")), MOST_NODES // 2, MOST_NODES, name)


@cache
def recovery(system: str, model: str) -> PrintedRow:
    return next(
        row for row in printed_rows("oobleck_recovery") if (row["system"], row["model"]) == (system, model)
    )


def _rows(system: str, model: str) -> list[PrintedRow]:
    table = printed_rows("oobleck_throughput_by_nodes")
    return [row for row in table if (row["system"], row["model"]) == (system, model)]
