"""Bytes of a recurrence, whatever its rule: in fused kernels, and as transformers writes it in PyTorch."""

from workbench.cost.recurrence import AnyRecurrence
from workbench.memory.delta_rule import RuleWorking, eager_rule_bytes, eager_rule_working, fused_rule_bytes
from workbench.memory.setting import Setting
from workbench.memory.state_scan import eager_scan_bytes, eager_scan_working, fused_scan_bytes
from workbench.model.layer import StateScan


def fused_recurrence_bytes(rule: AnyRecurrence, element_bytes: int) -> int:
    """Bytes per token that fused kernels keep for their backward."""
    if isinstance(rule, StateScan):
        return fused_scan_bytes(rule, element_bytes)
    return fused_rule_bytes(rule, element_bytes)


def eager_recurrence_bytes(rule: AnyRecurrence, setting: Setting, *, is_trained: bool) -> float:
    """Bytes that autograd keeps of what transformers writes in PyTorch, on one rank."""
    if isinstance(rule, StateScan):
        return eager_scan_bytes(rule, setting, is_trained=is_trained)
    return eager_rule_bytes(rule, setting, is_trained=is_trained)


def eager_recurrence_working(rule: AnyRecurrence, setting: Setting) -> RuleWorking:
    """Bytes of its tensors in work, on one rank."""
    if isinstance(rule, StateScan):
        return eager_scan_working(rule, setting)
    return eager_rule_working(rule, setting)
