"""Encoder work in the bubbles of an LLM's pipeline: Optimus as a rule, in simulation only.

Source: Optimus, as Entrain (dissertation, section 4.2.3) describes it: encoder stages are scheduled into
bubbles of the LLM's pipeline.
Differs: a greedy rule instead of its search. A rank runs its next LLM pass as soon as that can run, else a
piece of encoder work. All ranks share the encoder work of a microbatch evenly and no message takes time;
both favour it.
"""

import heapq

from experiments.entrain.stage_work import Seconds
from workbench.schedule.action import Action, Pass
from workbench.schedule.one_f_one_b import one_f_one_b

PIECES = 8  # of a rank's share of one encoder pass


class _Filling:
    """An event simulation of all ranks."""

    def __init__(self, llm: tuple[Seconds, Seconds], encoder: tuple[Seconds, Seconds]) -> None:
        self._forward_s, self._backward_s = llm
        self._encoder_s = encoder
        num, self._ranks = self._forward_s.shape
        self._todo = [list(program) for program in one_f_one_b(range(self._ranks), num)]
        self._at = [0] * self._ranks
        self._ended: dict[Action, float] = {}
        self._left = ([self._ranks * PIECES] * num, [self._ranks * PIECES] * num)  # pieces by direction
        self._mine = [[[0, 0], [0, 0]] for _ in range(self._ranks)]  # [rank][direction] (microbatch, piece)
        self._idle: set[int] = set()

    def seconds(self) -> float:
        """Seconds of the step; AssertionError where some work never ran."""
        events = [(0.0, rank, None) for rank in range(self._ranks)]
        now_s = 0.0
        queue: list[tuple[float, int, Action | tuple[int, int] | None]] = list(events)
        heapq.heapify(queue)
        while queue:
            now_s = queue[0][0]
            free = set()
            while queue and queue[0][0] == now_s:
                _, rank, done = heapq.heappop(queue)
                free.add(rank)
                if isinstance(done, Action):
                    self._ended[done] = now_s
                elif done is not None:
                    self._left[done[0]][done[1]] -= 1
            for rank in sorted(free | self._idle):
                self._idle.discard(rank)
                next_work = self._next(rank)
                if next_work is None:
                    self._idle.add(rank)
                else:
                    heapq.heappush(queue, (now_s + next_work[0], rank, next_work[1]))
        assert all(next_index == len(todo) for next_index, todo in zip(self._at, self._todo, strict=True))
        assert not any(map(sum, self._left))
        return now_s

    def _next(self, rank: int) -> tuple[float, Action | tuple[int, int]] | None:
        if self._at[rank] < len(self._todo[rank]):
            action = self._todo[rank][self._at[rank]]
            if self._is_ready(rank, action):
                self._at[rank] += 1
                table = self._forward_s if action.kind is Pass.F else self._backward_s
                return float(table[action.microbatch or 0, rank]), action
        for direction in (1, 0):  # backwards free memory
            microbatch, piece = self._mine[rank][direction]
            if microbatch < len(self._forward_s) and (direction == 0 or self._released(microbatch)):
                following = [microbatch + 1, 0] if piece + 1 == PIECES else [microbatch, piece + 1]
                self._mine[rank][direction] = following
                share_s = float(self._encoder_s[direction][microbatch]) / (self._ranks * PIECES)
                return share_s, (direction, microbatch)
        return None

    def _released(self, microbatch: int) -> bool:
        return Action(0, Pass.B, microbatch) in self._ended

    def _is_ready(self, rank: int, action: Action) -> bool:
        microbatch = action.microbatch or 0
        if action.kind is Pass.F:
            return (
                self._left[0][microbatch] == 0
                if rank == 0
                else Action(rank - 1, Pass.F, microbatch) in self._ended
            )
        return rank == self._ranks - 1 or Action(rank + 1, Pass.B, microbatch) in self._ended


def filled_s(llm: tuple[Seconds, Seconds], encoder: tuple[Seconds, Seconds]) -> float:
    """Seconds of a step with encoder work in the LLM's bubbles.

    Args:
        llm: [microbatches, ranks] seconds of forwards and of backwards under 1F1B.
        encoder: [microbatches] seconds of forwards and backwards of the whole encoder.

    Complexity: O(ranks x microbatches x pieces) events.
    """
    return _Filling(llm, encoder).seconds()
