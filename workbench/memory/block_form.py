"""How transformers arranges a block's tensors, as far as memory depends on it."""

from itertools import pairwise

from workbench.model.latent_attention import LATENT_ROTARY
from workbench.model.layer import Attention, Layer, Matmul
from workbench.model.transformer import GATE, PARTIAL_ROTARY


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
