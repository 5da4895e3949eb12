"""Section 2.5: nodes are killed and join at random during training, and the losses do not change.

Paper:   I. Jang, dissertation, sections 2.5 and 2.6: survivors keep their state, missing layers are copied,
         the iteration that was cut off is repeated. It prints no recovery time to compare with.
Setup:   8 nodes of 2 ranks, each a gloo process; f = 1 and n0 = 2, so that 4 nodes are the least. A Llama of
         6 blocks, tied embeddings, AdamW, float32, new samples in every step. Nodes get SIGKILL in a
         forward, a backward, a reduction, after their vote, or while a recovery from another kill runs;
         one to four at once; nodes join at random, and some are warned instead of killed.
Ours:    executed. The same job undisturbed gives the losses to compare with. After a refusal new nodes resume
         from the progress it saved or, where the last copy of a layer was lost, from the last save.
Times:   detection is from SIGKILL to the supervisor's first sign of it; stopping, until all survivors answer;
         planning, groups and copying (slowest rank) as the processes measure them.
Run:     python -m experiments.oobleck.chaos [--kills 50] [--seed 0] [--json]
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count, pairwise
from pathlib import Path

from experiments.harness.command import command_line
from experiments.harness.outcome import About, Evidence, Outcome, outcome_of
from experiments.harness.script import finished
from experiments.oobleck.chaos_job import elastic_job
from runtime.elastic.history import Cause, ElasticFailed, Reshaped, StepDone
from runtime.elastic.job import ElasticJob, held_by
from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Moment
from runtime.elastic.progress import Progress, read_progress
from runtime.elastic.training import ElasticTraining
from workbench.elastic.reconfigure import CannotContinueError
from workbench.float_sum import float_sum
from workbench.plan.plan import Sharding

LOOK_EVERY_S = 0.0002
RECOVERY = (Moment.GROUPS, Moment.COPYING)


class Target(Enum):
    """The activity in which victims are killed."""

    FORWARD = (Moment.FORWARD,)
    BACKWARD = (Moment.BACKWARD,)
    REDUCTION = (Moment.REDUCING,)
    VOTED = (Moment.VOTED,)
    RECOVERY = RECOVERY
    GATHERING = (Moment.GATHERING,)  # where weights are sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """Nodes that are killed together, when the first of them reaches the target activity."""

    victims: tuple[str, ...]
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A killed node, and the last activity of the rank that was hit."""

    node: str
    moment: Moment
    time_s: float  # on the machine's monotonic clock


class Killer(threading.Thread):
    """Fires its shots in order; one whose target activity never comes fires after a timeout.

    One random rank of each victim is hit; the supervisor ends the rest of the node.
    """

    def __init__(self, nodes: Nodes, shots: Sequence[Shot], rng: random.Random, patience_s: float) -> None:
        super().__init__(name="killer", daemon=True)
        self._nodes, self._shots, self._patience_s = nodes, shots, patience_s
        self._places = {victim: rng.random() for shot in shots for victim in shot.victims}
        self._delay_s = [rng.uniform(0, 0.003) for _ in shots]
        self.kills: list[Kill] = []

    def run(self) -> None:
        for shot, delay_s in zip(self._shots, self._delay_s, strict=True):
            deadline = time.monotonic() + self._patience_s
            while time.monotonic() < deadline and not self._is_seen(shot):
                time.sleep(LOOK_EVERY_S)
            time.sleep(delay_s)
            for victim in shot.victims:
                self._hit(victim)

    def _is_seen(self, shot: Shot) -> bool:
        return any(moment in shot.target.value for moment in self._nodes.moments(shot.victims[0]))

    def _hit(self, victim: str) -> None:
        processes, moments = self._nodes.process_ids(victim), self._nodes.moments(victim)
        if not processes or len(moments) != len(processes):
            return  # it is gone already
        index = int(self._places[victim] * len(processes))
        with suppress(ProcessLookupError):
            os.kill(processes[index], signal.SIGKILL)
            self.kills.append(Kill(node=victim, moment=moments[index], time_s=time.monotonic()))


KILLS, SEED = 50, 0
NUM_NODES, RANKS_PER_NODE, LAYERS_PER_RANK = 8, 2, 2
AT_ONCE = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4)
SAVE_EVERY = 10  # steps, for the case that the last copy of a layer is lost
PATIENCE_S = 1.0
JOIN_RATE, WARN_RATE = 0.85, 0.15
REL_TOL = 1e-5  # of a loss in float32
REPLANNING_GOAL_S = 0.1
LOOK_UP_GOAL_S = 0.01  # of a plan that was made beside training


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One training, from the seed or a save until a refusal or the end."""

    first: int
    steps: tuple[StepDone, ...]
    changes: tuple[Reshaped, ...]


@dataclass(slots=True)
class Ordeal:
    """The record of all sessions."""

    sessions: list[Session] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    num_wrong_refusals: int = 0
    num_warned: int = 0

    @property
    def steps(self) -> list[StepDone]:
        return [step for session in self.sessions for step in session.steps]

    @property
    def is_in_order(self) -> bool:
        """Whether every session executed consecutive steps."""
        return all(
            [step.step for step in session.steps]
            == list(range(session.first, session.first + len(session.steps)))
            for session in self.sessions
        )

    @property
    def num_last_copies_lost(self) -> int:
        """Refusals because no node held some layer."""
        return sum("all nodes that held layer" in text for text in self.refusals)

    @property
    def num_too_few_nodes(self) -> int:
        """Refusals because too few nodes were left."""
        return sum("nodes are left" in text for text in self.refusals)

    @property
    def changes(self) -> list[Reshaped]:
        return [change for session in self.sessions for change in session.changes]

    @property
    def recoveries(self) -> list[Reshaped]:
        return [change for change in self.changes if change.cause is Cause.LOSS]

    @property
    def disturbed_starts(self) -> list[Reshaped]:
        """First worlds whose formation was interrupted by a kill; their time includes forking."""
        return [change for change in self.changes if change.cause is Cause.START and change.attempts > 1]

    @property
    def num_redone(self) -> int:
        """Steps that were repeated because the last copy of a layer was lost after a save."""
        pairs = pairwise(self.sessions)
        return sum(before.first + len(before.steps) - after.first for before, after in pairs)


class Chaos:
    """Runs one job through kills, warnings and joins until enough nodes have been killed."""

    def __init__(self, job: ElasticJob, kills: int, rng: random.Random, folder: Path) -> None:
        self._job, self._kills, self._rng, self._folder = job, kills, rng, folder
        self._names = (f"node{number}" for number in count())
        self._saves = count()
        self._saved: Progress | None = None
        self._warned: frozenset[str] = frozenset()
        self.ordeal = Ordeal()

    def run(self) -> Ordeal:
        """Train, restarting after every refusal."""
        while len(self.ordeal.kills) < self._kills:
            self._train_until_refused()
        return self.ordeal

    def _train_until_refused(self) -> None:
        nodes = [next(self._names) for _ in range(self._job.templates.specification.num_nodes)]
        first = 0 if self._saved is None else self._saved.step
        with ElasticTraining(self._job, nodes, start=self._saved) as training:
            try:
                while len(self.ordeal.kills) < self._kills:
                    self._disturb(training)
                training.train(training.step + 2)
            except CannotContinueError as error:
                self._judge(training, str(error))
                with suppress(ElasticFailed):  # copies of a layer are gone
                    self._saved = self._save(training)
        session = Session(first=first, steps=tuple(training.steps), changes=tuple(training.changes))
        self.ordeal.sessions.append(session)

    def _save(self, training: ElasticTraining) -> Progress:
        return read_progress(self._job, training.save(self._folder / f"save{next(self._saves)}").folder)

    def _disturb(self, training: ElasticTraining) -> None:
        """Train a few steps with a disturbance of the nodes."""
        rng, steps = self._rng, self._rng.randint(2, 4)
        if training.step - (self._saved.step if self._saved else 0) >= SAVE_EVERY:
            self._saved = self._save(training)
        missing = self._job.templates.specification.num_nodes - training.layout.num_nodes
        if missing > 0 and rng.random() < JOIN_RATE:
            training.join([next(self._names) for _ in range(rng.randint(1, missing))])
        at_work = list(training.layout.nodes)
        self._warned = frozenset()
        if rng.random() < WARN_RATE:
            self._warned = frozenset(rng.sample(at_work, rng.randint(1, 2)))
            self.ordeal.num_warned += len(self._warned)
            training.warn(sorted(self._warned))
            training.train(training.step + steps)
            return
        killer = Killer(training.nodes, self._shots(at_work), rng, PATIENCE_S)
        killer.start()
        try:
            training.train(training.step + steps)
        finally:
            killer.join()
            self.ordeal.kills += killer.kills

    def _shots(self, at_work: Sequence[str]) -> list[Shot]:
        num_left = self._kills - len(self.ordeal.kills)
        targets = [each for each in Target if each is not Target.GATHERING or self._job.is_sharded]
        target, num = self._rng.choice(targets), self._rng.choice(AT_ONCE)
        if target is not Target.RECOVERY:
            return [Shot(victims=tuple(self._rng.sample(at_work, min(num, num_left))), target=target)]
        victims = tuple(self._rng.sample(at_work, 1 + num))
        first = Shot(victims=victims[:1], target=Target.BACKWARD)
        return [first, Shot(victims=victims[1:], target=target)]

    def _judge(self, training: ElasticTraining, message: str) -> None:
        """Count a refusal, and whether it was necessary, by the layers on each node of the layout."""
        self.ordeal.refusals.append(message)
        alive = {
            m: layers for m, layers in self._layers_on(training).items() if training.nodes.process_ids(m)
        }
        staying = alive.keys() - self._warned
        enough = len(staying) >= self._job.templates.specification.threshold
        layers_left = {layer for layers in alive.values() for layer in layers}
        if enough and len(layers_left) == len(self._job.chain.owners):
            self.ordeal.num_wrong_refusals += 1

    def _layers_on(self, training: ElasticTraining) -> dict[str, set[int]]:
        layers_of: dict[str, set[int]] = {}
        for member, layers in held_by(self._job, training.layout).items():
            layers_of.setdefault(member.node, set()).update(layers)
        return layers_of


def undisturbed(job: ElasticJob, steps: int) -> tuple[float, ...]:
    """Losses of the same job without disturbances."""
    nodes = [f"node{number}" for number in range(job.templates.specification.num_nodes)]
    with ElasticTraining(job, nodes) as training:
        training.train(steps)
        return training.losses


def chaos_evidence(ordeal: Ordeal, smooth: Sequence[float]) -> Evidence:
    """Evidence: losses against the undisturbed ones, steps, refusals, and recovery times."""
    evidence = Evidence()
    worst = max(abs(step.loss / smooth[step.step] - 1) for step in ordeal.steps)
    evidence.ours = {**_counts(ordeal), "worst_loss_difference": worst, **_times(ordeal)}
    steps = f"{len(ordeal.steps)} steps, {len(ordeal.sessions)} sessions"
    evidence.claim(f"no step is lost or repeated ({steps});", ordeal.is_in_order and ordeal.num_redone >= 0)
    evidence.claim(
        f"every loss is the undisturbed one within {REL_TOL:g} (worst {worst:.2g});", worst <= REL_TOL
    )
    all_explained = ordeal.num_too_few_nodes + ordeal.num_last_copies_lost == len(ordeal.refusals)
    evidence.claim(
        f"each of {len(ordeal.refusals)} refusals is named, and had to be;",
        all_explained and ordeal.num_wrong_refusals == 0,
    )
    slowest = evidence.ours.get("planning_p95_s", 0.0)
    evidence.claim(
        f"replanning takes < {REPLANNING_GOAL_S:g} s (p95 {slowest:.3f});", slowest < REPLANNING_GOAL_S
    )
    looked_up = evidence.ours.get("look_up_p95_s")
    if looked_up is not None:
        evidence.claim(
            f"a plan made beside training is looked up in < {LOOK_UP_GOAL_S:g} s (p95 {looked_up:.4f});",
            looked_up < LOOK_UP_GOAL_S,
            About.METHODS,
        )
    evidence.notes.append("executed, not simulated: 16 processes share the cores of this machine")
    return evidence


def _counts(ordeal: Ordeal) -> dict[str, float]:
    """Counts of events."""
    moments = Counter(
        "recovery" if kill.moment in RECOVERY else kill.moment.name.lower() for kill in ordeal.kills
    )
    return {
        "kills": len(ordeal.kills),
        **{f"kills_in/{name}": number for name, number in sorted(moments.items())},
        "warned": ordeal.num_warned,
        "joined": float_sum(len(change.joined) for change in ordeal.changes),
        "recoveries": len(ordeal.recoveries),
        "recoveries_of_several_nodes": sum(len(change.lost) > 1 for change in ordeal.recoveries),
        "recoveries_prepared": sum(change.is_prepared for change in ordeal.recoveries),
        "recoveries_disturbed": sum(change.attempts > 1 for change in ordeal.recoveries),
        "starts_disturbed": len(ordeal.disturbed_starts),
        "refusals_too_few_nodes": ordeal.num_too_few_nodes,
        "refusals_last_copy_lost": ordeal.num_last_copies_lost,
        "steps": len(ordeal.steps),
        "steps_redone_from_a_save": ordeal.num_redone,
    }


def _times(ordeal: Ordeal) -> dict[str, float]:
    """p50 and p95 over recoveries; detection and total only of those that were not disturbed again."""
    killed_s = {kill.node: kill.time_s for kill in ordeal.kills}
    single = [
        (min(killed_s[node] for node in change.lost), change)
        for change in ordeal.recoveries
        if change.attempts == 1 and all(node in killed_s for node in change.lost)
    ]
    parts = {
        "detection": [max(0.0, change.noticed_s - start_s) for start_s, change in single],
        "stopping": [change.stopped_s - change.noticed_s for _, change in single],
        "planning": [change.planning_s / change.attempts for change in ordeal.recoveries],
        "look_up": [
            change.planning_s for change in ordeal.recoveries if change.is_prepared and change.attempts == 1
        ],
        "groups": [change.groups_s for change in ordeal.recoveries],
        "copying": [change.copying_s for change in ordeal.recoveries],
        "recovery": [change.ready_s - start_s for start_s, change in single],
        "disturbed_recovery": [change.recovery_s for change in ordeal.recoveries if change.attempts > 1],
        "disturbed_start": [change.recovery_s for change in ordeal.disturbed_starts],
    }
    return {
        f"{name}_p{percent}_s": sorted(values)[round(percent / 100 * (len(values) - 1))]
        for name, values in parts.items()
        if values
        for percent in (50, 95)
    }


def chaos(kills: int, seed: int, sharding: Sharding = Sharding.NONE) -> Outcome:
    """Run it, in float32."""
    is_whole = sharding is Sharding.NONE
    job = elastic_job(
        NUM_NODES,
        ranks_per_node=RANKS_PER_NODE,
        layers_per_rank=LAYERS_PER_RANK * (1 if is_whole else RANKS_PER_NODE),
        ranks_per_stage=1 if is_whole else RANKS_PER_NODE,
    )
    job = replace(job, sharding=sharding)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        ordeal = Chaos(job, kills, random.Random(seed), Path(folder)).run()
    last = max(session.first + len(session.steps) for session in ordeal.sessions)
    name = "oobleck/chaos" if is_whole else "oobleck/chaos_sharded"
    return outcome_of(name, [chaos_evidence(ordeal, undisturbed(job, last))])


def main(sharding: Sharding = Sharding.NONE) -> int:
    """Run, report, write the result file."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    return finished(chaos(arguments.kills, arguments.seed, sharding), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
