"""Speed of the simulator: actions per second, and one iteration on 24 and on 1,296 GPUs.

Setup:   vision + audio + LLM of published sizes, 1F1B over the model's DAG, priced with the H100
         profile; links, memory over time and the trace are on in every figure.
Ours:    time of `sim.step.engine.simulate` alone, the fastest of several repeats, in CPU seconds of its one
         thread: wall time where it has a core to itself. An action counts once, on however many ranks it
         runs. The same plan of 24 stages on one GPU each also runs in SimPy's textbook model
         (`rivals.textbook`), in the same run, alternating. So does SimPy alone: a process per GPU that waits
         one timeout after another. Actions a second over those timeouts a second shows what the engine adds
         to the clock. The sweep (`sim.step.sweep`) times every plan too, compiled once; its times must be
         equal. Plans a second, all different, from model to time: see `plan_speed`. Rows of `workbench
         predict`: see `row_speed`.
Run:     python -m experiments.bench.sim_speed [--json]
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

from experiments.bench.plan_speed import plan_rates
from experiments.bench.rivals.textbook import simulate_textbook, timeouts_per_s
from experiments.bench.row_speed import row_rates
from experiments.bench.speed_cases import CASES, PROFILE, Case, plan_of
from experiments.harness.command import Found, bench, timed
from sim.step.engine import simulate
from sim.step.sweep import Sweep
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.memory.account import MemoryTable, check_memory, memory_table
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.timing.price import price

REPEATS = 5
BARE_TIMEOUTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """CPU seconds of planning and simulating one plan.

    Args:
        planning_s: building, hashing, lowering and pricing it, once.
        engine_s: one simulation, from a lowered plan not analysed before, with trace.
        bare_timeouts_per_s: of SimPy alone, with a process a GPU.
        compile_s: making a sweep of it, once.
        sweep_s: one timing by the sweep, prices asked anew.
        sweep_is_equal: whether both found the same iteration time, to the last bit.
    """

    name: str
    num_gpus: int
    num_actions: int
    num_spans: int
    num_messages: int
    planning_s: float
    engine_s: float
    bare_timeouts_per_s: float
    compile_s: float
    sweep_s: float
    sweep_is_equal: bool
    simulated_s: float

    @property
    def actions_per_s(self) -> float:
        return self.num_actions / self.engine_s

    @property
    def engine_over_bare_simpy(self) -> float:
        return self.actions_per_s / self.bare_timeouts_per_s

    @property
    def sweep_actions_per_s(self) -> float:
        return self.num_actions / self.sweep_s


def measure(case: Case) -> tuple[SpeedRow, Lowered, Callable[[Action], float], MemoryTable]:
    """Plan once, simulate several times."""
    started = time.process_time()
    lowered = lower(plan_of(case))
    duration_s = price(lowered, CostModel(load_profile(PROFILE))).duration_s
    memory = memory_table(lowered)
    check_memory(lowered, memory)
    plan_hash(lowered.plan)
    planning_s = time.process_time() - started
    engine, bare = [], []
    for _ in range(REPEATS):
        unseen = replace(lowered)  # without the task graph that it keeps
        engine.append(timed(partial(simulate, unseen, duration_s, memory=memory), time.process_time))
        bare.append(timeouts_per_s(len(lowered.plan.ranks), BARE_TIMEOUTS))
    trace = engine[0][1]
    compile_s, sweep = timed(partial(Sweep, replace(lowered)), time.process_time)
    sweep.iteration_s(duration_s)  # compiles the loop where no cache has it
    swept = [timed(lambda: sweep.iteration_s(duration_s), time.process_time) for _ in range(REPEATS)]
    row = SpeedRow(
        name=case.name,
        num_gpus=len(lowered.plan.ranks),
        num_actions=_num_actions(lowered.plan),
        num_spans=len(trace.spans),
        num_messages=len(trace.messages),
        planning_s=planning_s,
        engine_s=min(seconds for seconds, _ in engine),
        bare_timeouts_per_s=max(bare),
        compile_s=compile_s,
        sweep_s=min(seconds for seconds, _ in swept),
        sweep_is_equal=swept[0][1] == trace.iteration_s,
        simulated_s=trace.iteration_s,
    )
    return row, lowered, duration_s, memory


def _num_actions(plan: Plan) -> int:
    """Number of distinct actions of stages, plus one STEP per rank."""
    of_stages = {
        action for program in plan.programs for action in program.actions if action.stage is not None
    }
    return len(of_stages) + len(plan.ranks)


def against_textbook(
    lowered: Lowered, duration_s: Callable[[Action], float], memory: MemoryTable
) -> dict[str, float | bool]:
    """Time both simulators on one plan, alternating; the fastest of each."""
    engine_s: list[float] = []
    textbook_s: list[float] = []
    iterations: list[float] = []
    for _ in range(REPEATS):
        for times, run in ((engine_s, simulate), (textbook_s, simulate_textbook)):
            seconds, trace = timed(partial(run, lowered, duration_s, memory=memory), time.process_time)
            times.append(seconds)
            iterations.append(trace.iteration_s)
    return {
        "engine_s": min(engine_s),
        "textbook_s": min(textbook_s),
        "textbook_over_engine": min(textbook_s) / min(engine_s),
        "same_iteration_s": len(set(iterations)) == 1,
    }


@bench()
def run() -> Found:
    print(
        "plan         GPUs  actions    spans messages  planning  simulating  actions/s"
        " over SimPy     sweep  actions/s  iteration"
    )
    rows = []
    for case in CASES:
        row, lowered, duration_s, memory = measure(case)
        rows.append(row)
        print(
            f"{row.name:10} {row.num_gpus:6} {row.num_actions:8} {row.num_spans:8} {row.num_messages:8} "
            f"{row.planning_s:7.2f} s {row.engine_s * 1e3:8.1f} ms {row.actions_per_s:10.0f} "
            f"{row.engine_over_bare_simpy:10.3f} "
            f"{row.sweep_s * 1e3:6.1f} ms {row.sweep_actions_per_s:10.0f} "
            f"{row.simulated_s:8.3f} s"
        )
        if case is CASES[0]:
            textbook = against_textbook(lowered, duration_s, memory)
    print(
        f"textbook SimPy on {rows[0].name}: {textbook['textbook_s'] * 1e3:.1f} ms, "
        f"{textbook['textbook_over_engine']:.2f} times the engine's"
    )
    rates = list(plan_rates())
    for rate in rates:
        steps = ", ".join(f"{step} {seconds * 1e3:.0f}" for step, seconds in rate.seconds.items())
        print(f"plans of {rate.name}: {rate.plans_per_s:.2f} a second (ms each: {steps})")
    predicted = row_rates()
    print(
        f"rows: {predicted.rows_per_s:.2f} a second, {predicted.row_median_s:.3f} s in the median, "
        f"{predicted.row_worst_s:.3f} s at most"
    )
    of_gpus = {rate.name: rate.plans_per_s for rate in rates}
    result = {
        "engine_actions_per_s": rows[0].actions_per_s,
        "iteration_24_gpu_s": rows[1].engine_s,
        "iteration_1296_gpu_s": rows[2].engine_s,
        "sweep_actions_per_s": rows[0].sweep_actions_per_s,
        "sweep_iteration_1296_gpu_s": rows[2].sweep_s,
        "sweep_is_equal": all(row.sweep_is_equal for row in rows),
        "plans_per_s_24_gpu": of_gpus["24 GPUs"],
        "plans_per_s_1296_gpu": of_gpus["1296 GPUs"],
        "plans": [asdict(rate) for rate in rates],
        "rows_per_s": predicted.rows_per_s,
        "row_median_s": predicted.row_median_s,
        "row_worst_s": predicted.row_worst_s,
        "predicted_rows": [asdict(row) for row in predicted.rows],
        "textbook": textbook,
        "engine_over_bare_simpy": rows[2].engine_over_bare_simpy,
        "rows": [asdict(row) | {"engine_over_bare_simpy": row.engine_over_bare_simpy} for row in rows],
    }
    return Found(result)
