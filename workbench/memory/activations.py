"""Tensors that activations keep where PyTorch runs them without a compiler."""

from workbench.model.experts import CLAMPED
from workbench.model.layer import Pointwise
from workbench.model.transformer import XIELU

# Tensors of its width that an activation keeps: its input, or every factor of the formula where
# transformers writes it in Python. An unknown activation counts as the largest of these.
ACTIVATION_TENSORS = {
    "relu": 1,
    "glu": 0,  # both halves, and nothing besides
    "relu2": 1,
    XIELU: 4,
    "silu": 1,
    "swish": 1,
    "gelu": 1,
    "gelu_pytorch_tanh": 1,
    "quick_gelu": 2,
    "gelu_new": 4,
    "qk_norm": 1,
    "softmax": 1,  # its result
    **dict.fromkeys(("router_softmax", "router_wide_softmax", "router_sigmoid"), 1),
    CLAMPED: 4,
    **dict.fromkeys(("v_norm", "router_norm", "unscaled_norm", "layer_scale", "soft_token_scale"), 1),
}

ACTIVATIONS = tuple(f".{name}" for name in ACTIVATION_TENSORS)


def activation_tensors(operator: Pointwise) -> int:
    """Return how many tensors of its width an activation keeps, without gating."""
    name = operator.name.rpartition(".")[2]
    return ACTIVATION_TENSORS.get(name, max(ACTIVATION_TENSORS.values()))
