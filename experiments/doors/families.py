"""Composites of transformers, module by module: the same number of weights, and the same first loss.

Every small configuration of `composite_configs` is built by transformers on the meta device and, where its
parts run, in float64 with a checkpoint that the runtime reads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.doors import whole_models
from experiments.doors.detours import DETOURS
from experiments.doors.whole_configs import CONFIGS
from runtime.emulation.emulate import emulate
from runtime.run_settings import RunSettings
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.composites.composite import LLM
from workbench.model.composites.registry import COMPOSITES, take_apart
from workbench.model.model_graph import connect
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings
from workbench.planner.stage_counts import silent
from workbench.strategies import cornstarch

MOST_APART = 1e-10  # of a loss, relative
_LLM_STAGES = 2


def families_measured() -> dict[str, int]:
    """`families_total`, `families_split_equal`, `families_loss_equal`: kinds of composites."""
    kinds = {name: str(config["model_type"]) for name, config in CONFIGS.items()}
    split = {name: is_split_equal(config) for name, config in CONFIGS.items()}
    losses = {name: loss_error(name) <= MOST_APART for name in whole_models.LOSSES}
    return {
        "families_total": len(COMPOSITES),
        "families_split_equal": _all_of_a_kind(kinds, split),
        "families_loss_equal": _all_of_a_kind(kinds, losses),
    }


def is_split_equal(config: Mapping[str, Any]) -> bool:
    """Whether every module has as many weights as transformers' model, without those named as dropped."""
    parts = take_apart(config)
    dropped = tuple(part.weights for part in parts.dropped)
    sizes = dict.fromkeys(parts.modules, 0)
    for name, weight in whole_models.original(dict(config)).named_parameters():
        if not name.startswith(dropped):
            sizes[whole_models.owner_of(parts, name)] += weight.numel()
    ours = {
        name: module.num_parameters for name, module in whole_models.modules_of(dict(parts.modules)).items()
    }
    return sizes == ours


def loss_error(name: str) -> float:
    """Relative error of the first loss against transformers' model with the same checkpoint."""
    plan = plan_of(name)
    with TemporaryDirectory() as folder, wide_vision_rotations():
        model = whole_models.saved(name, Path(folder))
        settings = RunSettings(steps=1, warmup=0, weights=Path(folder), precision=Precision.FLOAT64)
        ours = emulate(lower(plan), settings).losses[0]
        reference = whole_models.whole_loss(name, model, plan)
    return abs(ours - reference) / abs(reference)


def plan_of(name: str, sample: Sample | None = None) -> Plan:
    """A plan with items of each encoder between texts; every encoder on one rank, the LLM on two."""
    modules = whole_models.modules_of(dict(take_apart(CONFIGS[name]).modules))
    encoders = [module for module_name, module in modules.items() if module_name != LLM]
    link = Link(name="local", bytes_per_s=1e9, latency_s=1e-4)
    num_ranks = len(encoders) + _LLM_STAGES
    node = Node(device="cpu", num_ranks=num_ranks, memory_bytes=2**33, num_cores=2)
    job = Job(
        name=name,
        model=connect(name, *([encoder, modules[LLM]] for encoder in encoders)),
        cluster=uniform("local", node, num_nodes=1, intra=link, inter=link),
        batch=(sample or whole_models.sample_of(name, modules),),
        layouts=(
            *(ModuleLayout(module=encoder.name, pp=1) for encoder in encoders),
            ModuleLayout(module=LLM, pp=_LLM_STAGES),
        ),
        settings=Settings(precision=Precision.FLOAT64, kernels=Kernels.EAGER),
    )
    return cornstarch.plan(job, CostModel(ideal_profile()), silent)


@contextmanager
def wide_vision_rotations() -> Iterator[None]:
    """Let transformers rotate patches in the model's type instead of float32."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in DETOURS]
    try:
        for owner, name, replacement in DETOURS:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _all_of_a_kind(kinds: Mapping[str, str], holds: Mapping[str, bool]) -> int:
    """The number of kinds all of whose configurations hold."""
    return len(
        {kinds[name] for name in holds}
        - {kinds[name] for name, holds_true in holds.items() if not holds_true}
    )
