"""The papers' timelines as scheduling problems: stages, shared ranks and durations in ticks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tests.oracles import passes_read, timed
from workbench.schedule.action import Action, Pass
from workbench.schedule.graph_aware import Consumer, ScheduleNode, graph_aware_1f1b
from workbench.schedule.text import Slot, format_timeline


@dataclass(frozen=True)
class Box:
    """One stage: ticks of its forward and backward (0: it has none), the stages that read it."""

    name: str
    forward: int
    backward: int
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A timeline: `rows` are the boxes on each rank, in forward order."""

    about: str
    boxes: tuple[Box, ...]
    rows: tuple[tuple[int, ...], ...]
    num_microbatches: int

    def nodes(self) -> list[ScheduleNode]:
        one_to_one = tuple((index,) for index in range(self.num_microbatches))
        return [
            ScheduleNode(
                stage,
                self.num_microbatches,
                (box.backward > 0,) * self.num_microbatches,
                tuple(Consumer(reader, one_to_one) for reader in box.readers),
            )
            for stage, box in enumerate(self.boxes)
        ]

    def programs(self) -> dict[tuple[int, ...], tuple[Action, ...]]:
        return graph_aware_1f1b(self.nodes(), self.rows)

    def times(self, ticks: Callable[[Action], float] | None = None) -> dict[Action, tuple[float, float]]:
        return timed(self.programs(), passes_read(self.nodes()), ticks or self.ticks)

    def ticks(self, action: Action) -> int:
        box = self.boxes[action.stage]
        return box.forward if action.kind is Pass.F else box.backward

    @property
    def length(self) -> int:
        return max(end for _, end in self.times().values())

    def text(self) -> str:
        times = self.times()
        rows = {
            (rank,): [Slot(action, *times[action]) for action in actions]
            for rank, actions in enumerate(self.programs().values())
        }
        stages = ", ".join(
            f"{stage} {box.name} ({box.forward}F {box.backward}B)" for stage, box in enumerate(self.boxes)
        )
        head = [*self.about.strip().splitlines(), f"Stages: {stages}.", f"Ticks: {self.length}."]
        return "".join(f"# {line}".rstrip() + "\n" for line in head) + format_timeline(rows)


def pipeline(about: str, boxes: Sequence[Box], num_microbatches: int) -> Figure:
    """A chain of boxes, each on a rank of its own."""
    last = len(boxes) - 1
    linked = [Box(b.name, b.forward, b.backward, (i + 1,) if i < last else ()) for i, b in enumerate(boxes)]
    return Figure(about, tuple(linked), tuple((i,) for i in range(len(boxes))), num_microbatches)


def v1_figure2a(num_microbatches: int = 4) -> Figure:
    return pipeline(
        """
Cornstarch (arXiv v1) Figure 2a: encoders replicated, 4 stages, 4 microbatches.
Printed: 8 microbatches take 1.57x longer, which is (8 + 3) / (4 + 3) = 11/7.
Assumed: a box is a stage's LLM part behind its copies of both encoders, run in one go after the
stage's input has come, forward and backward; all stages are equal; backward is twice forward.
""",
        [Box(f"vision+audio+llm.{index}", 1, 2) for index in range(4)],
        num_microbatches,
    )


def v1_figure2a_copies(num_microbatches: int = 4) -> Figure:
    """The same work with every copy as a stage of its own, as a plan of this repository holds it."""
    boxes: list[Box] = []
    for index in range(4):
        llm = 3 * index + 2
        backward = 2 if index == 0 else 0
        readers = (llm,) if index == 0 else ()
        boxes.append(Box(f"vision.{index}", 1, backward, readers))
        boxes.append(Box(f"audio.{index}", 1, backward, readers))
        boxes.append(Box(f"llm.{index}", 1, 2, (llm + 3,) if index < 3 else ()))
    rows = tuple((3 * index, 3 * index + 1, 3 * index + 2) for index in range(4))
    about = """
Encoders replicated as in Cornstarch (arXiv v1) Figure 2a, with every copy a stage of its own.
Differs from the figure: a copy that nobody reads has no backward, and its forward does not wait for
the LLM part before it. So filling the pipeline costs only the LLM parts, and doubling the
microbatches costs more than 11/7.
"""
    return Figure(about, tuple(boxes), rows, num_microbatches)


def v1_figure2b() -> Figure:
    boxes = (
        Box("vision.0", 1, 2, (1,)),
        Box("vision.1", 1, 2, (4,)),
        Box("audio.0", 1, 2, (3,)),
        Box("audio.1", 1, 2, (4,)),
        Box("llm.0", 2, 4, (5,)),
        Box("llm.1", 2, 4),
    )
    about = """
Cornstarch (arXiv v1) Figure 2b: encoders colocated, 4 ranks, 8 microbatches.
Printed: encoders are cut into the same number of stages and colocated; 1F1B.
Assumed: vision, audio and half the LLM are equal work; two stages of both encoders, two of the LLM;
backward is twice forward.
"""
    return Figure(about, boxes, ((0, 2), (1, 3), (4,), (5,)), 8)


def v1_figure2c() -> Figure:
    boxes = (
        Box("vision", 2, 4, (2,)),
        Box("audio", 2, 4, (2,)),
        Box("llm.0", 2, 4, (3,)),
        Box("llm.1", 2, 4),
    )
    about = """
Cornstarch (arXiv v1) Figure 2c: the ideal, no dependency between encoders, 4 ranks, 8 microbatches.
Assumed: the work of figure 2b; each encoder whole on a rank of its own, the LLM on two.
"""
    return Figure(about, boxes, ((0,), (1,), (2,), (3,)), 8)


def v1_figure6b() -> Figure:
    boxes = (Box("vision", 1, 2, (2,)), Box("audio", 1, 2, (2,)), Box("llm", 1, 2))
    about = """
Cornstarch (arXiv v1) Figure 6b: vision and audio encoder and an LLM on 3 ranks.
Printed: the LLM's forward waits for both encoders, their backwards for the LLM's; both in parallel.
Assumed: 6 microbatches, equal modules, backward twice forward.
"""
    return Figure(about, boxes, ((0,), (1,), (2,)), 6)


def v1_figure6c() -> Figure:
    boxes = (
        Box("vision.0", 1, 2, (1,)),
        Box("vision.1", 1, 2, (3,)),
        Box("audio", 1, 2, (3,)),
        Box("llm.0", 1, 2, (4,)),
        Box("llm.1", 1, 2, (5,)),
        Box("llm.2", 1, 2),
    )
    about = """
Cornstarch (arXiv v1) Figure 6c: a different number of pipeline stages per module.
Printed: cross-module 1F1B still works well; the counts are not in the text.
Assumed: vision 2, audio 1, LLM 3 stages; 6 microbatches; equal stages, backward twice forward.
"""
    return Figure(about, boxes, tuple((stage,) for stage in range(6)), 6)


# v1 Figure 7. The text gives the number of encoder stages of 7b (3) and 7c (2), that 7b's forwards are
# equal and that 7c's forward + backward are. Three LLM stages in 7b is the count for which both hold:
# 3 + 3 forwards of 4 ticks; with the encoder's 12 in 2 stages and the LLM's 12 + 12 in 4, all take 6.

FIGURE7 = "Assumed: 6 stages, 4 microbatches; the projector's own backward is too short to show."


PARTITIONS = {  # (stages, forward, backward) of the encoder and of the LLM, and what is said
    "a": (
        *((3, 4, 8), (3, 4, 8)),
        "what a frozen-unaware planner assumes: backward is twice forward.",
    ),
    "b": (
        *((3, 4, 0), (3, 4, 4)),
        "the partition of 7a run with encoder and LLM frozen: the encoder has no\n"
        "backward, the LLM's is one forward (input gradients for the projector).",
    ),
    "c": (
        *((2, 6, 0), (4, 3, 3)),
        "the frozen-aware partition of the same model: one stage fewer for the\n"
        "encoder, one more for the LLM, forward + backward equal everywhere.",
    ),
}


def v1_figure7(part: str) -> Figure:
    *modules, said = PARTITIONS[part]
    boxes = [
        Box(f"{name}.{i}", forward, backward)
        for name, (count, forward, backward) in zip(("encoder", "llm"), modules, strict=True)
        for i in range(count)
    ]
    return pipeline(f"Cornstarch (arXiv v1) Figure 7{part}: {said}\n{FIGURE7}", boxes, 4)


# ICML Figure 1c. Figure 1b prints per module, in ms: encoder 44.43 + 120.57 and LLM 140.39 + 375.93 with
# everything trainable, 44.26 + 0.50 and 138.33 + 284.50 with only the projector trainable.

FIGURE1B_MS = {"trainable": ((44.43, 120.57), (140.39, 375.93)), "frozen": ((44.26, 0.50), (138.33, 284.50))}
TICK_MS = 20


def icml_figure1c(status: str, num_microbatches: int = 6) -> Figure:
    (encoder_f, encoder_b), (llm_f, llm_b) = FIGURE1B_MS[status]
    in_ticks = [round(ms / TICK_MS) for ms in (encoder_f, encoder_b, llm_f / 3, llm_b / 3)]
    short = " (0.50 ms of the projector's backward are too short to show)" if status == "frozen" else ""
    return pipeline(
        f"""
Cornstarch (ICML) Figure 1c, {status}: the partition that is balanced when everything is trainable.
Printed: the times of Figure 1b, 4 A40, activation checkpointing; 64 microbatches, here {num_microbatches}.
A tick is {TICK_MS} ms, times rounded to whole ticks{short}.
Assumed: the encoder is one stage, the LLM three equal ones: 165 and 3 x 172 ms of forward + backward.
""",
        [Box("encoder", *in_ticks[:2]), *(Box(f"llm.{index}", *in_ticks[2:]) for index in range(3))],
        num_microbatches,
    )


def icml_figure1c_iteration_ms(status: str, num_microbatches: int = 64) -> float:
    """With the printed times, unrounded."""
    (encoder_f, encoder_b), (llm_f, llm_b) = FIGURE1B_MS[status]
    exact = {
        (0, Pass.F): encoder_f,
        (0, Pass.B): encoder_b,
        (1, Pass.F): llm_f / 3,
        (1, Pass.B): llm_b / 3,
    }
    figure = icml_figure1c("trainable", num_microbatches)  # every stage has a backward, however short
    times = figure.times(lambda action: exact[min(action.stage, 1), action.kind])
    return max(end for _, end in times.values())


FIGURES: dict[str, Callable[[], Figure]] = {
    "cornstarch_v1_figure2a": v1_figure2a,
    "cornstarch_v1_figure2a_copies": v1_figure2a_copies,
    "cornstarch_v1_figure2b": v1_figure2b,
    "cornstarch_v1_figure2c": v1_figure2c,
    "cornstarch_v1_figure6b": v1_figure6b,
    "cornstarch_v1_figure6c": v1_figure6c,
    **{f"cornstarch_v1_figure7{part}": partial(v1_figure7, part) for part in PARTITIONS},
    "cornstarch_icml_figure1c_trainable": lambda: icml_figure1c("trainable"),
    "cornstarch_icml_figure1c_frozen": lambda: icml_figure1c("frozen"),
}
