"""What Bamboo's own layers keep of a microbatch: blocks spelled out in single PyTorch operators.

Source: github.com/uclasystem/bamboo @b44c579, external/deepspeed/DeepSpeedExamples/pipeline_parallelism
(bert.py, gpt2.py): norms out of mean, deviation, difference, product and quotient; stored scores; ReLU;
dropout behind every sublayer, on the scores and inside the feed-forward network. A block of its GPT-2
has a second attention, over as many tokens. What an operator keeps is what its derivative reads.
"""

from experiments.oobleck.modelled import ELEMENT_BYTES, TOKENS, graph, kept_bytes
from workbench.model.layer import Attention, Layer, LayerKind

MASK_BYTES = 1  # of a dropped element
NORM = 4  # tensors: input, difference, product with the weight, result
ATTENTION = 4  # queries, keys, values, what the output projection reads
FEED_FORWARD = 8  # ReLU and its dropped result, each four times as wide
FEED_FORWARD_MASK = 4


def has_two_attentions(model: str) -> bool:
    """Whether a block is one of Bamboo's GPT-2."""
    return model != "BERT-Large"


def block_bytes_per_token(width: int, heads: int, tokens: int, attentions: int, mask_bytes: int) -> int:
    """Of one block, kept from its forward to its backward; single numbers per token are left out.

    Per attention a norm, the attention, a dropout mask and 2 stored scores with a mask; a norm, the
    feed-forward network and its two masks; for a second attention what it attends to.
    """
    tensors = attentions * (NORM + ATTENTION) + NORM + FEED_FORWARD + (attentions - 1)
    masks = attentions + FEED_FORWARD_MASK + 1
    scores = attentions * heads * tokens * (2 * ELEMENT_BYTES + mask_bytes)
    return width * (tensors * ELEMENT_BYTES + masks * mask_bytes) + scores


def bamboo_kept_bytes(model: str, microbatch: int) -> tuple[int, ...]:
    """[layers] of a microbatch; the embedding and the head, which Bamboo's files leave out, as elsewhere."""
    return tuple(
        _block_bytes(model, layer, microbatch) if layer.kind is LayerKind.BLOCK else kept
        for layer, kept in zip(graph(model).modules[0].layers, kept_bytes(model, microbatch), strict=True)
    )


def bamboo_parameters(model: str) -> tuple[int, ...]:
    """[layers] weights, with four more square matrices for a second attention."""
    return tuple(
        layer.num_parameters + 4 * layer.out_width * (layer.out_width + 1)
        if layer.kind is LayerKind.BLOCK and has_two_attentions(model)
        else layer.num_parameters
        for layer in graph(model).modules[0].layers
    )


def _block_bytes(model: str, layer: Layer, microbatch: int) -> int:
    heads = next(operator.num_heads for operator in layer.operators if isinstance(operator, Attention))
    attentions = 2 if has_two_attentions(model) else 1
    each = block_bytes_per_token(layer.out_width, heads, TOKENS[model], attentions, MASK_BYTES)
    return microbatch * TOKENS[model] * each
