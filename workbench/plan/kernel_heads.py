"""Widths of heads that this project's attention kernels take; on a GPU nothing else runs their attention."""

from collections.abc import Iterator

from workbench.masks.patterns import CAUSAL
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

HEAD_DIMS = (32, 64, 72, 80, 96, 128, 192, 256)
CPU = "cpu"  # kind of device, on which attention is dense


def check_kernel_heads(plan: Plan, where: str) -> None:
    """Raise ValueError for heads that no kernel takes, on a device that needs one for them.

    Kernels run what has a mask other than a causal one, tokens on several ranks, or sinks.

    Args:
        plan: any plan.
        where: kind of devices that are to run it.

    Complexity: O(layers of all stages).
    """
    if where == CPU:
        return
    for stage in plan.stages:
        for attention in _attentions(plan, stage):
            reason = _needs_kernels(plan, stage, attention)
            if reason and attention.head_dim not in HEAD_DIMS:
                widths = ", ".join(map(str, HEAD_DIMS))
                raise ValueError(
                    f"module {stage.module!r}: attention with {reason} runs on a GPU with heads of {widths}, "
                    f"got {attention.head_dim}; such a plan runs on CPUs alone"
                )


def _attentions(plan: Plan, stage: Stage) -> Iterator[Attention]:
    """Self-attentions of a stage, those of equal layers once."""
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    for operators in {id(layer.operators): layer.operators for layer in layers}.values():
        for each in operators:
            if isinstance(each, Attention) and each.keys is None and each.num_keys is None:
                yield each


def _needs_kernels(plan: Plan, stage: Stage, attention: Attention) -> str:
    """What of an attention a kernel has to run; empty where torch does."""
    if stage.cp > 1:
        return f"cp {stage.cp}"
    is_text = plan.model.module(stage.module).modality == TEXT
    masks = sorted({sample.mask for sample in plan.batch} - {CAUSAL}) if is_text else []
    if masks:
        return f"mask {masks[0]!r}"
    return "sinks" if attention.has_sinks else ""
