"""Offload on a GPU, against streams that run as late or as early as the waits between them allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.step import offload
from runtime.step.offload import Offload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REUSED, FRESH = 0xAA, 0xFF  # what other tensors write into freed memory, and what is in new memory


class Stream:
    """Work in order; nothing runs before `run`."""

    def __init__(self, device: torch.device = CUDA) -> None:
        del device
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        asked = len(other.work)
        self.work.append(lambda: other.run(asked))

    def run(self, stop: int | None = None) -> None:
        while self.done < (len(self.work) if stop is None else stop):
            self.done += 1
            self.work[self.done - 1]()


class Event:
    """A place in a stream's work."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.stream, self.place = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.work)


class Memory:
    """A storage: emptied and filled it has another block; work in streams keeps the one it was given."""

    def __init__(self, gpu: Gpu, num_bytes: int, device: torch.device = CUDA) -> None:
        self.gpu, self.device = gpu, device
        self.block = bytearray([FRESH] * num_bytes)
        self.readers: list[Stream] = []

    def nbytes(self) -> int:
        return len(self.block)

    def copy_(self, source: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        ours, theirs = self.block, source.block
        self.gpu.current.work.append(lambda: ours.__setitem__(slice(None), theirs))

    def resize_(self, num_bytes: int) -> None:
        """Freed memory is used again in the order of the compute stream, unless another stream was noted."""
        if not self.readers:
            freed = self.block
            self.gpu.compute.work.append(lambda: freed.__setitem__(slice(None), bytes([REUSED] * len(freed))))
        self.block, self.readers = bytearray([FRESH] * num_bytes), []


class Gpu:
    """What `runtime.step.offload` asks of torch."""

    uint8 = None

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.side: list[Stream] = []
        self.pinned: list[Memory] = []
        self.cuda = SimpleNamespace(
            Stream=self._stream,
            stream=self._in_stream,
            current_stream=lambda device: self.current,
            Event=Event,
        )

    def _stream(self, device: torch.device) -> Stream:
        self.side.append(Stream(device))
        return self.side[-1]

    @contextmanager
    def _in_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, num_bytes: int, **options: Any) -> SimpleNamespace:
        if options.get("pin_memory"):
            self.pinned.append(Memory(self, num_bytes, device=CPU))
            return SimpleNamespace(untyped_storage=lambda: self.pinned[-1])
        return SimpleNamespace(set_=lambda memory: SimpleNamespace(record_stream=memory.readers.append))


class OneStage(Offload):
    """Whose weights are given."""

    def __init__(self, *memories: Memory) -> None:
        super().__init__({})
        self.memories = memories

    def _storages(self, stage: int, optimizer: object) -> Iterator[Any]:
        del stage, optimizer
        yield from self.memories


@pytest.mark.parametrize("side_runs", ["first", "last"])
def test_weights_come_back_whole_in_whatever_order_streams_run(
    monkeypatch: pytest.MonkeyPatch, side_runs: str
) -> None:
    """Written, taken to the host, read again and changed, twice; host memory is pinned once for each."""
    gpu = Gpu()
    monkeypatch.setattr(offload, "torch", gpu)
    weights = [Memory(gpu, 4), Memory(gpu, 2)]
    stage = OneStage(*weights)
    seen: list[bytes] = []

    def compute(value: int) -> None:
        for memory in weights:
            block = memory.block
            gpu.compute.work.append(lambda block=block: seen.append(bytes(block)))  # type: ignore[misc]
            gpu.compute.work.append(
                lambda block=block: block.__setitem__(slice(None), bytes([value] * len(block)))  # type: ignore[misc]
            )

    compute(1)
    for value in (2, 3):
        copied = stage.leave(0, None)
        assert copied is not None
        assert (copied.stream, copied.place) == (gpu.side[0], len(gpu.side[0].work))
        assert [memory.nbytes() for memory in weights] == [0, 0]
        if side_runs == "first":
            gpu.side[0].run()
        stage.come_back(0)
        compute(value)
    (side,) = gpu.side
    for stream in (side, gpu.compute) if side_runs == "first" else (gpu.compute, side):
        stream.run()
    assert seen[2:] == [bytes([1] * 4), bytes([1] * 2), bytes([2] * 4), bytes([2] * 2)]
    assert len(gpu.pinned) == len(weights)
