"""The work of Mamba-2's state-space scan by chunks: FLOP, bytes and kernels of both passes."""

from workbench.cost.delta_rule import RulePasses
from workbench.model.layer import StateScan
from workbench.units import FLOAT32_BYTES

KERNELS, BACKWARD_KERNELS = 6, 22  # with the convolution's; see `state_scan_bytes`


def state_scan_flop(scan: StateScan, tokens: float, tp: int = 1) -> RulePasses:
    """FLOP on one rank, of whole chunks of C tokens, with keys of K and values of V features.

    Forward, per token: products of 2 C K for queries with keys, once for each head of keys; per head of
    values 2 C V for those scores with values, 2 K V for what a chunk adds to the state, 2 K V for the state
    read by queries, and 2 K V / C for the state that goes from chunk to chunk. The convolution has 2 x
    kernel FLOP a channel. Backward: two products for each.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6 (diagonal and low-rank blocks) and 6.3.
    Differs: a sample's last chunk counts by its tokens, kernels compute it as a whole one; scores above the
    diagonal count, of which kernels leave out whole tiles.
    """
    chunk, keys, values = scan.chunk, scan.key_dim, scan.value_dim
    scores = 2 * chunk * keys
    of_head = 2 * chunk * values + 4 * keys * values + 2 * keys * values / chunk
    convolution = 2 * scan.kernel * scan.width
    forward = tokens / tp * (scan.num_key_heads * scores + scan.num_heads * of_head + convolution)
    return RulePasses(forward, 2 * forward)


def state_scan_bytes(scan: StateScan, tokens: float, element_bytes: int, tp: int = 1) -> RulePasses:
    """Bytes that fused kernels move on one rank.

    Forward: the convolution reads and writes its channels. Steps become float32 steps and decays. Keys,
    values, steps and decays become a chunk's state, K V in float32, which is read and written on its way from
    chunk to chunk. Queries and keys become the C float32 scores of a token, once for each head of keys.
    Scores, values, queries, steps, decays and states become the output. Backward: decays, states and scores
    are computed again, and every tensor is read once more where its gradient is written.

    Source: kernels of mamba_ssm, `mamba_ssm/ops/triton/ssd_combined.py`: decays, states, the passing of
    states, scores, outputs; with the convolution 6. Backward the first four again, then gradients of states,
    of their passing, of values, keys, queries and scores, two products with the scores' gradients, two of
    decays, the convolution's, and seven small ones over decays and steps: 22.
    """
    keys, values, heads = scan.key_width, scan.value_width, scan.num_heads
    states = heads * scan.key_dim * scan.value_dim / scan.chunk
    scores = scan.num_key_heads * scan.chunk
    again = (heads + 3 * keys + values + states) * element_bytes
    again += (4 * heads + 2 * states + scores) * FLOAT32_BYTES
    convolution = 2 * scan.width * element_bytes
    output = (keys + 2 * values + states) * element_bytes + (2 * heads + scores) * FLOAT32_BYTES
    forward = convolution + again + output
    return RulePasses(tokens / tp * forward, tokens / tp * (2 * forward + again))
