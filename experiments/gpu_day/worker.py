"""The process that measures: one at a time, replaced when a cell fails, hangs or kills it."""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from experiments.gpu_day.campaign import Session

JOIN_S = 10.0


class CellError(RuntimeError):
    """A cell went wrong in a way that is no refusal; its process has been ended."""


class HungError(CellError):
    """A cell did not end in time; its process has been ended."""


class Worker:
    """Calls functions of modules in a process of its own, which imports them.

    The calling process imports no framework: whatever brings a measurement down takes nothing with it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, module: str, function: str, *arguments: object, timeout_s: float) -> Any:
        """What `module.function(session, *arguments)` returns.

        Raises:
            ValueError: it refused, with its one line.
            CellError: it raised anything else, or its process died or did not answer in time.
        """
        pipe = self._started()
        try:
            pipe.send((module, function, arguments))
            if not pipe.poll(timeout_s):
                raise HungError(f"not done after {timeout_s:.0f} s")
            kind, answer = pipe.recv()
        except (EOFError, ConnectionError):
            death = self._death()
            self.close()
            raise CellError(death) from None
        except BaseException:
            self.close()
            raise
        if kind == "refused":
            raise ValueError(answer)
        if kind == "failed":
            self.close()
            raise CellError(answer)
        return answer

    def close(self) -> None:
        """End the process, and what it started."""
        process, self._process, pipe, self._pipe = self._process, None, self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None and process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                process.kill()
            process.join(JOIN_S)

    def _started(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(there, self._session))
            self._process.start()
            there.close()
        return self._pipe

    def _death(self) -> str:
        assert self._process is not None
        self._process.join(JOIN_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def _serve(pipe: Connection, session: Session) -> None:
    """Answer calls until the caller is gone. What is printed here goes to stderr."""
    with suppress(PermissionError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = "1"  # as a rank has; read when torch is first imported
    if session.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    while True:
        try:
            module, function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(session, module, function, arguments))
        _give_back()


def _answer(session: Session, module: str, function: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "done", getattr(importlib.import_module(module), function)(session, *arguments)
    except ValueError as error:
        return "refused", " ".join(str(error).split()) or "refused without a word"
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split()):.500}"


def _give_back() -> None:
    """What a cell has left on the device, so that the next one finds it empty.

    What lives on, such as imported modules, is not looked through again: that takes longer than most cells.
    """
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
