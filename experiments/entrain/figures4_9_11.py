"""Figures 4.9 and 4.11: a worked pipeline before and after deferral, with whole and with split backwards.

Paper:   I. Jang, dissertation, sections 4.5.2 and 4.5.3, Figures 4.8 to 4.11; nothing of time is printed.
Setup:   six microbatches of 3 units of encoder work, one encoder stage, two LLM stages; 1F1B.
Given:   Figure 4.10b's LLM loads after deferral, from which the loads before follow: sums of pairs give all
         differences, and MB4 with MB5 standing at 6 and 6 without deferral gives 3, 4, 8, 6, 6 and 9.
Differs: samples inside a microbatch are ours. A backward takes twice its forward. Half units are ticks.
Ours:    four timelines, as text in tests/golden and as a drawing.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.entrain.replica import ReplicaChain, chain_of, nodes_of
from experiments.harness.figure import Box, timelines
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from workbench.balance.microbatches.assignment import MicrobatchAssignment
from workbench.balance.microbatches.deferral import pairwise_deferral
from workbench.schedule.action import Action, Pass
from workbench.schedule.adjacent import with_followers
from workbench.schedule.choice import Schedule
from workbench.schedule.eager import with_eager_forwards
from workbench.schedule.pass_graph import pass_graph, start_times
from workbench.schedule.programs import programs_of
from workbench.schedule.text import Slot, format_timeline

ENCODER_UNITS = ((2, 1), (1, 2), (1, 1, 1), (2, 1), (1, 2), (1, 1, 1))  # by microbatch and sample
LLM_UNITS = ((2, 1), (2, 2), (4, 2, 2), (3, 3), (3, 3), (4, 3, 2))
TICKS = 2  # of a unit: an LLM stage does half a unit's work
STAGES = {0: "vision", 1: "llm", 2: "llm"}


class Played(NamedTuple):
    """A simulated timeline: slots of every stage, and the microbatches' samples."""

    slots: Mapping[int, tuple[Slot, ...]]
    chain: ReplicaChain

    @property
    def ticks(self) -> int:
        return max(slot.end_tick for slots in self.slots.values() for slot in slots)

    def text(self) -> str:
        """The timeline as a text grid with one column per tick."""
        return format_timeline({(stage,): slots for stage, slots in self.slots.items()})


def samples() -> tuple[tuple[tuple[int, ...], ...], list[int], list[int]]:
    """Microbatches of numbered samples, and encoder and LLM units of each sample."""
    numbers = iter(range(sum(map(len, LLM_UNITS))))
    microbatches = tuple(tuple(next(numbers) for _ in units) for units in LLM_UNITS)
    return microbatches, [w for of in ENCODER_UNITS for w in of], [w for of in LLM_UNITS for w in of]


def deferred() -> MicrobatchAssignment:
    """The assignment with work deferred inside pairs."""
    microbatches, _, llm = samples()
    deferral = pairwise_deferral(microbatches, llm)
    return MicrobatchAssignment(
        encoder=tuple(microbatches[index] for index in deferral.order),
        deferred=deferral.deferred,
        llm=deferral.llm_microbatches(microbatches),
    )


def variants() -> Iterator[tuple[str, Played]]:
    """The four timelines by name."""
    microbatches, _, _ = samples()
    pairs = deferred()
    yield "before deferral", played(ReplicaChain(microbatches, {}, microbatches))
    yield "deferred, whole backwards", played(ReplicaChain(pairs.encoder, {}, pairs.llm))
    yield "deferred, split backwards", played(chain_of(pairs))
    yield "deferred, split backwards, eager forwards", played(chain_of(pairs), lead=1)


def played(chain: ReplicaChain, lead: int = 0) -> Played:
    """1F1B on one encoder and two LLM stages."""
    nodes, groups = nodes_of(chain, 1, 2), [(stage,) for stage in STAGES]
    hurried = {0: chain.followers}
    programs = {
        group: with_eager_forwards(with_followers(program, hurried), hurried, lead)
        for group, program in programs_of(nodes, groups, Schedule()).items()
    }
    graph = pass_graph(nodes, groups, lambda action: ticks_of(chain, action), backward=Pass.B)
    slots: dict[int, list[Slot]] = {stage: [] for stage in STAGES}
    for index, start in start_times(graph, programs).items():
        action = graph.actions[index]
        slots[action.stage or 0].append(Slot(action, int(start), int(start + graph.duration[index])))
    return Played(
        {
            stage: tuple(sorted(stage_slots, key=lambda s: s.start_tick))
            for stage, stage_slots in slots.items()
        },
        chain,
    )


def ticks_of(chain: ReplicaChain, action: Action) -> int:
    """Ticks of an action: 2 for an encoder unit, 1 on each LLM stage; backwards take twice as long."""
    _, encoder, llm = samples()
    is_encoder = action.stage == 0
    members = (chain.encoder if is_encoder else chain.llm)[action.microbatch or 0]
    work = sum((encoder if is_encoder else llm)[sample] for sample in members)
    return work * (TICKS if is_encoder else TICKS // 2) * (1 if action.kind is Pass.F else 2)


def boxes(timeline: Played) -> list[Box]:
    """The boxes of a timeline, for the drawing."""
    return [
        Box(stage, STAGES[stage], slot.action.kind is Pass.F, slot.start_tick, slot.end_tick)
        for stage, slots in timeline.slots.items()
        for slot in slots
    ]


@script()
def run() -> Evidence:
    """Evidence on the lengths of the four timelines, and the drawing."""
    evidence, timelines_of = Evidence(), dict(variants())
    ticks = [timeline.ticks for timeline in timelines_of.values()]
    for name, timeline in timelines_of.items():
        evidence.ours[f"itself/{name.replace(', ', '_').replace(' ', '_')}_ticks"] = timeline.ticks
        evidence.notes.append(f"{name}: {timeline.ticks} ticks")
    loads = sorted({sum(samples()[2][sample] for sample in members) for members in deferred().llm})
    evidence.claim(f"after deferral every LLM microbatch has 6 units ({loads});", loads == [6])
    evidence.claim(f"deferral shortens the step ({ticks[0]} to {ticks[2]});", ticks[2] < ticks[0])
    evidence.claim(f"split backwards shorten it ({ticks[1]} to {ticks[2]});", ticks[2] < ticks[1])
    evidence.claim(f"eager forwards do not lengthen it ({ticks[2]} to {ticks[3]});", ticks[3] <= ticks[2])
    panels = {name: boxes(timeline) for name, timeline in timelines_of.items()}
    evidence.figures["entrain_figures4_9_11"] = timelines(panels, "ticks")
    return evidence
