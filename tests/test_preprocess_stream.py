"""Leases and the stream, step by step: whatever happens, every task counts once and memory is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.data.records import Record
from runtime.preprocess.leases import Leases
from runtime.preprocess.order import OrderSettings
from runtime.preprocess.stream import EncodedExample, Skipped, Stream

NUM, SIZE, WINDOW = 7, 2, 2


def records(num: int = NUM) -> list[Record]:
    return [Record(100 + i, (("text", "x"),)) for i in range(num)]


def stream(**other: object) -> Stream:
    chosen = {"batch_size": SIZE, "window": WINDOW, "lease_s": 5.0, "order": OrderSettings()} | other
    return Stream(records(), **chosen)  # type: ignore[arg-type]


def held(example: int) -> EncodedExample:
    return EncodedExample({"id": example, "texts": [3], "images": []}, (b"abcd" * 3,))


class Service(RuleBasedStateMachine):
    """Producers that work, die and dawdle; two trainers that go on, go back and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = stream()
        self.now_s = 0.0
        self.lent: list[tuple[bytes, tuple[int, int]]] = []
        self.done = {"a": 0, "b": 0}
        self.here = {"a"}
        self.stream.progress("a", 0)

    @rule(producer=st.sampled_from([b"p", b"q"]))
    def lend(self, producer: bytes) -> None:
        task = self.stream.leases.lend(producer, self.now_s)
        if task is not None:
            self.lent.append((producer, task))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), forgets=st.booleans())
    def finish(self, data: st.DataObject, forgets: bool) -> None:
        """A result may come late, after the task was lent to another, and twice."""
        index = data.draw(st.integers(0, len(self.lent) - 1))
        _, task = self.lent.pop(index) if forgets else self.lent[index]
        example = self.stream.record(task).id
        before = self.stream.leases.num_waiting + self.stream.leases.num_lent
        counted = self.stream.put(task, held(example))
        after = self.stream.leases.num_waiting + self.stream.leases.num_lent
        assert before - after == counted

    @rule(producer=st.sampled_from([b"p", b"q"]))
    def die(self, producer: bytes) -> None:
        for task in self.stream.leases.release(producer):
            self.leave_out(task)
        self.lent = [each for each in self.lent if each[0] != producer]

    @rule(wait_s=st.sampled_from([1.0, 6.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        for task in self.stream.leases.expire(self.now_s):
            self.leave_out(task)

    def leave_out(self, task: tuple[int, int]) -> None:
        """Given up: it is never lent again, and its place in the batch is filled all the same."""
        assert self.stream.put(task, Skipped(self.stream.record(task).id, "x", "lent too often"))

    @rule(name=st.sampled_from(["a", "b"]), position=st.integers(0, 5))
    def turn(self, name: str, position: int) -> None:
        self.stream.progress(name, position)
        self.done[name] = position
        self.here.add(name)

    @rule(name=st.sampled_from(["a", "b"]))
    def leave(self, name: str) -> None:
        self.stream.leave(name)
        self.here.discard(name)

    @invariant()
    def batches_are_those_in_reach(self) -> None:
        reach = {self.done[name] + ahead for name in self.here for ahead in range(WINDOW)}
        assert self.stream.num_open == len(reach) <= WINDOW * len(self.here)
        leases = self.stream.leases
        assert leases.num_waiting + leases.num_lent <= SIZE * len(reach)

    @invariant()
    def a_share_is_its_batch(self) -> None:
        for position in range(8):
            share = self.stream.share(position, 0, 1)
            if share is not None:
                ids = [each.header["id"] for held_ in share.microbatches for each in held_]
                ids += [each.id for each in share.skipped]
                start = 100 + position % 3 * SIZE
                assert sorted(ids) == [start, start + 1]

    def teardown(self) -> None:
        """Whatever went before, honest producers bring every wanted batch to its end."""
        for _ in range(SIZE * WINDOW * 4):
            self.wait(6.0)
            while (task := self.stream.leases.lend(b"z", self.now_s)) is not None:
                self.stream.put(task, held(self.stream.record(task).id))
        for name in self.here:
            for ahead in range(WINDOW):
                assert self.stream.share(self.done[name] + ahead, 0, 1) is not None


TestService = Service.TestCase
TestService.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_tasks_are_lent_in_order_and_given_up_after_three_times() -> None:
    leases = Leases(lease_s=10.0)
    for task in ((1, 0), (0, 1), (0, 0)):
        leases.add(task)
    assert [leases.lend(b"p", 0.0) for _ in range(4)] == [(0, 0), (0, 1), (1, 0), None]
    assert leases.complete((0, 1))
    assert not leases.complete((0, 1))
    assert leases.expire(9.0) == ()
    assert leases.expire(10.0) == ()
    assert leases.lend(b"q", 10.0) == (0, 0)
    assert leases.release(b"q") == ()
    assert leases.lend(b"q", 10.0) == (0, 0)
    assert leases.release(b"q") == ((0, 0),)
    with pytest.raises(ValueError, match="open already"):
        leases.add((1, 0))


@given(st.integers(1, NUM), st.integers(0, 30))
def test_positions_go_round(batch_size: int, position: int) -> None:
    found = stream(batch_size=batch_size)
    example = found.record((position, 0)).id
    assert found.batch_of(example) == position % found.num_batches


def test_what_does_not_fit_is_refused() -> None:
    for change, words in (
        ({"batch_size": 0}, "batch size: want 1 to 7"),
        ({"batch_size": 8}, "batch size: want 1 to 7"),
        ({"window": 0}, "window: want >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            stream(**change)
    found = stream()
    task = found.leases.lend(b"p", 0.0)
    assert task == (0, 0)
    with pytest.raises(ValueError, match="want example 100, got 105"):
        found.put(task, held(105))
    with pytest.raises(ValueError, match="want a position >= 0"):
        found.progress("a", -1)
    with pytest.raises(ValueError, match="example 106: in none of the 3 whole batches of 2"):
        found.batch_of(106)
