"""Zero-bubble schedules of a chain: weight gradients fill the bubbles that input gradients leave."""

from collections.abc import Sequence

from workbench.schedule.action import Action, Pass
from workbench.schedule.interleaved import turns_of
from workbench.schedule.spec import ScheduleSpec, StagePlacement, check_chain

Programs = tuple[tuple[Action, ...], ...]


def zb_h1_interleaved(stages: Sequence[int], num_ranks: int, num_microbatches: int) -> Programs:
    """Return ZB-H1: interleaved 1F1B with half its warm-up, whose weight gradients wait.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR, section 2.3 (ZB-H1), which is v = 1:
    1F1B whose weight gradients wait, at position s until s later microbatches had their I. With equal stages
    a device idles (p - 1)(F + I - W) and holds at most p microbatches from F to W, the most that any stage
    of 1F1B holds. For more stages its rule for the r-th rank, p - 1 - r forwards ahead and r weight
    gradients behind, is applied to the turns of interleaved 1F1B; torch's ScheduleInterleavedZeroBubble
    has the same order. With v stages on each rank a rank holds at most v p of them from F to W: what
    p whole microbatches are.
    Differs: any number of microbatches, in rounds as those of `interleaved_1f1b`.

    Args:
        stages: [p v] ids, first to last; rank r holds those at r, p + r, 2p + r, ...
        num_ranks: p.
        num_microbatches: m.

    Returns:
        [p] programs, each of m v forwards, input gradients and weight gradients.

    Raises:
        ValueError: stages that p does not divide.

    Complexity: O(p v m).
    """
    check_chain(stages, num_microbatches)
    if len(stages) % num_ranks:
        raise ValueError(f"zb-h1: {len(stages)} stages must be a multiple of {num_ranks} ranks")
    turns = turns_of(len(stages) // num_ranks, num_ranks, num_microbatches)
    programs = []
    for rank in range(num_ranks):
        own_stages = stages[rank::num_ranks]
        forwards = [Action(own_stages[chunk], Pass.F, microbatch) for chunk, microbatch in turns.forwards]
        inputs = [Action(own_stages[chunk], Pass.I, microbatch) for chunk, microbatch in turns.backwards]
        weights = [action._replace(kind=Pass.W) for action in inputs]
        warmup = min(turns.ahead + num_ranks - 1 - rank, len(forwards))
        program, remaining = forwards[:warmup], forwards[warmup:]
        for index, action in enumerate(inputs):
            program += [*remaining[index : index + 1], action]
            if index >= rank:
                program.append(weights[index - rank])
        programs.append((*program, *weights[max(0, len(weights) - rank) :]))
    return tuple(programs)


def zb_h2(stages: Sequence[int], num_microbatches: int) -> Programs:
    """Return twice the warm-up and delay of ZB-H1: from its first to its last pass no device idles.

    Source: as `zb_h1_interleaved`, section 2.4 (ZB-H2): a device idles (p - 1)(F + I - 2W), which is nothing
    for F = I = W, and holds at most 2p - 1 microbatches.
    Differs: devices end one after the other as they started, (p - 1) F apart; the paper then steps
    the optimizer without waiting, ours waits.

    Args:
        stages: [p] ids, first to last.
        num_microbatches: m.

    Returns:
        [p] programs, each of m forwards, m input gradients and m weight gradients.

    Complexity: O(p m).
    """
    check_chain(stages, num_microbatches)
    programs = []
    for index, stage in enumerate(stages):
        warmup = min(2 * (len(stages) - 1 - index), num_microbatches)
        delay = 2 * index
        program = [Action(stage, Pass.F, microbatch) for microbatch in range(warmup)]
        for microbatch in range(num_microbatches):
            if microbatch + warmup < num_microbatches:
                program.append(Action(stage, Pass.F, microbatch + warmup))
            program.append(Action(stage, Pass.I, microbatch))
            if microbatch >= delay:
                program.append(Action(stage, Pass.W, microbatch - delay))
        program += [
            Action(stage, Pass.W, microbatch)
            for microbatch in range(max(0, num_microbatches - delay), num_microbatches)
        ]
        programs.append(tuple(program))
    return tuple(programs)


def zb_v(stages: Sequence[int], num_microbatches: int) -> Programs:
    """Return the V schedule of two stages per rank: no bubble with the memory of 1F1B.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", NeurIPS, and "Zero
    Bubble Pipeline Parallelism", section 6 (ZB-V). For F = I = W no device idles between its first
    and last pass, and it holds at most p whole microbatches (2p on one of its two stages).

    Args:
        stages: [2p] ids, first to last; rank r holds those at r and 2p - 1 - r.
        num_microbatches: m. Fewer than 2p - 1 leave out passes of a longer schedule.

    Returns:
        [p] programs.

    Raises:
        ValueError: an odd number of stages.

    Complexity: O(p max(m, p)).
    """
    check_chain(stages, num_microbatches)
    if len(stages) % 2:
        raise ValueError(f"zb-v: every rank has two stages, got {len(stages)} stages")
    num_ranks = len(stages) // 2
    programs = []
    for rank in range(num_ranks):
        counts: dict[tuple[int, Pass], int] = {}
        program = []
        for stage, kind in _v_pattern(rank, num_ranks, max(num_microbatches, 2 * num_ranks - 1)):
            microbatch = counts.get((stage, kind), 0)
            counts[stage, kind] = microbatch + 1
            if microbatch < num_microbatches:
                program.append(Action(stages[rank if stage == 0 else -1 - rank], kind, microbatch))
        programs.append(tuple(program))
    return tuple(programs)


def _v_pattern(rank: int, num_ranks: int, num_microbatches: int) -> list[tuple[int, Pass]]:
    """Return (0 on the way down or 1 on the way up, pass) in order; microbatches count up per pair."""
    down, up = ({kind: (side, kind) for kind in (Pass.F, Pass.I, Pass.W)} for side in (0, 1))
    whole_down, whole_up = list(down.values()), list(up.values())
    before_turn = num_ranks - rank
    before_input_grad = 2 * num_ranks - rank - 1  # forwards down before the first input gradient down
    pattern = [down[Pass.F]] * (2 * before_turn - 1)
    pattern += [up[Pass.F], down[Pass.F]] * rank
    pattern += whole_up * before_turn
    pattern += (whole_down + whole_up) * (num_microbatches - before_input_grad)
    pattern += (whole_down[1:] + whole_up) * (before_input_grad - num_ranks)
    pattern += [down[Pass.I], up[Pass.I]] * rank
    pattern += [down[Pass.I], down[Pass.W]] * before_turn
    return pattern + [up[Pass.W]] * rank + [down[Pass.W]] * rank


def _as_1f1b(held: float) -> float:
    return held


SPEC_H1 = ScheduleSpec(
    name="zb-h1",
    summary="1F1B with weight gradients in the bubbles, same memory; also several stages per rank",
    chain=zb_h1_interleaved,
    takes_more_stages=True,
    splits_backward=True,
    most_in_flight=_as_1f1b,
)

SPEC_H2 = ScheduleSpec(
    name="zb-h2",
    summary="twice the warm-up of ZB-H1: no bubble, nearly twice the memory",
    chain=lambda stages, _, num_microbatches: zb_h2(stages, num_microbatches),
    splits_backward=True,
    most_in_flight=lambda held: 2 * held - 1,
)

SPEC_V = ScheduleSpec(
    name="zb-v",
    summary="two stages per rank, down the ranks and up again: no bubble, memory of 1F1B",
    chain=lambda stages, _, num_microbatches: zb_v(stages, num_microbatches),
    layout=StagePlacement.VEE,
    usual_virtual_stages=2,
    splits_backward=True,
    most_in_flight=_as_1f1b,
    torch_name="ZBVZeroBubble",
)
