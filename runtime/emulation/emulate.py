"""Runs all ranks of a plan in this process, one action at a time, each timed alone.

Every rank is a thread with the executor, stage modules, feed and optimizer that it has in a
distributed run; only what ranks say to each other stays in memory (`thread_mesh`), and only one of
them runs at a time (`turn`), in an order that the plan's dependencies allow (`legal_order`).
Losses, gradients and weights are those of the distributed run: to the last bit where no sum is
over more than two ranks, else to the rounding of sums in another order.

On a GPU every stamp waits for the device, so that an action's kernels, and copies and sums made for
other ranks, have ended before the next action's clock starts.

Differs: from a distributed run, no action sees another rank's load on caches, memory or links,
and sending costs its sender nothing. Where ranks share cores, the simulator shares them out. On a GPU
the host is never ahead of the device when an action begins.
"""

import gc
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import DataSource, SyntheticSource
from runtime.emulation.memory import check_fits
from runtime.emulation.thread_groups import ThreadGroups
from runtime.emulation.thread_mesh import Mailbox, ThreadMesh
from runtime.emulation.times import Absences, OwnWork, Timings, median_timings, own_work
from runtime.emulation.turn import Runner, Turns
from runtime.launch import Progress, StepLosses
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.tensor.group import TensorGroup
from runtime.rank_job import Build, run_steps
from runtime.rank_report import RankReport, RankState
from runtime.run_settings import Collect, RunSettings
from runtime.state.weights_export import exporting
from runtime.step.first_weights import DrawnWeights
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.world.clock import HOST, Clock, SynchronousClock
from runtime.world.device import CPU, kind_of_device
from runtime.world.pool import Place
from runtime.world.yardstick import Yardstick
from workbench.float_sum import float_sum
from workbench.plan.lowered import Lowered
from workbench.plan.order import followers_of, one_by_one
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_boundaries
from workbench.plan.stage import Stage
from workbench.schedule.action import STEP, Action
from workbench.schedule.precedence import in_order
from workbench.trace import Lane

MOST_NAMED = 8  # ranks, of programs that cannot go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """An emulated plan.

    Args:
        order: the actions of one step, in the order in which they were done.
        timed: of every timed step, repetition by repetition.
        timings: the medians over all timed steps.
        losses: of every step of the first repetition, warm-up included.
        states: per rank, where they were collected.
        peaks: rank -> most bytes that it held in a timed step, where memory was watched.
        device: on which all of it ran, as torch names it.
        kind: of that device, as profiles name it.
        yardsticks_s: of every timed step, what the yardstick took beside it.
    """

    order: tuple[Action, ...]
    timed: tuple[Timings, ...]
    timings: Timings
    losses: tuple[float, ...]
    states: tuple[RankState, ...]
    peaks: Mapping[int, int]
    device: str
    kind: str
    yardsticks_s: tuple[float, ...] = ()

    @property
    def num_timed(self) -> int:
        return len(self.timed)

    def of_step(self, index: int) -> "Emulation":
        """One timed step, as if it were the only one."""
        return replace(
            self,
            timed=(self.timed[index],),
            timings=self.timed[index],
            yardsticks_s=self.yardsticks_s[index : index + 1],
        )


def emulate(
    lowered: Lowered,
    settings: RunSettings,
    *,
    device: torch.device = CPU,
    source: DataSource | None = None,
    build: Build = build_stage_module,
    drawn: DrawnWeights | None = None,
    progress: Progress | None = None,
) -> Emulation:
    """Run a plan's ranks as threads of this process, one action at a time.

    Weights, gradients and optimizer state of all ranks live here at once; a frozen weight is
    stored once, however many ranks hold it.

    Args:
        lowered: the plan.
        settings: how; the timed steps of all repetitions make the medians.
        device: that plays all ranks.
        source: data; None: synthetic, from the seed.
        build: how stages become modules; others than the plan's own are not asked whether they fit.
        drawn: keeps the weights that are drawn for emulations that come later; None: they are not kept.
        progress: called with (steps done, of how many, the loss) after every step.

    Raises:
        ValueError: programs that cannot go on, a plan that does not fit here, weights, data or a
            folder to export to that were refused, memory to be watched of several ranks.
        RankError: an action failed or did not end in time; the message names rank and action.
    """
    if settings.following.batches:
        raise ValueError("emulation repeats one batch, as its medians are of equal steps; got following ones")
    check_boundaries(lowered.plan, "emulated ranks")
    if shard_units(lowered.plan):
        raise ValueError(
            "emulation stores a frozen weight once for all ranks, so weights are not sharded; want "
            "sharding none or optimizer, or a run with a process for each rank"
        )
    if settings.collect is Collect.MEMORY and len(lowered.plan.ranks) > 1:
        raise ValueError(
            f"emulated ranks share this process's memory: it is measured for plans of one rank, "
            f"got {len(lowered.plan.ranks)}"
        )
    order = legal_order(lowered)
    if build is build_stage_module:
        check_fits(lowered, order, device)
        build = partial(build_stage_module, drawn=drawn)
    ranks = _Ranks(lowered, settings, source or SyntheticSource(settings.seed), build, device)
    try:
        with exporting(
            settings.export, lowered.plan.model, settings.weights, dtype=settings.dtype(lowered.plan)
        ):
            reports = ranks.run(order, progress)
    except torch.OutOfMemoryError as error:  # while stages are built; in an action it names the rank
        raise ValueError(f"emulation of {len(lowered.plan.ranks)} ranks: {error}") from error
    result = _result(order, ranks, reports)
    del ranks, reports
    gc.collect()  # modules and their graphs hang together in rings: their memory is the next emulation's
    return result


def clock_of(device: torch.device) -> Clock:
    """The clock of an action that is timed alone."""
    return HOST if device.type == "cpu" else SynchronousClock(device)


class _Ranks:
    """All ranks of one emulation."""

    def __init__(
        self,
        lowered: Lowered,
        settings: RunSettings,
        source: DataSource,
        build: Build,
        device: torch.device,
    ) -> None:
        self._lowered, self._settings = lowered, settings
        self._source, self._build, self.device = source, build, device
        self._frozen: dict[tuple[str, str, tuple[tuple[int, int], ...]], Tensor] = {}
        self._clock = clock_of(device)
        self._turns = Turns(settings.timeout_s, self._clock.stamp)
        self._mailbox = Mailbox(self._turns)
        self._reports: dict[int, RankReport] = {}
        self._losses: StepLosses | None = None
        self.meshes: dict[int, ThreadMesh] = {}

    def run(self, order: tuple[Action, ...], progress: Progress | None) -> list[RankReport]:
        """All steps of all repetitions."""
        ranks = self._lowered.plan.ranks
        num_steps = self._settings.repetitions * (self._settings.warmup + self._settings.steps)
        self._losses = None if progress is None else StepLosses(len(ranks), num_steps, progress)
        was_enabled, is_callers = gc.isenabled(), gc.get_freeze_count() > 0
        gc.freeze()  # every rank collects before every step; what was there before is not looked at again
        try:
            for rank in ranks:
                self._turns.start(rank, self._live)
            for _ in range(num_steps):
                self._step(order)
            self._turns.bring(ranks, lambda runner: runner.has_ended)
        finally:
            self._turns.close()
            if not is_callers:  # else what the caller froze would be looked through again too
                gc.unfreeze()
            (gc.enable if was_enabled else gc.disable)()
        return [self._reports[rank] for rank in ranks]

    def runner(self, rank: int) -> Runner:
        return self._turns.runners[rank]

    def _step(self, order: tuple[Action, ...]) -> None:
        """Bring all ranks to their first action, then each action to its end."""
        program = self._lowered.plan.program
        self._turns.bring(self._lowered.plan.ranks, lambda runner: runner.place == 0)
        for action in order:
            positions = {rank: program[rank].index(action) for rank in self._lowered.plan.ranks_of(action)}
            assert all(self.runner(rank).place == at for rank, at in positions.items()), action
            self._turns.bring(tuple(positions), partial(_has_left, positions))

    def _live(self, runner: Runner) -> None:
        """A rank's thread."""
        torch.set_num_threads(self._settings.threads)  # counts for this thread
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        ranks = self._lowered.plan.ranks
        mesh = ThreadMesh(
            rank=runner.rank,
            ranks=ranks,
            device=self.device,
            clock=self._clock,
            mailbox=self._mailbox,
            runner=runner,
        )
        self.meshes[runner.rank] = mesh
        process = ranks.index(runner.rank)

        def report(position: int) -> None:
            runner.place = position
            self._turns.hand_back(runner)
            gc.disable()  # a rank whose step is over has turned it on

        def tell(news: object) -> None:
            if self._losses is not None:
                assert isinstance(news, float)
                self._losses(process, news)

        # The collectives inside a backward hand the turn on: it must stay on this thread.
        with torch.autograd.set_multithreading_enabled(False):
            self._reports[runner.rank] = run_steps(
                Place(process, len(ranks), report, tell),
                mesh,
                self._lowered,
                self._settings,
                self._source,
                self._build_stage,
                ThreadGroups(),
                yardstick=Yardstick(self.device) if process == 0 else None,  # one for all: they take turns
            )
        runner.place = -1

    def _build_stage(
        self,
        plan: Plan,
        stage: Stage,
        *,
        tensor: TensorGroup | None,
        experts: ExpertGroup | None,
        **how: Any,
    ) -> StageModule:
        """A stage whose frozen weights are stored once in this process; arguments as of `Build`."""
        module = self._build(plan, stage, tensor=tensor, experts=experts, **how)
        for name, parameter in module.named_weights():
            if not parameter.requires_grad:
                key = (stage.module, name, tuple(_part_of(module, name, tensor, experts)))
                parameter.data = self._frozen.setdefault(key, parameter.data)
        return module


def _part_of(
    module: StageModule, name: str, tensor: TensorGroup | None, experts: ExpertGroup | None
) -> Iterator[tuple[int, int]]:
    """(Member, of how many) for every way in which a weight is a part; none where it is whole."""
    for group, cuts in ((tensor, module.cuts), (experts, module.expert_cuts)):
        if group is not None and name in cuts:
            yield group.member, group.size


def _has_left(positions: Mapping[int, int], runner: Runner) -> bool:
    return runner.place != positions[runner.rank]


def _result(order: tuple[Action, ...], ranks: _Ranks, reports: list[RankReport]) -> Emulation:
    num_timed = len(reports[0].notes)
    works: list[dict[Action, dict[int, OwnWork]]] = [{} for _ in range(num_timed)]
    steps_s: list[dict[int, float]] = [{} for _ in range(num_timed)]
    for report in reports:
        absences = Absences(ranks.runner(report.rank).away_s)
        exchanges = sorted(ranks.meshes[report.rank].exchanges, key=lambda exchange: exchange.wait_s)
        waits_s = [exchange.wait_s[0] for exchange in exchanges]
        for step, notes in enumerate(report.notes):
            for span in (span for span in notes.spans if span.lane is Lane.COMPUTE):
                work = own_work(span.start_s, span.end_s, absences, exchanges, waits_s)
                if span.action == STEP:
                    steps_s[step][report.rank] = work.own_s
                else:
                    works[step].setdefault(span.action, {})[report.rank] = work
    timed = tuple(
        Timings(works=of_step, steps_s=seconds) for of_step, seconds in zip(works, steps_s, strict=True)
    )
    return Emulation(
        order=order,
        timed=timed,
        timings=median_timings(timed),
        losses=tuple(
            float_sum(losses) for losses in zip(*(report.losses for report in reports), strict=True)
        ),
        states=tuple(report.state for report in reports if report.state is not None),
        peaks={
            report.rank: max(sample.num_bytes for notes in report.notes for sample in notes.memory)
            for report in reports
            if any(notes.memory for notes in report.notes)
        },
        device=str(ranks.device),
        kind=kind_of_device(ranks.device),
        yardsticks_s=tuple(statistics.harmonic_mean(notes.yardstick_s) for notes in reports[0].notes),
    )


def legal_order(lowered: Lowered) -> tuple[Action, ...]:
    """All actions of a plan, each once, after everything that it depends on.

    An action comes when it is next on all ranks of its stage (STEP: on all ranks), the actions
    that produce its rows are done, and a backward's forward. Among those that could come, the one
    that could first does; at a tie the one whose program stands first. So two calls give the same order.

    Raises:
        ValueError: programs that cannot go on; the message names ranks, actions and what is missing.

    Complexity: O(actions + rows).
    """
    there = lowered.plan.program_actions
    needed = [(needed, action) for action in there for needed in _needed(lowered, action)]
    nowhere = {earlier for earlier, _ in needed}.difference(there)  # each waits for itself, forever
    actions = (*there, *nowhere)
    edges = chain(one_by_one(lowered.plan, lambda _: True), needed, zip(nowhere, nowhere, strict=True))
    order = in_order(followers_of(actions, edges))
    if len(order) < len(actions):
        raise ValueError(_report(lowered, {actions[index] for index in order}))
    return tuple(actions[index] for index in order)


def _needed(lowered: Lowered, action: Action) -> dict[Action, None]:
    """What produces its rows, and the pass of its own stage that it continues."""
    producers = dict.fromkeys(lowered.transfers[row].producer for row in lowered.inputs.get(action, ()))
    return producers if action.continues is None else producers | {action.continues: None}


def _report(lowered: Lowered, done: Collection[Action]) -> str:
    plan = lowered.plan
    unfinished = {
        rank: [a for a in program if a not in done] for rank, program in sorted(plan.program.items())
    }
    stuck = {rank: actions[0] for rank, actions in unfinished.items() if actions}
    reports = []
    for rank, action in list(stuck.items())[:MOST_NAMED]:
        needed = next((needed for needed in _needed(lowered, action) if needed not in done), None)
        others = [other for other in plan.ranks_of(action) if stuck.get(other) != action]
        missing = f"ranks {others}" if needed is None else str(needed)
        reports.append(f"rank {rank} before {action} waits for {missing}")
    more = f" and {len(stuck) - MOST_NAMED} more ranks" if len(stuck) > MOST_NAMED else ""
    return f"the programs cannot go on: {'; '.join(reports)}{more}"
