"""Sends and receives the rows of a lowered plan; shapes, order and peers all come from the plan."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.step.timing import Recorder
from runtime.world.clock import Awaited, Channel, Clock, Stamp, Traffic
from runtime.world.failure import RankError
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Lowered, Route, Slice, Transfer
from workbench.schedule.action import Action

# Shape suffixes: T = tokens of a packed tensor, D = width.

AHEAD = 2  # receives that a broker posts at a time


def pack(source_TD: Tensor, slices: Sequence[Slice]) -> Tensor:
    """The slices' tokens, in the row's order; a view where they are contiguous."""
    starts = [piece.source_start for piece in slices]
    counts = [piece.num_tokens for piece in slices]
    if _side_by_side(starts, counts):
        return source_TD.narrow(0, starts[0], sum(counts))
    return torch.cat([source_TD.narrow(0, piece.source_start, piece.num_tokens) for piece in slices])


def join(pieces: Sequence[tuple[Transfer, Tensor]]) -> Tensor:
    """One packed tensor from rows that cover it exactly once; no copy for a single whole row."""
    if len(pieces) == 1 and _is_whole(pieces[0][0]):
        return pieces[0][1]
    total = sum(row.num_tokens for row, _ in pieces)
    first = pieces[0][1]
    joined_TD = first.new_empty((total, first.shape[1]))
    for row, packed_TD in pieces:
        for piece, part in zip(row.slices, _split(row, packed_TD), strict=True):
            joined_TD.narrow(0, piece.destination_start, piece.num_tokens).copy_(part)
    return joined_TD


def accumulate(pieces: Sequence[tuple[Transfer, Tensor]], like_TD: Tensor) -> Tensor:
    """The sum of all consumers' gradients of one output; tokens without a consumer get zero.

    Rows are added in row order, so the sum does not depend on their arrival.
    """
    if len(pieces) == 1 and _is_whole(pieces[0][0]) and pieces[0][0].num_tokens == like_TD.shape[0]:
        return pieces[0][1]
    total_TD = torch.zeros_like(like_TD)
    for row, packed_TD in pieces:
        for piece, part in zip(row.slices, _split(row, packed_TD), strict=True):
            total_TD.narrow(0, piece.destination_start, piece.num_tokens).add_(part)
    return total_TD


def _split(row: Transfer, packed_TD: Tensor) -> Sequence[Tensor]:
    return packed_TD.split([piece.num_tokens for piece in row.slices])


def _side_by_side(starts: Sequence[int], counts: Sequence[int]) -> bool:
    return all(
        start + count == following
        for start, count, following in zip(starts[:-1], counts[:-1], starts[1:], strict=True)
    )


def _is_whole(row: Transfer) -> bool:
    starts = [piece.destination_start for piece in row.slices]
    return starts[0] == 0 and _side_by_side(starts, [piece.num_tokens for piece in row.slices])


class Wires:
    """All transfers of one rank, reused for every step.

    Receives are posted just in time and in the sender's order: an action's rows when it is next, its
    successor's rows so that they arrive while it runs, and before each of them everything that the same
    sender sends earlier. So a transfer overlaps the action before its consumer, and a rank has receive
    buffers of two actions instead of a whole step. Sends are posted at once, and the program never waits for
    them: on a CPU a thread waits for them and frees their buffers.

    A broadcast is a message from the leader to each of the others, sent when the leader receives the row that
    it follows, or produces it. Where rows are matched by tag, its receive is posted when it is needed; where
    they are matched by order, in the leader's order, as for any other row.
    """

    def __init__(self, lowered: Lowered, mesh: Mesh, *, dtype: torch.dtype, recorder: Recorder) -> None:
        self._mesh, self._clock = mesh, mesh.clock
        self._dtype = dtype
        self._recorder = recorder
        self._rows = lowered.transfers
        self._local: dict[int, Tensor] = {}
        self._posted: dict[int, tuple[dist.Work, Tensor, bool]] = {}  # and whether its arrival is recorded
        self._in_order: dict[tuple[Route, int], deque[Transfer]] = {}  # not yet posted, by route and sender
        self._unposted: dict[int, Transfer] = {}  # all that are not yet posted
        self._received = _receives_of(lowered, mesh)
        handed_on = [r for r in self._rows if r.route is Route.RELAY and mesh.rank in r.destination_ranks]
        self._relay = Relay(handed_on)
        self._followers: dict[int, list[Transfer]] = {}
        for row in self._rows:
            if row.after is not None and row.source_rank == mesh.rank:
                self._followers.setdefault(row.after, []).append(row)
        self._porter = Porter(mesh.clock, mesh.timeout_s, recorder)

    def start_step(self) -> None:
        """Queue the rows that this rank will receive; nothing is left from the previous step."""
        assert not self._local
        assert not self._posted
        self._in_order = {key: deque(rows) for key, rows in self._received.items()}
        self._unposted = {row.row: row for rows in self._received.values() for row in rows}
        self._relay.start_step(self.forward)

    def post(self, rows: Iterable[int], since: Stamp) -> None:
        """Allocate and post the receives of these rows, and of rows that their senders send earlier.

        They do not wait for computation of this rank after `since`.
        """
        for number in rows:
            if (row := self._unposted.get(number)) is None:
                continue
            if row.route is Route.BROADCAST and not self._mesh.orders_rows:
                self._receive(row, since)
                continue
            waiting = self._in_order[row.route, row.source_rank]
            while number in self._unposted:
                self._receive(waiting.popleft(), since)

    def take(self, number: int, action: Action) -> tuple[Transfer, Tensor]:
        """Wait for a row whose receive is posted, see `post`; returns its packed tensor.

        Raises:
            RankError: the row did not arrive in time, or the peer is gone.
        """
        row = self._rows[number]
        if row.route is Route.LOCAL:
            return row, self._local.pop(number)
        work, buffer_TD, is_noted = self._posted.pop(number)
        what = f"rank {self._mesh.rank} before {action}: {describe(row)} from rank {row.source_rank}"
        self._clock.wait(work, Awaited(what, (row.source_rank,)))
        if not is_noted:
            self._recorder.arrived(number, self._clock.stamp())
        self._pass_on(number, buffer_TD)
        return row, buffer_TD

    def give(self, number: int, source_TD: Tensor) -> None:
        """Send a row's tokens of a packed tensor to its consumer, without waiting."""
        row = self._rows[number]
        packed_TD = pack(source_TD, row.slices)
        if row.route is Route.LOCAL:
            self._local[number] = packed_TD
            self._pass_on(number, packed_TD)
            return
        self._send(row, packed_TD)

    def _pass_on(self, number: int, packed_TD: Tensor) -> None:
        """Broadcast a row that has arrived, if the plan says so."""
        for row in self._followers.get(number, ()):
            self._send(row, packed_TD)

    def _send(self, row: Transfer, packed_TD: Tensor) -> None:
        packed_TD = packed_TD.contiguous()
        self._recorder.sent(row.row, self._clock.stamp())
        for rank in row.destination_ranks:
            work = self._mesh.send(row, rank, packed_TD)
            if work is None:
                raise RankError(f"rank {self._mesh.rank} is not in the group of {describe(row)}")
            awaited = Awaited(f"rank {self._mesh.rank}: {describe(row)} to rank {rank}", (rank,))
            channel = Channel(Traffic.SEND, (row.route, self._mesh.rank, rank))
            if self._clock.follow(work, channel, awaited, partial(self._recorder.delivered, row.row)):
                self._clock.record_stream(packed_TD, channel)
            else:
                self._porter.carry(row, work, packed_TD, awaited)

    def finish_step(self) -> None:
        """Wait for remaining relays and sends, and check that every row was used."""
        self._relay.finish_step(self._mesh.timeout_s)
        self._porter.wait_until_idle(self._mesh.rank)
        left = [*self._local, *self._posted, *self._unposted]
        if left:
            raise RankError(f"rank {self._mesh.rank}: {describe(self._rows[left[0]])} was never consumed")

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._porter.close()

    def _receive(self, row: Transfer, since: Stamp) -> None:
        del self._unposted[row.row]
        channel = Channel(Traffic.RECEIVE, (row.route, row.source_rank, self._mesh.rank))
        with self._clock.side_stream(channel, since):
            work, buffer_TD, awaited = self._expect(row)
        self._clock.record_stream(buffer_TD)
        note = partial(self._recorder.arrived, row.row)
        self._posted[row.row] = work, buffer_TD, self._clock.follow(work, channel, awaited, note)

    def _expect(self, row: Transfer) -> tuple[dist.Work, Tensor, Awaited]:
        buffer_TD = torch.empty((row.num_tokens, row.width), dtype=self._dtype, device=self._mesh.device)
        work = self._mesh.receive(row, buffer_TD)
        if work is None:
            raise RankError(f"rank {self._mesh.rank} is not in the group of {describe(row)}")
        what = f"rank {self._mesh.rank}: {describe(row)} from rank {row.source_rank}"
        return work, buffer_TD, Awaited(what, (row.source_rank,))

    def forward(self, rows: Iterable[Transfer]) -> None:
        """Receive rows in order and forward each; the next receive is posted while one is awaited.

        Raises:
            RankError: nothing came in time, or the peer is gone.
        """
        ahead: deque[tuple[Transfer, dist.Work, Tensor, Awaited]] = deque()
        waiting = iter(rows)
        while True:
            while len(ahead) < AHEAD and (row := next(waiting, None)) is not None:
                ahead.append((row, *self._expect(row)))
            if not ahead:
                return
            row, work, buffer_TD, awaited = ahead.popleft()
            self._clock.wait(work, awaited)
            self._recorder.arrived(row.row, self._clock.stamp())
            self._pass_on(row.row, buffer_TD)


def _receives_of(lowered: Lowered, mesh: Mesh) -> dict[tuple[Route, int], list[Transfer]]:
    """(route, sender) -> rows that a rank receives, in the order of sending."""
    receives: dict[tuple[Route, int], list[Transfer]] = {}
    for row in lowered.transfers:
        if row.route not in (Route.LOCAL, Route.RELAY) and mesh.rank in row.destination_ranks:
            receives.setdefault((row.route, row.source_rank), []).append(row)
    for (route, leader), rows in receives.items():
        if route is Route.BROADCAST:
            position = {number: index for index, number in enumerate(broadcasts_of(lowered, leader))}
            rows.sort(key=lambda row: position[row.row])
    return receives


def broadcasts_of(lowered: Lowered, leader: int) -> tuple[int, ...]:
    """The broadcasts of a rank in the order of sending.

    Each is sent when the row that it follows is received, or, if that stays on the rank, produced.
    """
    followers: dict[int, list[int]] = {}
    for row in lowered.transfers:
        if row.after is not None and row.source_rank == leader:
            followers.setdefault(row.after, []).append(row.row)
    sent: list[int] = []
    for action in lowered.plan.program.get(leader, ()):
        for rows, is_local in ((lowered.inputs, False), (lowered.outputs, True)):
            for number in rows.get(action, ()):
                if (lowered.transfers[number].route is Route.LOCAL) == is_local:
                    sent += followers.pop(number, ())
    return tuple(sent)


Forward = Callable[[Iterable[Transfer]], None]


class Relay:
    """A broker's thread that forwards rows for other ranks, concurrently with the rank's own program.

    Rows are in order, and their producers never wait for a later row: so a late row delays others, but never
    forever.
    """

    def __init__(self, rows: Sequence[Transfer]) -> None:
        self._rows = rows
        self._thread: threading.Thread | None = None
        self._error: RankError | None = None

    def start_step(self, forward: Forward) -> None:
        """Start forwarding, by a function of the wires that own this relay."""
        if self._rows:
            self._thread = threading.Thread(target=self._run, args=(forward,), name="broker", daemon=True)
            self._thread.start()

    def finish_step(self, timeout_s: float) -> None:
        """Wait for the thread; RankError where a row did not arrive within the timeout."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise RankError(f"{describe(self._rows[0])}: its broker still waits at the end of the step")

    def _run(self, forward: Forward) -> None:
        try:
            forward(self._rows)
        except RankError as error:
            self._error = error


_Send = tuple[Transfer, dist.Work, Tensor, Awaited]


class Porter:
    """A thread that waits for sends, in the order in which they were posted.

    gloo cannot report whether a send has ended, only wait for it; so a thread waits, and a buffer lives no
    longer than its send (or earlier ones).
    """

    def __init__(self, clock: Clock, timeout_s: float, recorder: Recorder) -> None:
        self._clock, self._timeout_s = clock, timeout_s
        self._recorder = recorder
        self._sends: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_out = 0
        self._error: RankError | None = None
        self._thread: threading.Thread | None = None

    def carry(self, row: Transfer, work: dist.Work, packed_TD: Tensor, awaited: Awaited) -> None:
        """Queue a send to wait for."""
        with self._idle:  # a broker's thread also sends
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="porter", daemon=True)
                self._thread.start()
            self._num_out += 1
        self._sends.put((row, work, packed_TD, awaited))

    def wait_until_idle(self, rank: int) -> None:
        """Wait for all sends; RankError where one failed or did not end within the timeout."""
        with self._idle:
            is_idle = self._idle.wait_for(
                lambda: self._num_out == 0 or self._error is not None, self._timeout_s
            )
        if self._error is not None:
            raise self._error
        if not is_idle:
            raise RankError(f"rank {rank}: {self._num_out} sends are still out at the end of the step")

    def close(self) -> None:
        """End the thread."""
        self._sends.put(None)

    def _run(self) -> None:
        while (send := self._sends.get()) is not None:
            row, work, packed_TD, awaited = send
            try:
                self._clock.wait(work, awaited)
            except RankError as error:
                self._error = self._error or error
            else:
                self._recorder.delivered(row.row, self._clock.stamp())
            del send, work, packed_TD
            with self._idle:
                self._num_out -= 1
                self._idle.notify_all()


def describe(row: Transfer) -> str:
    """Description of a row in plan vocabulary: `row 4 (vision>llm, 0F0 to 2F0)`."""
    return f"row {row.row} ({row.edge}, {row.producer} to {row.consumer})"
