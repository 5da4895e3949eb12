"""The long-running loads: steps of a run and of elastic training, and the preprocessing service."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import workbench
from experiments.chaos.model import SEED, write_job
from experiments.oobleck import chaos_job
from experiments.soak.sampling import Series
from runtime.data.scenes import make
from runtime.elastic.training import ElasticTraining
from runtime.launch import run_local
from runtime.preprocess.images import SquareRule
from runtime.preprocess.loader import ServedLoader, Subscription
from runtime.preprocess.server import Server, ServerSettings
from runtime.run_settings import RunSettings
from runtime.state.checkpoint import Checkpoints
from runtime.world.pool import Pool
from workbench.job.job import load_job
from workbench.plan.plan import Plan

SAMPLES = 100  # of each series
SAVE_EVERY = 100
NODES = 2
EXAMPLES, PRODUCERS = 24, 2
RULE = SquareRule(image_px=32, patch_px=8)
WAIT_S = 60.0

Load = Callable[[int], Series]


def run_steps(steps: int) -> Series:
    """A run on two ranks with periodic saves; `supervisor` is this process."""
    series, interval = Series(), max(1, steps // SAMPLES)
    with Pool(2) as pool, tempfile.TemporaryDirectory(prefix="soak-") as folder:

        def progress(done: int, total: int, loss: float) -> None:
            del total, loss
            if done % interval == 0:
                ranks = {f"rank {rank}": pid for rank, pid in enumerate(pool.process_ids())}
                series.sample(done, {"supervisor": os.getpid()} | ranks)

        settings = RunSettings(
            steps=steps,
            seed=SEED,
            timeout_s=WAIT_S,
            checkpoints=Checkpoints(folder=Path(folder) / "saves", every=SAVE_EVERY),
        )
        run_local(_small_plan(Path(folder)), settings, pool=pool, progress=progress)
    return series


def _small_plan(folder: Path) -> Plan:
    write_job(folder / "job.yaml", ranks=2)
    return workbench.plan(load_job(folder / "job.yaml"))


def elastic_steps(steps: int) -> Series:
    """Elastic training on two undisturbed nodes; `supervisor` is this process."""
    series, interval = Series(), max(1, steps // SAMPLES)
    nodes = [f"node{number}" for number in range(NODES)]
    with ElasticTraining(chaos_job.elastic_job(NODES), nodes) as training:
        for done in range(interval, steps + 1, interval):
            training.train(done)
            members = {node: training.nodes.process_ids(node)[0] for node in nodes}
            series.sample(done, {"supervisor": os.getpid()} | members)
    return series


def requests(number: int) -> Series:
    """Requests for batches of one example; server and trainer are threads of this process."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        make(Path(folder) / "images", num_samples=EXAMPLES, seed=0, kinds=("image",))
        return _served(Path(folder) / "images", number)


def _served(folder: Path, number: int) -> Series:
    series, interval = Series(), max(1, number // SAMPLES)
    server = Server(ServerSettings(folder=folder, rule=RULE, batch_size=1, num_producers=PRODUCERS))
    is_over = threading.Event()
    thread = threading.Thread(target=server.serve, args=(is_over.is_set,))
    thread.start()
    try:
        loader = ServedLoader(Subscription(address=server.address, timeout_s=WAIT_S))
        for done in range(1, number + 1):
            loader.next()
            if done % interval == 0:
                producers = loader.status()["local"].values()
                named = {f"producer {index}": pid for index, pid in enumerate(sorted(producers))}
                series.sample(done, {"server and trainer": os.getpid()} | named)
        loader.close()
    finally:
        is_over.set()
        thread.join()
    return series


LOADS: dict[str, Load] = {"run": run_steps, "elastic": elastic_steps, "preprocess": requests}
