"""The work of a recurrence, whatever its rule: FLOP, bytes, kernels and chunks."""

from workbench.cost import delta_rule, state_scan
from workbench.cost.delta_rule import RulePasses, delta_rule_bytes, delta_rule_flop
from workbench.cost.state_scan import state_scan_bytes, state_scan_flop
from workbench.model.layer import DeltaRule, StateScan

AnyRecurrence = DeltaRule | StateScan


def recurrence_flop(rule: AnyRecurrence, tokens: float, tp: int = 1) -> RulePasses:
    """FLOP on one rank, with its convolution's."""
    if isinstance(rule, StateScan):
        return state_scan_flop(rule, tokens, tp)
    return delta_rule_flop(rule, tokens, tp)


def recurrence_bytes(rule: AnyRecurrence, tokens: float, element_bytes: int, tp: int = 1) -> RulePasses:
    """Bytes that fused kernels move on one rank."""
    if isinstance(rule, StateScan):
        return state_scan_bytes(rule, tokens, element_bytes, tp)
    return delta_rule_bytes(rule, tokens, element_bytes, tp)


def kernels_of_forward(rule: AnyRecurrence) -> int:
    """Kernels that a forward launches."""
    return state_scan.KERNELS if isinstance(rule, StateScan) else delta_rule.KERNELS


def kernels_of_backward(rule: AnyRecurrence) -> int:
    """Kernels that a backward launches."""
    return state_scan.BACKWARD_KERNELS if isinstance(rule, StateScan) else delta_rule.BACKWARD_KERNELS


def chunk_of(rule: AnyRecurrence) -> int:
    """Tokens of a chunk."""
    return rule.chunk if isinstance(rule, StateScan) else delta_rule.CHUNK
