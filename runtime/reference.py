"""The reference of all plans' results: one process, whole modules, the whole global batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.data.batches import DataSource, microbatch_data
from runtime.step.muon import build_optimizer
from runtime.step.optimizer import OptimizerSettings, clip_factor, squared_norm
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.device import CPU
from workbench.data.sample import Item
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.runnable import check_targets
from workbench.plan.stage import Stage

Named = dict[tuple[str, str], Tensor]  # (module, Hugging Face name) -> value


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Result of one optimizer step.

    Args:
        loss: sum of next-token losses of the global batch / number of its targets.
        gradients: of trainable weights, before clipping; zeros for those without one.
        weights: of all weights, after the step.
    """

    loss: float
    gradients: Named
    weights: Named


class Reference:
    """Trains the model of a plan in one process. The plan's stages and microbatches are ignored."""

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int,
        dtype: torch.dtype,
        weights: Path | None = None,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        self.plan = plan
        self.dtype = dtype
        self.settings = OptimizerSettings() if optimizer is None else optimizer
        self.modules = {
            module.name: build_stage_module(
                plan, whole_stage(module), seed=seed, dtype=dtype, weights=weights
            )
            for module in plan.model.modules
        }
        self._optimizer = build_optimizer(
            plan, self.modules.values(), self._trainable().values(), self.settings
        )

    def step(self, source: DataSource) -> ReferenceResult:
        """Run one step on the plan's global batch."""
        trainable = self._trainable()
        for parameter in trainable.values():
            parameter.grad = None
        num_targets = check_targets(self.plan)
        loss = self._loss_sum(source) / num_targets
        if loss.requires_grad:
            loss.backward()
        for parameter in trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {key: _copy(parameter.grad) for key, parameter in trainable.items()}
        self._update(trainable)
        weights = {key: parameter.detach().clone() for key, parameter in self._named()}
        return ReferenceResult(loss=float(loss.detach()), gradients=gradients, weights=weights)

    def _loss_sum(self, source: DataSource) -> Tensor:
        outputs: dict[str, Tensor] = {}
        states: dict[str, Tensor] = {}  # edge -> its state, for edges that leave before the last layer
        loss: Tensor | None = None
        for module in self.plan.model.in_order:
            microbatch = all_items(self.plan, module)
            if microbatch is None:
                continue
            stage_module = self.modules[module.name]
            data = microbatch_data(self.plan, stage_module.stage, microbatch, source, dtype=self.dtype)
            entering = self.plan.model.edges_into(module.name)
            features = {
                e.name: features_of(self.plan, e, microbatch, states.get(e.name, outputs[e.source]))
                for e in entering
                if e.source in outputs
            }
            outputs[module.name], left = stage_module.run(StageInput(None, data, features))
            states |= left
            if module.has_loss:
                loss = outputs[module.name] if loss is None else loss + outputs[module.name]
        if loss is None:
            raise ValueError(f"model {self.plan.model.name!r} has no text module, so it has no loss")
        return loss

    def _update(self, trainable: Mapping[tuple[str, str], nn.Parameter]) -> None:
        if self._optimizer is None:
            return
        if self.settings.clip_norm is not None:
            gradients = [p.grad for p in trainable.values() if p.grad is not None]
            factor = clip_factor(squared_norm(gradients, CPU), self.settings.clip_norm)
            for gradient in gradients:
                gradient.mul_(factor)
        self._optimizer.step()

    def _named(self) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
        for module, stage_module in self.modules.items():
            for name, parameter in stage_module.named_weights():
                yield (module, name), parameter

    def _trainable(self) -> dict[tuple[str, str], nn.Parameter]:
        return {key: parameter for key, parameter in self._named() if parameter.requires_grad}


def reference_step(
    plan: Plan,
    *,
    seed: int,
    dtype: torch.dtype,
    source: DataSource,
    weights: Path | None = None,
    optimizer: OptimizerSettings | None = None,
) -> ReferenceResult:
    """One optimizer step on the plan's global batch, from the same initial weights as the plan's ranks."""
    return Reference(plan, seed=seed, dtype=dtype, weights=weights, optimizer=optimizer).step(source)


def whole_stage(module: Module) -> Stage:
    """A stage with all layers of a module."""
    return Stage(id=0, module=module.name, replica=0, layers=(0, len(module.layers)), ranks=((0,),))


def all_items(plan: Plan, module: Module) -> Microbatch | None:
    """Every item of the batch, one per row; None where no sample has the module's modality."""
    if module.modality == TEXT:
        items = [Item(sample.id, 0) for sample in plan.batch]
    else:
        items = [Item(sample.id, s.k) for sample in plan.batch for s in sample.of(module.modality)]
    if not items:
        return None
    rows = tuple((item,) for item in items)
    return Microbatch(module=module.name, replica=0, index=0, rows=rows)


def features_of(plan: Plan, edge: Edge, microbatch: Microbatch, output_TD: Tensor) -> Tensor:
    """The features that a microbatch needs, in its order, from an edge's packed output of the whole batch."""
    routing, source = routing_of(plan), plan.model.module(edge.source)
    source_items = all_items(plan, source)
    assert source_items is not None, "its output exists"
    wanted = routing.wanted(edge, microbatch)
    if wanted == source_items.items:
        return output_TD
    tokens = [
        routing.tokens(source, item, source.layers[edge.after_layer].emits) for item in source_items.items
    ]
    pieces = dict(zip(source_items.items, output_TD.split(tokens), strict=True))
    return torch.cat([pieces[item] for item in wanted])


def _copy(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "missing gradients were set"
    return gradient.detach().clone()
