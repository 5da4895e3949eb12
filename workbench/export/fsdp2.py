"""FSDP2: a training program of plain torch, for plans whose ranks each hold all layers of all modules.

Source: torch.distributed.fsdp.fully_shard; Liang et al. 2025, "TorchTitan", section 2.1.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from workbench.export import expressible
from workbench.export.approximation import Alternative, Approximation, Change, all_sharded, in_settings
from workbench.export.module_layouts import placed_modules
from workbench.export.target import Files, Launch, Target
from workbench.export.torchrun import PLAN, nccl_environment
from workbench.export.trained import Trained
from workbench.model.lora import ADAPTED_BY_NAME
from workbench.model.trained import adapted_products
from workbench.plan.codec import dumps
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Sharding
from workbench.plan.recomputed_layers import recomputed_of
from workbench.schedule.sharded import ReshardAfter

LAYOUT, PROGRAM = "fsdp2.json", "train.py"
_SOURCE = "fsdp2_train.py"  # of the runtime
_TRAINING = f"""\
Without flags this is a trial: random weights, random data, ten steps, nothing written. Flags name the
weights to start from and where the trained ones go, by paths that every node sees:

```bash
bash launch.sh --steps 1000 --weights CHECKPOINT --data DATA --export TRAINED --export-every 100 \\
  --learning-rate 1e-5
```

Every step takes the same batch, that of the plan: `--data` gives it the content of a data folder, for a
plan made by `workbench plan --data DATA`. To take new samples in each step, put your loader in place of
`Trainer.source` in `{PROGRAM}`.
"""


def _lacks(trained: Trained) -> str | None:
    return (
        expressible.without_source(trained)
        or _untrained_adapters(trained)
        or expressible.other_optimizer(trained)
        or _reader_of_llm(trained)
    )


def _refuses(plan: Plan) -> str | None:
    return (
        _lacks(plan)
        or expressible.narrow_products(plan)
        or expressible.unplaced(plan)
        or _cut(plan)
        or _unequal_counts(plan)
    )


def _untrained_adapters(trained: Trained) -> str | None:
    """Adapters of products that are no linear layers of the blocks."""
    for module in trained.model.modules:
        names = sorted(adapted_products(module.layers).keys() - ADAPTED_BY_NAME.keys())
        if names:
            return f"lora adapters of {names[0]!r} of {module.name!r}"
    return None


def _cut(plan: Plan) -> str | None:
    """A module that is not whole on every rank."""
    for name, placed in placed_modules(plan).items():
        layout = placed.layout
        degrees = {"pp": placed.pp, "tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
        for degree, size in degrees.items():
            if size > 1:
                return f"{degree} {size} of {name!r}"
        if placed.ranks != plan.ranks:
            return f"ranks without {name!r}"
        if placed.virtual > 1:
            return f"{placed.virtual} stages of {name!r} on a rank"
    return None


def _unequal_counts(plan: Plan) -> str | None:
    """Ranks that would gather weights a different number of times."""
    llm = plan.model.llm.name
    counts = {len(plan.microbatches_of.get((llm, replica), ())) for replica in plan.replicas(llm)}
    return "ranks with different numbers of microbatches" if len(counts) > 1 else None


def _reader_of_llm(trained: Trained) -> str | None:
    """A module that reads the language model's states."""
    reader = next((edge.target for edge in trained.model.edges_out_of(trained.model.llm.name)), None)
    return None if reader is None else f"module {reader!r}, which reads the language model"


def _changes(plan: Plan) -> Sequence[Change]:
    changes = [
        *expressible.sharded_alike(plan),
        *expressible.sharded_as(plan, Sharding.GRADIENTS, Sharding.OPTIMIZER),
        *_whole_blocks(plan),
    ]
    if _encoders_apart(plan):
        changes.append(
            Change(has="microbatches of encoders of their own", gets="encoders run microbatch by microbatch")
        )
    return changes


def _encoders_apart(plan: Plan) -> bool:
    """Whether encoders group samples differently from the language model."""
    counts = {
        len(plan.microbatches_of.get((module.name, replica), ()))
        for module in plan.model.modules
        for replica in plan.replicas(module.name)
    }
    return len(counts) > 1


def _whole_blocks(plan: Plan) -> Sequence[Change]:
    """Recompute whole blocks instead of parts."""
    if not any(each.computed_again for each in plan.settings.modules):
        return ()

    def whole(settings: ModuleSettings) -> ModuleSettings:
        if not settings.computed_again:
            return settings
        return settings.recomputing(Recompute.BLOCKS)

    return in_settings("parts of blocks recomputed", "whole blocks recomputed", whole)


def layout_words(plan: Plan) -> dict[str, object]:
    """Content of `fsdp2.json`; see the program's `ShardingMesh`."""
    settings = plan.settings.of(plan.model.llm.name)
    num_ranks = len(plan.ranks)
    copies = num_ranks if settings.sharding is Sharding.NONE else settings.instances
    return {
        "replicate": copies,
        "shard": num_ranks // copies,
        "reshard_after": settings.reshard_after if settings.shards_parameters else ReshardAfter.STEP,
        "weights": str(plan.settings.optimizer_precision or plan.settings.precision),
        "compute": str(plan.settings.precision),
        "recompute": {
            module.name: layers
            for module in plan.model.modules
            if (layers := [index for index, again in enumerate(recomputed_of(plan, module.name)) if again])
        },
    }


def _files(approximation: Approximation) -> Files:
    plan = approximation.becomes
    return {
        PLAN: dumps(plan),
        LAYOUT: json.dumps(layout_words(plan), indent=2) + "\n",
        PROGRAM: program_text(),
    }


def program_text() -> str:
    """The program's text, read from the runtime's module without importing it, since that needs torch."""
    spec = find_spec("runtime")
    assert spec is not None, "the runtime is installed with the planner"
    assert spec.origin is not None, "it is a package of files"
    return (Path(spec.origin).parent / _SOURCE).read_text(encoding="utf-8")


def _launch(approximation: Approximation) -> Launch:
    on_host = approximation.plan.cluster.nodes[0].num_cores is not None
    threads = {"OMP_NUM_THREADS": ("1", "one thread a rank: ranks share the cores")}
    return Launch(
        program=f"{PROGRAM} --device {'cpu' if on_host else 'cuda'}",
        environment=threads if on_host else nccl_environment(),
        container="Python 3.11 or later with torch 2.11 or later and this package, which builds the model's "
        "blocks from transformers, and their adapters: `pip install '.[run]'` in a checkout of it. "
        "`python train.py --help` lists the flags.",
        training=_TRAINING,
    )


TARGET = Target(
    name="fsdp2",
    system="torch FSDP2",
    summary="a training program of plain torch with FSDP2, and the layout that it reads",
    lacks=_lacks,
    refuses=_refuses,
    changes=_changes,
    alternatives=(
        Alternative(words="weights sharded over all ranks", job=all_sharded),
        Alternative(words="strategy fsdp", strategy="fsdp"),
        Alternative(words="strategy hsdp", strategy="hsdp"),
    ),
    files=_files,
    launch=_launch,
)
