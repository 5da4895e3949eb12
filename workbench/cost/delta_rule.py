"""The work of a gated delta rule by chunks: FLOP, bytes and kernels of both passes."""

from typing import NamedTuple

from workbench.model.layer import DeltaRule

CHUNK = 64  # tokens
KERNELS, BACKWARD_KERNELS = 9, 13  # with the convolution's; see `delta_rule_bytes`


class RulePasses(NamedTuple):
    """A number for the forward and one for the backward."""

    forward: float
    backward: float


def delta_rule_flop(rule: DeltaRule, tokens: float, tp: int = 1) -> RulePasses:
    """FLOP on one rank, of whole chunks of C tokens, with keys of K and values of V features.

    Forward, per token and head of values: products of 2 C K for keys with keys and 2 C K for queries with
    keys; 2 C V for those scores with values; 2 K V each for the state read by keys, the state read by queries
    and what is added to the state; a solve of (C - 1) (K + V), a multiplication and an addition for each
    element below the diagonal. Together 4 C K + 2 C V + 6 K V + (C - 1) (K + V). The convolution has
    2 x kernel FLOP a channel. Backward: two products for each, and for the solve another one and the
    gradient of its matrix, 2 C (K + V).

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.3 (the extended WY representation); operations
    as in transformers' `torch_chunk_gated_delta_rule`, C = 64.
    Differs: a sample's last chunk counts by its tokens; kernels compute it as a whole one.
    """
    keys, values = rule.key_dim, rule.value_dim
    products = 4 * CHUNK * keys + 2 * CHUNK * values + 6 * keys * values
    solve = (CHUNK - 1) * (keys + values)
    matrix = 2 * CHUNK * (keys + values)
    convolution = 2 * rule.kernel * rule.width
    steps = tokens / tp
    return RulePasses(
        steps * (rule.num_heads * (products + solve) + convolution),
        steps * (rule.num_heads * (2 * products + solve + matrix) + 2 * convolution),
    )


def delta_rule_bytes(rule: DeltaRule, tokens: float, element_bytes: int, tp: int = 1) -> RulePasses:
    """Bytes that fused kernels move on one rank.

    Forward: the convolution reads and writes its channels; norms read and write queries and keys; the rule
    reads keys three times, queries and values once; per head of values it writes and reads the C scores of a
    token twice (as a product, and solved), K and V features from the solve, V corrected values, and the
    states, K V a chunk; it writes V of output. Backward: the solve's features, corrected values and states
    are computed again, and every tensor is read once more where its gradient is written.

    Source: kernels of flash-linear-attention, `fla/ops/gated_delta_rule/chunk.py`: cumulative decays, scores
    of keys, the solve, its features, the states, outputs, and two norms; with the convolution 9. Backward
    two of these again, then gradients of values, of states, of queries and keys, of the solve and of decays,
    two sums of gradients, two norms, the convolution's input and its weights: 13.
    """
    state = rule.key_dim * rule.value_dim / CHUNK
    solved = rule.key_dim + rule.value_dim + rule.value_dim + state
    scores = 2 * 2 * CHUNK
    entering = 2 * rule.width + 2 * 2 * rule.key_width + 4 * rule.key_width + rule.value_width
    forward = entering + rule.num_heads * (scores + 2 * solved) + rule.value_width
    backward = 2 * forward + rule.num_heads * 2 * solved
    elements = tokens / tp * element_bytes
    return RulePasses(forward * elements, backward * elements)
