"""Rounds of the preprocessing service: a server with producers, a trainer, and the wire between them."""

import json
import os
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from experiments.chaos.fault import INJECTED, OF_WORKERS, Fault, inflict, strike
from experiments.chaos.findings import Expectations, Findings, ends
from experiments.chaos.processes import children, end_all, left_after, marked, until
from experiments.chaos.proxy import Manners, Proxy
from experiments.chaos.room import Program, Room, workbench
from experiments.chaos.trainer import noted
from runtime.data.scenes import make
from runtime.preprocess.images import SquareRule
from runtime.preprocess.loader import ColocatedLoader
from workbench.stopped import is_stopped

EXAMPLES, BATCH_SIZE, BATCHES = 24, 4, 60
IMAGE_PX, PATCH_PX = 32, 8
PRODUCERS = 2
TRAINER_WAIT_S = 60.0  # in which a killed server is at work again, on however busy a machine
BEGUN_S, ENDED_S, GONE_S, NOTICED_S, LATEST_S = 240.0, 240.0, 2.0, 5.0, 1.5
BAD_MANNERS = {
    Fault.DELAYED_MESSAGES: Manners(delay_s=0.5),
    Fault.LOST_MESSAGES: Manners(is_deaf=True),
    Fault.CUT_CONNECTIONS: Manners(is_cut=True),
}
BAD_S = (0.5, 3.0)
FIRST_PORT, NUM_PORTS, PORTS_APART = 10_000, 5_000, 1_009
OF_TRAINER = (Fault.KILL_TRAINER, Fault.TERM_TRAINER)
SERVER: Expectations = {
    Fault.KILL_SUPERVISOR: ends(-9),
    Fault.KILL_ALL: ends(-9),
    Fault.TERM_SUPERVISOR: ends(0),
    Fault.PAUSE_SUPERVISOR: ends(0),
    Fault.KILL_WORKER: ends(0),
    Fault.TERM_WORKER: ends(0),
    Fault.STOP_WORKER: ends(0),
    Fault.PAUSE_WORKER: ends(0),
    Fault.NO_DESCRIPTORS: ends(0),
    Fault.SECOND_SUPERVISOR: ends(0),
    Fault.CLOCK_JUMPS: ends(0),
    Fault.KILL_TRAINER: ends(0),
    Fault.TERM_TRAINER: ends(0),
    **dict.fromkeys(BAD_MANNERS, ends(0)),
}
TRAINER: Expectations = {
    Fault.KILL_ALL: ends(-9),
    Fault.KILL_TRAINER: ends(-9),
    Fault.TERM_TRAINER: ends(143, words="ended by SIGTERM"),
}


@dataclass(slots=True)
class _Service:
    """The processes of a round."""

    room: Room
    images: Path
    port: int
    proxy: Proxy
    server: Program
    trainer: Program
    servers: list[Program] = field(default_factory=list)

    @property
    def notes(self) -> Path:
        return self.room.folder / "notes.jsonl"

    @property
    def done(self) -> int:
        """The number of batches that the trainer has noted."""
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0


@dataclass(frozen=True)
class Serving:
    """A server with two producers, and a trainer behind a proxy."""

    images: Path

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(SERVER)

    @cached_property
    def undisturbed(self) -> tuple[str, ...]:
        """The contents of each batch, as prepared by one process."""
        make(self.images, num_samples=EXAMPLES, seed=0, kinds=("image",))
        rule = SquareRule(image_px=IMAGE_PX, patch_px=PATCH_PX)
        loader = ColocatedLoader(self.images, rule, batch_size=BATCH_SIZE)
        return tuple(noted(loader.next()) for _ in range(BATCHES))

    def play(self, room: Room, fault: Fault, seed: str, rng: random.Random) -> Findings:
        """Play a round: restart ended programs until the trainer has all its batches."""
        findings, expected_lines = Findings(), self.undisturbed
        service = self._begin(room, fault, seed)
        try:
            until(lambda: service.done > 0 or service.trainer.process.poll() is not None, BEGUN_S)
            time.sleep(rng.uniform(0, LATEST_S))
            before, start_s = service.done, time.monotonic()
            stopped = self._hurt(service, fault, rng, findings)
            self._finish(service, fault, before, start_s, stopped, findings)
            findings.code, findings.said = service.server.process.returncode, service.server.last_line[:300]
            lines = service.notes.read_text().splitlines()
            findings.lost_steps += sum(json.loads(line)[0] != index for index, line in enumerate(lines))
            findings.lost_steps += max(0, len(expected_lines) - len(lines))
            findings.wrong_losses += sum(
                one != expected_line for one, expected_line in zip(lines, expected_lines, strict=False)
            )
            findings.leftover_files += room.left_over()
        finally:
            service.proxy.close()
        return findings

    def _begin(self, room: Room, fault: Fault, seed: str) -> _Service:
        port = _free_port()
        proxy = Proxy(port)
        server = self._serve(room, "server", port, fault, seed)
        until(lambda: "serving" in server.printed or server.process.poll() is not None, BEGUN_S)
        service = _Service(room, self.images, port, proxy, server, server)
        service.trainer = self._train(service, "trainer")
        return service

    def _serve(self, room: Room, name: str, port: int, fault: Fault | None = None, seed: str = "") -> Program:
        sizes = {"image-px": IMAGE_PX, "patch-px": PATCH_PX, "batch-size": BATCH_SIZE}
        options = [f"--{key}={value}" for key, value in (sizes | {"producers": PRODUCERS}).items()]
        words = ("preprocess", "serve", self.images, *options, "--port", port, "--open")
        return room.start(name, *workbench(fault, seed, *words))

    def _train(self, service: _Service, name: str) -> Program:
        address = f"tcp://127.0.0.1:{service.proxy.port}"
        return service.room.start(name, "trainer", address, service.notes, BATCHES, TRAINER_WAIT_S)

    def _hurt(self, service: _Service, fault: Fault, rng: random.Random, findings: Findings) -> int | None:
        """Inflict the fault; returns the process that is stopped, or None."""
        target = service.server.pid
        if fault in BAD_MANNERS:
            service.proxy.manners = BAD_MANNERS[fault]
            time.sleep(rng.uniform(*BAD_S))
            service.proxy.manners = Manners()
        elif fault is Fault.KILL_ALL:
            for pid in marked(service.room.mark):
                inflict(Fault.KILL_WORKER, pid, rng)
        elif fault is Fault.SECOND_SUPERVISOR:
            second = self._serve(service.room, "second", service.port)
            second.process.wait(ENDED_S)
            findings.hold(second, ends(2, words=f"{service.port}"), prefix="second: ")
        elif fault in OF_TRAINER:
            inflict(fault, service.trainer.pid, rng)
        elif fault in OF_WORKERS and fault is not Fault.NO_DESCRIPTORS:
            return strike(fault, rng.choice(children(service.room.mark, target) or [target]), rng)
        elif fault not in INJECTED:
            return strike(fault, target, rng)
        return None

    def _finish(
        self,
        service: _Service,
        fault: Fault,
        before: int,
        start_s: float,
        stopped: int | None,
        findings: Findings,
    ) -> None:
        """Wait for the trainer; programs that end before it are judged and restarted."""

        def is_over() -> bool:
            now_s = time.monotonic() - start_s
            if findings.recovery_s is None and service.done > before:
                findings.recovery_s = now_s
            if stopped is not None and findings.noticed_s is None and not is_stopped(stopped):
                findings.noticed_s = now_s
            self._replace(service, fault, findings)
            return service.trainer.process.poll() == 0

        if not until(is_over, ENDED_S):
            findings.unnamed_causes.append(f"not done after {ENDED_S:g} s: {service.trainer.last_line:.300}")
        if stopped is not None:
            until(lambda: not is_stopped(stopped), NOTICED_S)
            findings.noticed_s = findings.noticed_s or time.monotonic() - start_s
            findings.late_notices += findings.noticed_s > NOTICED_S + 1.0 and is_stopped(stopped)
        service.server.process.terminate()
        if not until(lambda: service.server.process.poll() is not None, ENDED_S):
            findings.unnamed_causes.append("the server did not end when asked to")
        else:
            findings.hold(service.server, ends(0), prefix="server, asked to end: ")
        findings.orphans += [orphan.command[:200] for orphan in left_after(service.room.mark, GONE_S)]
        end_all(service.room.mark)

    def _replace(self, service: _Service, fault: Fault, findings: Findings) -> None:
        if service.server.process.poll() is not None and service.trainer.process.poll() != 0:
            findings.hold(service.server, SERVER[fault], prefix="server: ")
            service.server = self._serve(service.room, "server-again", service.port)
        code = service.trainer.process.poll()
        if code not in (None, 0):
            expected = TRAINER.get(fault)
            if expected is None:
                findings.unnamed_causes.append(f"trainer: exit code {code}: {service.trainer.last_line:.300}")
            else:
                findings.hold(service.trainer, expected, prefix="trainer: ")
            service.trainer = self._train(service, "trainer-again")


def _free_port() -> int:
    """One below those that other programs' connections get before the server has imported all it needs."""
    for port in range(FIRST_PORT + os.getpid() * PORTS_APART % NUM_PORTS, FIRST_PORT + 2 * NUM_PORTS):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")
