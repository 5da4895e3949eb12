"""SimPy with nothing to simulate: what its clock alone costs."""

import time

from simpy.core import Environment
from simpy.events import ProcessGenerator


def timeouts_per_s(num_processes: int, num_timeouts: int) -> float:
    """Timeouts a second of CPU time, waited for by processes that each have a length of their own."""
    env = Environment()
    each = -(-num_timeouts // num_processes)
    for process in range(num_processes):
        env.process(_wait(env, 1.0 + process / num_processes, each))
    started = time.process_time()
    env.run()
    return num_processes * each / (time.process_time() - started)


def _wait(env: Environment, length_s: float, times: int) -> ProcessGenerator:
    for _ in range(times):
        yield env.timeout(length_s)
