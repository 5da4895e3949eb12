"""How transformers arranges a block's tensors, as far as memory depends on it."""

from itertools import pairwise

from workbench.model.experts import ROUTER_NORM
from workbench.model.latent_attention import LATENT_ROTARY
from workbench.model.layer import Attention, Layer, Matmul, Pointwise
from workbench.model.transformer import GATE, PARTIAL_ROTARY, UNSCALED_NORM, V_NORM

UNSCALED = (V_NORM, ROUTER_NORM, UNSCALED_NORM)  # norms without weights


def is_head_major(layer: Layer) -> bool:
    """Whether attention stores queries head by head, so that its output is copied.

    In transformers: Whisper, the one architecture whose queries have a bias and keys none; and those that
    concatenate queries from rotated and other parts: DeepSeek, GLM, Phi-3 (one projection without a bias
    before causal attention), Phi (attention parallel to an MLP with biases) and Qwen3.5 (gated attention).
    """
    names = {operator.name for operator in layer.operators}
    bias = {op.name: op.bias for op in layer.operators if isinstance(op, Matmul)}
    is_whisper = bias.get("q_proj", False) and not bias.get("k_proj", True)
    is_causal = any(isinstance(op, Attention) and op.causal for op in layer.operators)
    is_phi3 = is_causal and not bias.get("qkv_proj", True)
    is_phi = is_parallel(layer) and bias.get("mlp.up", False)
    parts = {PARTIAL_ROTARY, LATENT_ROTARY, GATE}
    return is_whisper or is_phi3 or is_phi or not names.isdisjoint(parts)


def is_parallel(layer: Layer) -> bool:
    """Whether the MLP is parallel to the attention and reads the same norm."""
    names = [operator.name for operator in layer.operators]
    return any(name == "o_proj" and following.startswith("mlp") for name, following in pairwise(names))


def kept_of_unscaled(layer: Layer, norm: Pointwise, *, is_widened: bool) -> int:
    """Numbers per token that a norm without weights keeps: its input, and one of each vector.

    Not its input where another norm of the layer keeps that tensor: a router's reads the stream, and a
    value's the key where both are one. Where it is widened each norm has a copy of its own.
    """
    is_held, num_vectors = norm.name == ROUTER_NORM, 1
    if norm.name == V_NORM:
        is_held = all(operator.name != "v_proj" for operator in layer.operators)
        num_vectors = next(each.num_kv_heads for each in layer.operators if isinstance(each, Attention))
    return num_vectors if is_held and not is_widened else norm.width + num_vectors
