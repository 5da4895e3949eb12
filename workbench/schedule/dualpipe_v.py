"""DualPipeV: two stages on each rank in a V, whose forwards and backwards run in pairs."""

from collections import Counter, deque
from collections.abc import Sequence

from workbench.schedule.action import Action, Pass
from workbench.schedule.spec import ScheduleSpec, StagePlacement


def dualpipe_v(stages: Sequence[int], num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Pair forwards of one of a rank's stages with backwards of the other; few backwards are split.

    Source: DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1), whose two mirrored
    directions are folded into one V ("cut-in-half", Sea AI Lab 2025), in the order of DeepSeek's DualPipeV
    and torch's ScheduleDualPipeV. A rank holds at most 2p + 1 microbatches, each on one of its two stages.
    Differs: a pair runs one after the other, forward first, and either half sends its result when it
    ends. So with F = I = W ranks idle (p - 1) F, half of the published (p - 1)(F&B + B - 3W) of pairs that
    begin and end together. Any number of microbatches, where both others want at least 2p: fewer leave
    out passes of the schedule of 2p.

    Args:
        stages: [2p] ids, first to last; rank r holds those at r and 2p - 1 - r.
        num_microbatches: m.

    Returns:
        [p] programs; a microbatch on a stage has a whole backward B, or I and W.

    Raises:
        ValueError: an odd number of stages, repeated stages, or no microbatch.

    Complexity: O(p max(m, p)).
    """
    if len(stages) % 2 or len(set(stages)) != len(stages) or not stages:
        raise ValueError(f"dualpipe-v: want two stages on each rank, all different, got {list(stages)}")
    if num_microbatches < 1:
        raise ValueError(f"dualpipe-v: want at least one microbatch, got {num_microbatches}")
    num_ranks = len(stages) // 2
    programs = []
    for rank in range(num_ranks):
        pattern = _pattern(stages[rank], stages[-1 - rank], (rank, num_ranks), num_microbatches)
        numbered = _numbered(pattern)
        programs.append(tuple(action for action in numbered if (action.microbatch or 0) < num_microbatches))
    return tuple(programs)


def _pattern(
    down: int, up: int, rank_of: tuple[int, int], num_microbatches: int
) -> list[tuple[int | None, Pass]]:
    """Return (stage, pass) in order; microbatches count up, and a W without a stage is the oldest pending."""
    rank, num_ranks = rank_of
    downstream, upstream = num_ranks - 1 - rank, rank + 1  # ranks further down the V; ranks up to this one
    pending_w = (None, Pass.W)
    pattern: list[tuple[int | None, Pass]] = [(down, Pass.F)] * (2 * downstream)
    pattern += [(down, Pass.F), (up, Pass.F)] * upstream
    pattern += [(up, Pass.I), pending_w, (up, Pass.F)] * downstream
    pairs = [(down, Pass.F), (up, Pass.B), (up, Pass.F), (down, Pass.B)]
    pattern += pairs * (max(num_microbatches, 2 * num_ranks) - 2 * num_ranks + upstream)
    pattern += pairs[1:] * downstream
    last = [up, down] * upstream
    pattern += [(stage, Pass.B) for stage in last[:upstream]] + [(stage, Pass.I) for stage in last[upstream:]]
    return pattern + [pending_w, (down, Pass.I)] * downstream + [pending_w] * upstream


def _numbered(pattern: Sequence[tuple[int | None, Pass]]) -> list[Action]:
    """Number forwards and backwards of each stage from 0."""
    counts: Counter[tuple[int | None, bool]] = Counter()
    pending: deque[Action] = deque()
    numbered = []
    for stage, kind in pattern:
        if kind is Pass.W:
            numbered.append(pending.popleft())
            continue
        key = stage, kind is Pass.F
        numbered.append(Action(stage, kind, counts[key]))
        counts[key] += 1
        if kind is Pass.I:
            pending.append(numbered[-1]._replace(kind=Pass.W))
    return numbered


SPEC = ScheduleSpec(
    name="dualpipe-v",
    summary="DeepSeek's DualPipe folded into a V: forwards overlap with backwards, few of which are split",
    chain=lambda stages, _, num_microbatches: dualpipe_v(stages, num_microbatches),
    layout=StagePlacement.VEE,
    usual_virtual_stages=2,
    splits_backward=True,
    torch_name="DualPipeV",
)
