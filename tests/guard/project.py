"""All that the guard asks of the project: where a module moves, this file alone follows it.

Answers are JSON data: numbers, names and digests of exact floats.
"""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import Any

import torch

from experiments.harness.outcome import Outcome
from experiments.harness.record import RESULTS, as_record
from experiments.mimo import figure11, loss_curves, parity_grid
from experiments.mimo.parity_grid_runs import plan_of as grid_plan
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from sim.step.engine import simulate
from sim.step.sweep import Sweep
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import job_from_spec
from workbench.job.schema import JobSpec
from workbench.memory.account import MemoryTable, peak_bytes
from workbench.plan import codec
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Precision
from workbench.planner.stage_counts import silent
from workbench.schedule.action import SPELLINGS, Action, Spelling
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import PLANNERS, PRICED
from workbench.timing.accept import accept
from workbench.timing.price import price
from workbench.whole_file import write_text

Facts = dict[str, Any]  # JSON data
NEWEST = codec.SCHEMA_VERSION
UNNAMED_SINCE = codec.UNNAMED_SINCE

STRATEGIES = tuple(str(name) for name in PLANNERS | PRICED)
SCHEDULES = tuple(str(kind) for kind in ScheduleKind)
RESULT_FILES = RESULTS
write_whole = write_text
MOST_RANKS = 8
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """A plan after every check there is, lowered, its memory, and what prices it."""

    lowered: Lowered
    memory: MemoryTable
    cost: CostModel

    @property
    def plan_hash(self) -> str:
        """Equal for plans that differ in the strategy's name only."""
        return codec.plan_hash(self.lowered.plan)

    @property
    def strategy(self) -> str:
        """The name that the plan has."""
        return self.lowered.plan.strategy


def accepted(job: Mapping[str, Any], strategy: str, schedule: str) -> Accepted:
    """The strategy's plan of a job.yaml's content under a schedule; ValueError where it is refused."""
    spec = JobSpec.model_validate({**job, "schedule": {"kind": schedule}})
    wanted = job_from_spec(spec, folder=Path())
    plan = (PLANNERS | PRICED)[strategy](wanted, _cost(wanted.profile), silent)
    return accepted_plan(plan, wanted.profile)


def accepted_plan(plan: Plan, profile: str) -> Accepted:
    """A plan, priced by a profile; ValueError where it is refused."""
    return Accepted(*accept(plan), _cost(profile))


@cache
def _cost(profile: str) -> CostModel:
    return CostModel(load_profile(profile))


def plan_facts(of: Accepted, version: int = NEWEST) -> Facts:
    """The plan, what simulator and sweep make of it, and its memory; names and hashes as in a version."""
    lowered, plan = of.lowered, of.lowered.plan
    text, spelling = codec.dumps(plan, version), SPELLINGS[version]
    if codec.loads(text) != plan:
        raise AssertionError(f"plan {of.plan_hash}: not what its file of version {version} is read as")
    prices = price(lowered, of.cost)
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=of.memory)
    times = Sweep(lowered).times(prices.duration_s, prices.step_s)
    moved = [
        sorted(
            (rank, spelling.write(action), size)
            for rank, sizes in table.items()
            for action, size in zip(plan.program.get(rank, ()), sizes, strict=True)
            if size
        )
        for table in (of.memory.acquired_bytes, of.memory.released_bytes)
    ]
    return {
        "hash": codec.hash_of_version(plan, version),
        "bytes": digest([text]),
        "engine": digest(
            [
                [_plain(record, spelling) for record in part]
                for part in (trace.spans, trace.messages, trace.memory)
            ]
        ),
        "sweep": digest([_table(part, spelling) for part in (times.passes, times.steps, times.messages)]),
        "iteration_s": [trace.iteration_s, times.iteration_s],
        "static_bytes": list(of.memory.static_bytes.values()),
        "peak_bytes": list(peak_bytes(lowered, of.memory).values()),
        "memory": digest(moved),
    }


def run_facts(of: Accepted, pool: Pool) -> Facts:
    """One step on gloo processes in float64, from the weights and the data of seed 0."""
    settings = RunSettings(precision=Precision.FLOAT64, collect=Collect.STATE, timeout_s=TIMEOUT_S)
    result = run_lowered(of.lowered, settings, pool=pool)
    return {
        "loss": result.losses[0],
        "gradient_norm": _norm(result),
        "gradients": digest(_tensors((state.rank, state.gradients) for state in result.states)),
        "weights": digest(_tensors((state.rank, state.weights) for state in result.states)),
    }


def workers() -> Pool:
    """Processes for `run_facts`."""
    return Pool(MOST_RANKS)


def machine() -> dict[str, str]:
    """What the bits of a step depend on besides the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    cpu = [told[key] for key in ("model name", "cpu family", "model", "stepping") if key in told]
    return {
        "cpu": " ".join(cpu) or platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def script_run(script: str) -> Callable[[], Outcome]:
    """What makes a table or figure of a paper, by the name that its result file has."""
    run: Callable[[], Outcome] = import_module(f"experiments.{script.replace('/', '.')}").run
    return run


def table_facts(script: str) -> tuple[list[str], Facts]:
    """The plan hashes of a table or figure of a paper, made again, and what it says of the paper."""
    outcome = script_run(script)()
    said = {"verdict": str(outcome.verdict), "ours": digest(as_record(outcome)["ours"])}
    return list(outcome.plan_hashes), said


def grid_hashes() -> list[str]:
    """Of the grid of layouts; points that are refused have none."""
    found = []
    for point in (*parity_grid.one_encoder(), *parity_grid.two_encoders()):
        try:
            plan = grid_plan(dict(zip(point.modules, point.layouts, strict=True)), point.placement)
        except ValueError:
            continue
        found.append(codec.plan_hash(plan))
    return found


def loss_curve_hashes() -> list[str]:
    """Of the runs whose loss curves are kept."""
    return [codec.plan_hash(loss_curves.plan_of(run)) for run in loss_curves.runs()]


def figure11_hashes() -> list[str]:
    """Of the runs of Figure 11."""
    return [codec.plan_hash(figure11.plan_of(played)) for played in figure11.chosen()]


def digest(content: object) -> str:
    """128 bits of the content as JSON; floats are told apart to the last bit."""
    return blake2b(dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _plain(record: Sequence[object], spelling: Spelling) -> list[object]:
    """Fields of a span, message or sample, with actions and lanes by name."""
    return [value if isinstance(value, int | float) else _name(value, spelling) for value in record]


def _table(times: Mapping[Any, Sequence[float]], spelling: Spelling) -> list[list[object]]:
    return sorted([_name(key, spelling), *seconds] for key, seconds in times.items())


def _name(value: object, spelling: Spelling) -> str:
    return spelling.write(value) if isinstance(value, Action) else str(value)


def _tensors(of_ranks: Iterable[tuple[int, Mapping[tuple[str, str], torch.Tensor]]]) -> list[str]:
    """Rank, name, shape and bytes of every tensor, in order of rank and name."""
    return [
        f"{rank} {name} {list(held[name].shape)} {digest(held[name].contiguous().numpy().tobytes().hex())}"
        for rank, held in of_ranks
        for name in sorted(held)
    ]


def _norm(result: RunResult) -> float:
    """Of all gradients on all ranks."""
    every = (tensor for state in result.states for tensor in state.gradients.values())
    return math.sqrt(math.fsum(float((tensor.double() ** 2).sum()) for tensor in every))
