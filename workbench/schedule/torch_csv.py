"""Schedule files of torch.distributed.pipelining (compute_only): a line per rank, a cell per action."""

import csv
import io
from collections.abc import Mapping, Sequence
from enum import StrEnum

from workbench.schedule.action import COMPUTE, Action, Pass, parse_action
from workbench.schedule.text import Cell, Programs, marked_error


class Letters(StrEnum):
    """What a backward's letter means in a file.

    TORCH: F forward, B full backward, I input gradient, W weight gradient.
    ZERO_BUBBLE: F forward, BW full backward, B input gradient, W weight gradient, as in the
        zero-bubble pipelines of Qi et al. 2024, ICLR: their B is our I, their BW our B.
    """

    TORCH = "torch"
    ZERO_BUBBLE = "zero_bubble"


def to_torch_csv(programs: Programs, consumers: Mapping[int, Sequence[int]]) -> str:
    """Format a linear schedule as torch writes and loads it: line r is the program of pipeline rank r.

    Only passes are written: torch refuses other actions in this format, adds
    collectives itself when it loads the file, and has no letter for STEP.

    Args:
        programs: ranks -> actions, in pipeline order; the tensor- and context-parallel ranks of
            one key are one pipeline rank.
        consumers: stage -> stages that read its output.

    Raises:
        ValueError: the plan is no chain 0 > 1 > ... > p-1 of stages with equal microbatches that
            all have a backward; torch's format cannot say more. The reason is named.
    """
    _check_chain(consumers)
    _check_microbatches(programs, sorted(consumers))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for actions in programs.values():
        writer.writerow([str(action) for action in actions if action.kind in COMPUTE])
    return text.getvalue()


def from_torch_csv(text: str, letters: Letters = Letters.TORCH) -> dict[tuple[int, ...], tuple[Action, ...]]:
    """Parse a compute_only file; line r becomes the program of rank r.

    Empty cells, torch's idle steps, are skipped. With `Letters.ZERO_BUBBLE` the letters are
    mapped as that enum says.

    Raises:
        ValueError: a cell that is no action, naming line and cell; communication actions (SEND_F
            and the like), which belong to torch's other format.
    """
    programs: dict[tuple[int, ...], tuple[Action, ...]] = {}
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        cells = enumerate((cell.strip() for cell in row), start=1)
        programs[(rank,)] = tuple(_parse(rank, index, cell, letters) for index, cell in cells if cell)
    return programs


def _parse(rank: int, position: int, cell: str, letters: Letters) -> Action:
    where = f"line {rank + 1}, cell {position}"
    if any(word in cell for word in ("SEND_", "RECV_")):
        raise ValueError(f"{where}: {cell!r} is communication; want torch's format compute_only")
    is_full = letters is Letters.ZERO_BUBBLE and "BW" in cell
    try:
        action = parse_action(cell.replace("BW", "B") if is_full else cell)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if letters is Letters.ZERO_BUBBLE and action.kind is Pass.B and not is_full:
        return action._replace(kind=Pass.I)
    return action


def _check_chain(consumers: Mapping[int, Sequence[int]]) -> None:
    last = len(consumers) - 1
    if sorted(consumers) != list(range(last + 1)):
        raise ValueError(f"torch's schedules number stages 0..{last}, got {sorted(consumers)}")
    for stage in range(last + 1):
        wanted = [stage + 1] if stage < last else []
        if list(consumers[stage]) != wanted:
            raise ValueError(
                f"torch's schedules are for linear plans, where stage {stage} feeds {wanted or 'none'}; "
                f"here it feeds {list(consumers[stage]) or 'none'}"
            )


def _check_microbatches(programs: Programs, stages: Sequence[int]) -> None:
    counts = dict.fromkeys(stages, 0)
    backwards = dict.fromkeys(stages, 0)
    home: dict[int, tuple[int, ...]] = {}
    for ranks, actions in programs.items():
        for index, action in enumerate(actions):
            if action.stage is None or action.kind not in COMPUTE:
                continue
            if home.setdefault(action.stage, ranks) != ranks:
                message = f"torch gives stage {action.stage} to one pipeline rank, here it is also on {ranks}"
                raise marked_error(message, programs, Cell(ranks, index))
            counts[action.stage] += action.kind is Pass.F
            backwards[action.stage] += action.kind in (Pass.B, Pass.I)
    for stage in stages:
        if counts[stage] != counts[stages[0]]:
            raise ValueError(
                f"torch's schedules have equal microbatches: stage {stages[0]} has {counts[stages[0]]}, "
                f"stage {stage} has {counts[stage]}"
            )
        if backwards[stage] != counts[stage]:
            raise ValueError(
                f"torch's schedules give every microbatch a backward: stage {stage} has {counts[stage]} "
                f"forwards and {backwards[stage]} backwards"
            )
