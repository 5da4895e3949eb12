"""Trains a plan with torch's FSDP2: mesh, wrapping, precision, recomputation as `fsdp2.json` says.

The blocks are transformers' own, as this workbench builds them; all else here is plain torch, to be changed
as you like. Every rank takes the plan's microbatches of one replica, encoders first. A rank without an item
of a module takes part with one that counts nothing, since gathering and summing weights are collectives.

With --export, SIGTERM ends the training after the step in progress and writes the weights. torchrun passes
the signal on and waits 30 s for its processes; --export-every is for machines that give no such notice.

Run: torchrun --nproc-per-node N train.py [--steps 10] [--data FOLDER] [--export FOLDER] [--device cpu]
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from runtime.data.batches import DataSource, SyntheticSource, microbatch_data
from runtime.models.adapter import Context, MicrobatchData, StageLayer
from runtime.preprocess.source import source_of
from runtime.reference import all_items, features_of, whole_stage
from runtime.state.weights_export import check_export, exporting, refuse_taken, write_part
from runtime.step.stage_edges import entering_part
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.world.local_world import AGENT
from workbench.data.sample import Sample
from workbench.job.run_options import LEARNING_RATE
from workbench.model.model_graph import Module
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_targets
from workbench.schedule.sharded import ReshardAfter
from workbench.supervised import end_with_launcher
from workbench.termination import leave
from workbench.whole_file import check_writable

HERE = Path(__file__).resolve().parent
LONGEST_WAIT_S = 60.0


class ShardingMesh(NamedTuple):
    """`fsdp2.json`: copies of all weights, ranks that shard each, until when they stay gathered, formats.

    Args:
        reshard_after: with `step`, gradients are reduced once a step, too.
        recompute: module -> numbers of the layers that backwards compute again, from 0.
    """

    replicate: int
    shard: int
    reshard_after: ReshardAfter
    weights: str
    compute: str
    recompute: dict[str, list[int]]


class Unit(nn.Module):
    """A layer as FSDP2 gathers it; it may be computed again in the backward."""

    def __init__(self, layer: nn.Module, *, is_recomputed: bool) -> None:
        super().__init__()
        self.layer, self.is_recomputed = layer, is_recomputed

    def forward(self, hidden: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        """As the layer, with a gradient of zero for weights that nothing reads: all ranks sum the same."""
        output: Tensor
        if self.is_recomputed:
            output = checkpoint(
                self.layer, hidden, features, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            output = self.layer(hidden, features, context)
        trained = [weight for weight in self.layer.parameters() if weight.requires_grad]
        return output + sum(weight.flatten()[0] * 0.0 for weight in trained)


class WholeModule(nn.Module):
    """All layers of one module, on packed tokens."""

    def __init__(
        self, plan: Plan, module: Module, layout: ShardingMesh, device: torch.device, weights: Path | None
    ) -> None:
        super().__init__()
        dtype = getattr(torch, layout.weights)
        built = build_stage_module(
            plan, whole_stage(module), seed=0, dtype=dtype, weights=weights, device=device
        )
        again = layout.recompute.get(module.name, [])
        self.adapter, self.edges, self.leaving = built.adapter, built.edges, built.leaving
        self.stage = built.stage
        self.tied = {index for index, layer in enumerate(module.layers) if layer.tied}
        units = (Unit(layer, is_recomputed=index in again) for index, layer in enumerate(built.layers))
        self.units = nn.ModuleList(units)
        self.compute = getattr(torch, layout.compute)
        for weight in self.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(self.compute)

    def forward(
        self, data: MicrobatchData, features: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(what leaves the last layer, edge that leaves earlier -> what leaves there)."""
        device = next(self.parameters()).device
        context = self.adapter.context(data, device, self.compute)
        hidden: Tensor | None = None
        left: dict[str, Tensor] = {}
        for index, unit in enumerate(self.units):
            entering = {
                e.name: entering_part(e, index, features[e.name], is_aside=e.name in data.context_images)
                for e in self.edges
                if index in e.entered and e.name in features
            }
            if hidden is not None:
                for name in [name for name in entering if name in data.placed]:
                    hidden = hidden.index_add(0, data.placed[name], entering.pop(name))
            hidden = unit(hidden, entering, context)
            left |= {edge.name: hidden for edge in self.leaving if edge.after_layer == index}
        assert hidden is not None, "a module has a layer"
        return hidden, left


def sharded(
    plan: Plan, layout: ShardingMesh, device: torch.device, weights: Path | None
) -> dict[str, WholeModule]:
    """Every module, each layer a unit of FSDP2; tied layers belong to the module's own unit."""
    mesh = init_device_mesh(
        device.type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard")
    )
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, layout.compute), reduce_dtype=getattr(torch, layout.weights)
    )
    reshards = layout.reshard_after == ReshardAfter.PASS
    wrapped: dict[str, WholeModule] = {}
    for module in plan.model.modules:
        whole = WholeModule(plan, module, layout, device, weights)
        for index, unit in enumerate(whole.units):
            if index not in whole.tied:
                fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(whole, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        wrapped[module.name] = whole
    return wrapped


@dataclass(frozen=True)
class Trainer:
    """One rank's part of the training; `syncs_each`: reduce gradients and free weights every microbatch."""

    plan: Plan
    modules: Mapping[str, WholeModule]
    source: DataSource
    device: torch.device
    dtype: torch.dtype
    syncs_each: bool

    def step(self, optimizer: torch.optim.Optimizer, microbatches: list[tuple[Sample, ...]]) -> float:
        """One step; the mean loss of all text tokens of the batch."""
        num_targets = check_targets(self.plan)
        optimizer.zero_grad()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index, samples in enumerate(microbatches, start=1):
            is_last = index == len(microbatches)
            for module in self.modules.values():
                assert isinstance(module, FSDPModule)
                module.set_requires_gradient_sync(is_last or self.syncs_each)
                module.set_reshard_after_backward(is_last or self.syncs_each)
            loss = self.loss_sum(samples)
            total += loss.detach().double()
            # Gradients become the mean of all ranks'; the loss is the sum of what they have.
            (loss * dist.get_world_size() / num_targets).backward()
        optimizer.step()
        dist.all_reduce(total)
        return float(total) / num_targets

    def loss_sum(self, samples: tuple[Sample, ...]) -> Tensor:
        """Of the next-token losses of these samples."""
        part = replace(self.plan, batch=samples)
        outputs: dict[str, Tensor] = {}
        states: dict[str, Tensor] = {}
        total = torch.zeros((), device=self.device)
        for module in self.plan.model.in_order:
            microbatch = all_items(part, module)
            if microbatch is None:
                total = total + self.borrowed(module)
                continue
            features = {
                e.name: features_of(part, e, microbatch, states.get(e.name, outputs[e.source]))
                for e in self.plan.model.edges_into(module.name)
                if e.source in outputs
            }
            output, left = self.run(part, module, features)
            states |= left
            if module.has_loss:
                total = total + output
            else:
                outputs[module.name] = output
        return total

    def run(
        self, part: Plan, module: Module, features: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All items that the part's samples have of a module."""
        microbatch = all_items(part, module)
        assert microbatch is not None, "there are items"
        data = microbatch_data(
            part, whole_stage(module), microbatch, self.source, dtype=self.dtype, device=self.device
        )
        outputs: tuple[Tensor, dict[str, Tensor]] = self.modules[module.name](data, features)
        return outputs

    def borrowed(self, module: Module) -> Tensor:
        """Nothing, by way of an item that is not this rank's; no collective where no rank has one."""
        lender = next((sample for sample in self.plan.batch if sample.of(module.modality)), None)
        if lender is None:
            return torch.zeros((), device=self.device)
        output, _ = self.run(replace(self.plan, batch=(lender,)), module, {})
        return output.sum() * 0.0


def microbatches_of(plan: Plan, replica: int) -> list[tuple[Sample, ...]]:
    """The samples of each microbatch of the language model's replica."""
    llm = plan.model.llm.name
    microbatches = plan.microbatches_of[llm, replica]
    return [tuple(plan.sample[item.sample] for item in microbatch.items) for microbatch in microbatches]


def write_weights(folder: Path, modules: Mapping[str, WholeModule]) -> None:
    """Gather layer by layer, which the first rank writes as `workbench run --export` does: a collective."""
    for name, whole in modules.items():
        for part in whole.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for index, unit in enumerate(whole.units):
            assert isinstance(unit, Unit)
            assert isinstance(unit.layer, StageLayer)
            stage = replace(whole.stage, layers=(index, index + 1))
            named = StageModule(whole.adapter, stage, [unit.layer], ()).owned_weights()
            gathered = {
                each: tensor.full_tensor() for each, tensor in named.items() if isinstance(tensor, DTensor)
            }
            if dist.get_rank() == 0:
                write_part(folder, name, index, named | gathered)


@dataclass(frozen=True)
class Exports:
    """Folders of weights: `target` after the last step, and the latest of those written every few steps.

    Args:
        every: steps between those, which are `<target>-step-<number>`; None: only the last.
    """

    target: Path | None
    every: int | None
    plan: Plan
    origin: Path | None
    dtype: torch.dtype

    def check(self, steps: int) -> None:
        """Raise ValueError where weights cannot be written, before any rank waits for another."""
        if self.target is None:
            if self.every is not None:
                raise ValueError("--export-every writes weights every few steps; want --export FOLDER")
            return
        if self.every is not None and self.every < 1:
            raise ValueError(f"--export-every: want at least 1 step, got {self.every}")
        for step in range(self.every or steps, steps, self.every or 1):
            refuse_taken(self.at(step))
        check_export(self.target, self.plan.model, self.origin, self.dtype)
        if os.environ.get("RANK") == "0":  # which writes
            check_writable(self.target / "config.json")

    def at(self, step: int) -> Path:
        assert self.target is not None, "weights are written"
        return self.target.with_name(f"{self.target.name}-step-{step}")

    def after(self, step: int, modules: Mapping[str, WholeModule], *, is_last: bool) -> None:
        """Write what is due, then delete what it replaces: a collective."""
        if self.target is None or not (is_last or (self.every is not None and step % self.every == 0)):
            return
        folder = self.target if is_last else self.at(step)
        is_first = dist.get_rank() == 0
        with exporting(folder if is_first else None, self.plan.model, self.origin, dtype=self.dtype):
            write_weights(folder, modules)
        if not is_first:
            return
        sys.stderr.write(f"weights of step {step} written to {folder}\n")
        if self.every is not None and (before := (step - 1) // self.every * self.every):
            shutil.rmtree(self.at(before), ignore_errors=True)


def on_any_rank(number: int, device: torch.device) -> bool:
    """Whether the number is above 0 on any rank: a collective."""
    most = torch.tensor(number, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(most)


def train(trainer: Trainer, optimizer: torch.optim.Optimizer, exports: Exports, steps: int) -> int:
    """Take the steps, or end after the one in which a rank got SIGTERM; return the exit code.

    Later signals count no more: a cluster may send it to torchrun and to its processes, and torchrun again.
    """
    microbatches = microbatches_of(trainer.plan, dist.get_rank())
    arrived: list[int] = []
    if exports.target is not None:
        signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    for step in range(1, steps + 1):
        loss = trainer.step(optimizer, microbatches)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"step": step, "loss": loss}) + "\n")
            sys.stdout.flush()
        is_stopped = exports.target is not None and on_any_rank(len(arrived), trainer.device)
        exports.after(step, trainer.modules, is_last=is_stopped or step == steps)
        if is_stopped:
            return 128 + signal.SIGTERM
    return 0


def main() -> int:
    """This process is one rank of torchrun's; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps, all on the plan's batch")
    parser.add_argument("--data", help="data folder whose samples are the batch; default: random data")
    parser.add_argument(
        "--weights", type=Path, help="checkpoint, or a folder with one per module; default: random weights"
    )
    parser.add_argument(
        "--export",
        type=Path,
        help="new folder for the weights after the last step, adapters as PEFT has them; default: none",
    )
    parser.add_argument(
        "--export-every",
        type=int,
        metavar="STEPS",
        help="write weights every so many steps, too, to FOLDER-step-NUMBER; the latest is kept",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where torch sees one")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="of AdamW")
    given = parser.parse_args()
    if AGENT in os.environ:
        end_with_launcher()
    plan = read_plan(HERE / "plan.json")
    layout = ShardingMesh(**json.loads((HERE / "fsdp2.json").read_text(encoding="utf-8")))
    stored = getattr(torch, layout.weights)
    exports = Exports(given.export, given.export_every, plan, given.weights, stored)
    try:
        exports.check(given.steps)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl")
    source = source_of(given.data, None, plan, timeout_s=LONGEST_WAIT_S) or SyntheticSource(0)
    modules = sharded(plan, layout, device, given.weights)
    compute, syncs_each = getattr(torch, layout.compute), layout.reshard_after != ReshardAfter.STEP
    trainer = Trainer(plan, modules, source, device, compute, syncs_each)
    weights = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=given.learning_rate)
    code = train(trainer, optimizer, exports, given.steps)
    with suppress(RuntimeError):
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    leave(main())
