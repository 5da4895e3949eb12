"""An action: one pass of one stage over one microbatch, in torch's letters."""

import re
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """torch.distributed.pipelining's letters; zero-bubble's "B" is our `I`."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (torch's letter for the input gradient)
    W = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    # That of the letter; an Enum's own is a call in Python, and actions are keys everywhere.
    __hash__ = str.__hash__


COMPUTE = (Pass.F, Pass.B, Pass.I, Pass.W)
MOVES = (Pass.UNSHARD, Pass.RESHARD)
_CONTINUES = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}

_TEXT = re.compile(r"(\d+)(?:(F|B|I|W)(\d+)|(UNSHARD|RESHARD|REDUCE_GRAD)(\d+)?)|STEP")


class Action(NamedTuple):
    """Printed `2F0`, `2REDUCE_GRAD` or `STEP` (which belongs to the rank: stage -1 is not used).

    Of a stage whose weights are sharded, `2UNSHARD0` begins round 0: there the number is the round's.
    """

    stage: int | None
    kind: Pass
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else str(self.stage)
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        return f"{stage}{self.kind}{microbatch}"

    @property
    def continues(self) -> "Action | None":
        """The pass of the same stage and microbatch that this one needs; None for a forward."""
        before = _CONTINUES.get(self.kind)
        return None if before is None else Action(self.stage, before, self.microbatch)


STEP = Action(None, Pass.STEP)


def parse_action(text: str) -> Action:
    """`'2F0'` as an action; ValueError when it is none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"bad action {text!r}: want <stage><F|B|I|W><microbatch>, "
            "<stage><UNSHARD|RESHARD|REDUCE_GRAD>[round] or STEP, e.g. '2F0'"
        )
    stage, kind, microbatch, collective, number = match.groups()
    if stage is None:
        return STEP
    if collective is not None:
        return Action(int(stage), Pass(collective), None if number is None else int(number))
    return Action(int(stage), Pass(kind), int(microbatch))
