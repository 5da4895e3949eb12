"""Figure 8, executed: bytes and seconds of messages from an encoder's grid to the LLM's, in real runs.

Paper:   Karnati et al., Figure 8 and appendix A.4: below 1 % of the step.
Setup:   a small SigLIP with projector before a small Llama, all trained, on gloo processes under unequal
         grids, colocated in three phases or apart; 16 samples of two images of 64 patches, float32.
Ours:    messages between modules in the traces of executed steps. Bytes are compared with the plan's. Seconds
         run from when a message is sent and its receiver has ended the pass before, until either side has
         completed it; of the rank that sends longest, the median of the steps.
Differs: processes of one machine share its cores and memory, so seconds apply to this machine under the load
         it had; bytes apply to every machine. `figure8` has the printed sizes, simulated.
Run:     python -m experiments.mimo.bridge [--json] [--steps N]
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median

from experiments.harness.command import Found, bench
from experiments.harness.record import RESULTS
from experiments.mimo.parity_grid_runs import LLAMA, SIGLIP, Layout, planned, processes_job
from runtime.launch import run_lowered
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.metrics import union_s
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import native_tokens
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Plan, Precision, Settings
from workbench.planner.rank_spans import Placement
from workbench.trace import Trace

SUMMARY = RESULTS / "mimo_bridge.json"
EDGE = "vision>llm"
NUM_SAMPLES, IMAGES, TEXT_TOKENS = 16, 2, 64
WIDTH = 256  # of the LLM
VISION = SIGLIP | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "image_size": 32,
}
LLM = LLAMA | {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    """Two grids and their placement."""

    placement: Placement
    vision: Layout
    llm: Layout

    def __str__(self) -> str:
        return f"{self.placement.value}: vision {self.vision}, llm {self.llm}"


CASES = (
    Grids(placement=Placement.SHARED, vision=Layout(1, 4, 1, 1), llm=Layout(2, 2, 1, 1)),
    Grids(placement=Placement.SHARED, vision=Layout(4, 1, 1, 1), llm=Layout(1, 4, 1, 1)),
    Grids(placement=Placement.SHARED, vision=Layout(1, 4, 1, 1), llm=Layout(2, 1, 2, 1)),
    Grids(placement=Placement.APART, vision=Layout(1, 4, 1, 1), llm=Layout(2, 1, 1, 1)),
    Grids(placement=Placement.APART, vision=Layout(2, 1, 1, 1), llm=Layout(1, 4, 1, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The transfers between modules in a step.

    Args:
        grids: the case.
        planned_bytes: features and gradients by the plan's rows between modules.
        sent_bytes: by the messages of the trace.
        boundary_s: seconds of messages between modules, for the rank that sends longest.
        step_s: seconds of the iteration.
    """

    grids: str
    planned_bytes: int
    sent_bytes: int
    boundary_s: float
    step_s: float

    @property
    def share(self) -> float:
        return self.boundary_s / self.step_s


@cache
def model() -> ModelGraph:
    """The model, all of it trained."""
    vision = module_from_config(
        VISION, name="vision", modality="image", trainable=Trainable.ALL, llm_width=WIDTH
    )
    llm = module_from_config(LLM, name="llm", modality=TEXT, trainable=Trainable.ALL)
    return connect("bridge", (vision, llm))


def plan_of(grids: Grids) -> Plan:
    """The plan of a case."""
    tokens = native_tokens(model().module("vision"))
    assert tokens is not None
    samples = fixed_samples(
        NUM_SAMPLES, text_tokens=TEXT_TOKENS, items={"image": (ItemTokens(*tokens),) * IMAGES}
    )
    layouts = {"vision": grids.vision, "llm": grids.llm}
    job = processes_job("bridge", model(), samples, layouts, grids.placement)
    return planned(replace(job, settings=Settings(precision=Precision.FLOAT32)))


def crossing(grids: Grids, lowered: Lowered, traces: Sequence[Trace]) -> Crossing:
    """The transfers in the traces of a case; bytes are the same in every step."""
    rows = [row for row in lowered.transfers if row.edge == EDGE and row.route is not Route.LOCAL]
    (sent_bytes,) = {sum(m.num_bytes for m in trace.messages if m.edge == EDGE) for trace in traces}
    return Crossing(
        grids=str(grids),
        planned_bytes=sum(row.num_bytes for row in rows),
        sent_bytes=sent_bytes,
        boundary_s=median(map(longest_sender_s, traces)),
        step_s=median(trace.iteration_s for trace in traces),
    )


def longest_sender_s(trace: Trace) -> float:
    """Seconds in which the busiest rank has messages between modules in flight; overlaps count once."""
    ends, by_rank = defaultdict(list), defaultdict(list)
    for span in trace.spans:
        ends[span.rank].append(span.end_s)
    for message in trace.messages:
        if message.edge == EDGE:
            free_s = max((s for s in ends[message.destination_rank] if s <= message.end_s), default=0.0)
            by_rank[message.source_rank].append((max(message.start_s, free_s), message.end_s))
    return max(map(union_s, by_rank.values()), default=0.0)


@bench(steps="measured, after one that is not")
def run(steps: int = 5) -> Found:
    crossings = []
    with Pool(max(len(plan_of(grids).ranks) for grids in CASES)) as pool:
        for grids in CASES:
            lowered = lower(plan_of(grids))
            settings = RunSettings(
                steps=steps, warmup=1, seed=7, precision=Precision.FLOAT32, timeout_s=120.0
            )
            crossings.append(crossing(grids, lowered, run_lowered(lowered, settings, pool=pool).traces))
            last = crossings[-1]
            print(
                f"{last.grids}: {last.sent_bytes / 1e6:.2f} MB ({last.planned_bytes / 1e6:.2f} planned), "
                f"{last.boundary_s * 1e3:.1f} ms of {last.step_s * 1e3:.0f}, {last.share:.1%}"
            )
    same = all(last.sent_bytes == last.planned_bytes for last in crossings)
    result = {
        "holds": same,
        "steps": steps,
        "cases": [asdict(e) | {"share": e.share} for e in crossings],
    }
    claims = {"executed steps send the bytes that the plan names": same}
    return Found(result, claims, out=SUMMARY)
