"""Users' additions to a stage: callbacks around the projector, and weights that stay frozen."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runtime.frontend.callbacks import called
from runtime.models.adapter import MicrobatchData
from runtime.models.projector import ProjectorLayer
from runtime.models.vision_rotary import QwenMerger
from runtime.step.stage_module import StageModule, build_stage_module
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

# Shape suffixes: T = packed tokens, D = hidden width.

Outputs = tuple[Tensor, ...]  # per item, [tokens, width]
AfterCallback = Callable[[dict[str, Any], Outputs], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundProjector:
    """Callbacks of one encoder, called where its last layer runs, per microbatch.

    Each is called with {"items": ((sample, k), ...), "num_tokens": (tokens of each, ...)} and the
    items' tensors, and returns as many tensors of the same shapes: the number of
    tokens of an item in the language model is fixed before the run.

    Args:
        after_encoder: between the encoder (including its final norm) and the projector.
        after_projector: after the projector.
    """

    after_encoder: AfterCallback | None = None
    after_projector: AfterCallback | None = None


def call_checked(callback: AfterCallback, inputs: dict[str, Any], outputs: Outputs) -> Outputs:
    """Call a callback and return its outputs.

    Raises:
        ValueError: it returned another number of tensors, or other shapes.
    """
    returned = tuple(called(callback, "around the projector", inputs, outputs))
    want, have = [tuple(x.shape) for x in outputs], [tuple(y.shape) for y in returned]
    if want != have:
        raise ValueError(
            f"callback {_name(callback)!r} must keep the shape of every item, {want}, got {have}; "
            "how many tokens an item makes is set before the encoder"
        )
    return returned


def _name(callback: object) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserStage:
    """Builds stages of users' modules; a `runtime.rank_job.Build`.

    Args:
        callbacks: by module name.
        frozen: (module, Hugging Face name) of weights that stay frozen although other weights of their
            layer are trained.
        buffers: by module name: Hugging Face name -> its values, such as rotary frequencies; constants of
            layers are read with the weights instead.
    """

    callbacks: Mapping[str, AroundProjector] = field(default_factory=dict)
    frozen: frozenset[tuple[str, str]] = frozenset()
    buffers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def __call__(self, plan: Plan, stage: Stage, **how: Any) -> StageModule:
        """As `build_stage_module`, with the user's frozen weights, buffers and callbacks."""
        built = build_stage_module(plan, stage, **how)
        for name, parameter in built.named_weights():
            if (stage.module, name) in self.frozen:
                parameter.requires_grad = False
        values = self.buffers.get(stage.module, {})
        for name, buffer in built.adapter.buffers.items():
            if name in values:
                buffer.copy_(values[name])
        callbacks = self.callbacks.get(stage.module)
        if callbacks is not None:
            for layer in built.layers:
                if isinstance(layer, ProjectorLayer | QwenMerger):
                    _Hooks(callbacks).put_on(layer)
        return built

    def check_pickles(self) -> None:
        """Raise ValueError for a callback that cannot be pickled by its name."""
        for name, around in self.callbacks.items():
            for callback in (around.after_encoder, around.after_projector):
                try:
                    pickle.dumps(callback)
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise ValueError(
                        f"module {name!r}: processes find callbacks by name; define {_name(callback)!r} at "
                        f"the top of a module, or emulate the ranks: {error}"
                    ) from None


class _Hooks:
    """Callbacks as hooks on a projector layer, which leave the names of its weights unchanged."""

    def __init__(self, callbacks: AroundProjector) -> None:
        self._callbacks = callbacks
        self._data: MicrobatchData | None = None

    def put_on(self, layer: ProjectorLayer | QwenMerger) -> None:
        layer.register_forward_pre_hook(self._remember)
        if isinstance(layer, QwenMerger):  # the encoder and its merger have nothing between them
            layer.register_forward_hook(self._after)
            return
        if self._callbacks.after_encoder is not None:
            layer.projector.register_forward_pre_hook(self._before)
        if self._callbacks.after_projector is not None:
            layer.projector.register_forward_hook(self._after)

    def _remember(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        del layer
        self._data = arguments[2].data  # (hidden, features, context)

    def _before(self, projector: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        del projector
        assert self._callbacks.after_encoder is not None
        return (self._called(self._callbacks.after_encoder, arguments[0]),)

    def _after(self, projector: nn.Module, arguments: tuple[Any, ...], y_TD: Tensor) -> Tensor:
        del projector, arguments
        assert self._callbacks.after_projector is not None
        return self._called(self._callbacks.after_projector, y_TD)

    def _called(self, callback: AfterCallback, x_TD: Tensor) -> Tensor:
        assert self._data is not None, "the layer's own hook runs first"
        data = self._data
        inputs = {"items": tuple(map(tuple, data.items)), "num_tokens": data.tokens_out}
        return torch.cat(call_checked(callback, inputs, torch.split(x_TD, list(data.tokens_out))))
