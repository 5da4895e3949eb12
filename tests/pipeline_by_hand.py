"""A pipeline step from its seconds and bytes alone: the textbook's orders, one port a rank, nothing lowered.

Independent of plans: orders, inputs, message sizes and the ranks that reduce are written down here again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple


class Op(NamedTuple):
    """A forward (F) or backward (B) of one stage of one replica."""

    replica: int
    stage: int
    kind: str
    microbatch: int


def one_f_one_b(rank: int, p: int, v: int, m: int) -> list[tuple[int, str, int]]:
    """(stage, kind, microbatch) of a rank; v is 1."""
    ahead = min(p - rank, m)
    order = [(rank, "F", index) for index in range(ahead)]
    for index in range(m):
        order.append((rank, "B", index))
        order += [(rank, "F", ahead + index)] * (ahead + index < m)
    return order


def gpipe(rank: int, p: int, v: int, m: int) -> list[tuple[int, str, int]]:
    return [(rank, kind, index) for kind in "FB" for index in range(m)]


def interleaved(rank: int, p: int, v: int, m: int) -> list[tuple[int, str, int]]:
    """Narayanan et al. 2021, with m a multiple of p."""

    def turn(number: int) -> tuple[int, int]:
        round_, inside = divmod(number, p * v)
        return inside // p, round_ * p + inside % p

    forwards = [(chunk * p + rank, "F", index) for chunk, index in map(turn, range(m * v))]
    backwards = [((v - 1 - chunk) * p + rank, "B", index) for chunk, index in map(turn, range(m * v))]
    ahead = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
    order = forwards[:ahead]
    for index, backward in enumerate(backwards):
        order += [*forwards[ahead + index : ahead + index + 1], backward]
    return order


@dataclass
class Pipeline:
    """One step of dp replicas, each of p ranks with v stages each.

    Args:
        order: of a rank, as the three above; passes that do not run are left out.
        seconds: of every op.
        has_backward: by stage.
        message_s: seconds that a message occupies its sender's port.
        latency_s: from then until it arrives.
        reduce_s: by trained stage, of its gradients' reduction; empty: none.
    """

    p: int
    v: int
    m: int
    dp: int
    order: Callable[[int, int, int, int], list[tuple[int, str, int]]]
    seconds: Callable[[Op], float]
    has_backward: Sequence[bool]
    message_s: float
    latency_s: float
    reduce_s: Mapping[int, float]
    end_s: dict[Op, float] = field(default_factory=dict)

    def run(self) -> tuple[float, dict[int, float]]:
        """Seconds until the last pass and reduction, and of each rank's passes."""
        programs = {
            replica * self.p + rank: [
                Op(replica, *each)
                for each in self.order(rank, self.p, self.v, self.m)
                if each[1] == "F" or self.has_backward[each[0]]
            ]
            for replica in range(self.dp)
            for rank in range(self.p)
        }
        self._passes(programs)
        busy = {rank: sum(map(self.seconds, ops)) for rank, ops in programs.items()}
        return max(*self.end_s.values(), *self._reductions()), busy

    def _passes(self, programs: Mapping[int, list[Op]]) -> None:
        """Fill `end_s`: a rank's passes in order, and messages from each rank in the order of their ends."""
        next_of, is_busy = dict.fromkeys(programs, 0), dict.fromkeys(programs, False)
        outbox: dict[int, list[tuple[float, Op]]] = {rank: [] for rank in programs}
        is_sending = dict.fromkeys(programs, False)
        known: set[tuple[int, Op]] = set()  # (rank, op whose result it has)
        events: list[tuple[float, str, int, Op]] = []
        now = 0.0
        while True:
            for rank, ops in programs.items():
                if not is_busy[rank] and next_of[rank] < len(ops):
                    op = ops[next_of[rank]]
                    if all((rank, each) in known for each in self._inputs(op)):
                        is_busy[rank] = True
                        heappush(events, (now + self.seconds(op), "computed", rank, op))
                if outbox[rank] and not is_sending[rank]:
                    is_sending[rank] = True
                    _, op = heappop(outbox[rank])
                    heappush(events, (now + self.message_s, "sent", rank, op))
            if not events:
                break
            now, what, rank, op = heappop(events)
            reader = self._rank(op.replica, op.stage + (1 if op.kind == "F" else -1))
            if what == "computed":
                self.end_s[op], is_busy[rank], next_of[rank] = now, False, next_of[rank] + 1
                known.add((rank, op))
                if self._is_read(op) and reader != rank:
                    heappush(outbox[rank], (now, op))
            elif what == "sent":
                is_sending[rank] = False
                heappush(events, (now + self.latency_s, "there", reader, op))
            else:
                known.add((rank, op))
        assert all(next_of[rank] == len(ops) for rank, ops in programs.items())

    def _reductions(self) -> list[float]:
        """Ends: every rank reduces its stages one by one, each with the same stage of all replicas."""
        ends = []
        for rank in range(self.p):
            ready_s = {
                stage: max(end_s for op, end_s in self.end_s.items() if op.stage == stage and op.kind == "B")
                for stage in self.reduce_s
                if stage % self.p == rank
            }
            free_s = 0.0
            for stage in sorted(ready_s, key=ready_s.__getitem__):
                free_s = max(free_s, ready_s[stage]) + self.reduce_s[stage]
                ends.append(free_s)
        return ends

    def _rank(self, replica: int, stage: int) -> int:
        return replica * self.p + stage % self.p

    def _is_read(self, op: Op) -> bool:
        if op.kind == "F":
            return op.stage + 1 < self.p * self.v
        return op.stage > 0 and self.has_backward[op.stage - 1]

    def _inputs(self, op: Op) -> list[Op]:
        if op.kind == "F":
            return [op._replace(stage=op.stage - 1)] * (op.stage > 0)
        behind = [op._replace(stage=op.stage + 1)] * (op.stage + 1 < self.p * self.v)
        return [op._replace(kind="F"), *behind]
