"""This workbench's own runtime under torchrun: runs any plan as it is."""

from workbench.export import expressible
from workbench.export.approximation import Approximation
from workbench.export.target import Files, Launch, Target
from workbench.plan.codec import dumps

PLAN = "plan.json"
_TRAINING = """\
Without flags this is a trial: random weights, random data, one step, nothing written. A training names all
of them, by paths that every node sees:

```bash
bash launch.sh --steps 1000 --weights CHECKPOINT --data DATA --next-samples \\
  --learning-rate 1e-5 --rate-warmup 30 --rate-decay 970 --clip-norm 1.0 \\
  --checkpoint CHECKPOINTS --resume --export TRAINED
```

`--data` wants a plan of that data folder, made by `workbench plan --data DATA`; `--resume` continues a
killed run from its latest checkpoint, with the rate of its step.
"""


def _files(approximation: Approximation) -> Files:
    return {PLAN: dumps(approximation.plan)}


def _launch(approximation: Approximation) -> Launch:
    on_host = approximation.plan.cluster.nodes[0].num_cores is not None
    threads = {"OMP_NUM_THREADS": ("1", "one thread a rank: the runtime's ranks share the cores")}
    return Launch(
        program=f"-m runtime.launch {PLAN} --device {'cpu' if on_host else 'cuda'}",
        environment=threads if on_host else nccl_environment(),
        container=f"Python 3.11 or later with this package: `pip install '.[run]'` in a checkout of it"
        f"{'' if on_host else ', with a torch built for the GPUs of the cluster'}.\n"
        "All flags of the program: `python -m runtime.launch --help`.",
        training=_TRAINING,
    )


def nccl_environment() -> dict[str, tuple[str, str]]:
    """Environment of processes on GPUs, for any program."""
    return {
        "OMP_NUM_THREADS": ("8", "threads of a process on the host"),
        "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "collectives are queued in the order in which they are issued"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "a failed collective ends the process"),
        "NCCL_DEBUG": ("WARN", "NCCL prints warnings"),
    }


TARGET = Target(
    name="torchrun",
    system="this workbench's runtime",
    summary="the plan file, and the runtime of this workbench to run it under torchrun",
    lacks=expressible.without_source,
    refuses=lambda plan: expressible.without_source(plan) or expressible.narrow_products(plan),
    changes=lambda _: (),
    alternatives=(),
    files=_files,
    launch=_launch,
    is_exact=True,
)
