"""Planned masks in transformers' layers: dense on the CPU, the kernels' words and lists elsewhere."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

from runtime.kernels.bitfield_attention.attention import bitfield_attention
from runtime.kernels.bitfield_attention.mask import kernel_mask
from runtime.kernels.bitfield_attention.reference import attends
from runtime.kernels.bitfield_attention.tiles import FULL
from runtime.models.attention import PACKED_SDPA, packed_sdpa, register_packed_sdpa
from runtime.models.attention_mask import AttentionMask, token_fields
from tests.interpreter import DEVICE
from tests.kernel_cases import tensors
from workbench.masks.bitfield import Bitfield, concatenate, dense, pad
from workbench.masks.builders import (
    Groups,
    Mixture,
    Run,
    causal,
    document,
    encoder_embedded,
    encoder_prepended,
    full,
    gemma4_style,
    gemma_style,
    global_window,
    lambda_shaped,
    multimodal_packed,
    narrowed,
    prefix_lm,
    shared_question,
    sliding_window,
    two_sided_window,
)
from workbench.masks.tiles import classify

CPU = torch.device("cpu")
SMALL = Mixture(spans=(13, 7))
BUILT = {
    "causal": causal(50),
    "full": full(50),
    "document": document([20, 30]),
    "prefix": prefix_lm(20, 50),
    "question": shared_question(12, [20, 18]),
    "window": sliding_window(50, 9),
    "two-sided": two_sided_window(50, before=7, after=4),
    "global": global_window(50, before=7, after=4, tokens=3),
    "lambda": lambda_shaped(50, sinks=4, window=9),
    "EP": encoder_prepended(60, seed=1, mixture=SMALL),
    "EE": encoder_embedded(60, seed=2, mixture=SMALL, groups=Groups.PER_ITEM),
    "MP": multimodal_packed(80, seed=3, documents=4, mixture=SMALL),
    "gemma": gemma_style([Run(0, 10), Run(1, 20), Run(0, 5), Run(1, 10)]),
    "padded": pad(encoder_embedded(40, seed=4, mixture=SMALL), 55),
}


@pytest.mark.parametrize("name", BUILT)
def test_words_and_tiles_say_what_the_fields_say(name: str):
    """The kernels' fields and exact lists, read back densely, are the mask; also for a rank's tokens."""
    keys = BUILT[name]
    order = np.random.default_rng(0).permutation(len(keys))[: len(keys) // 2]
    for queries in (keys, keys.take(order)):
        want = torch.from_numpy(dense(queries, keys))
        assert torch.equal(attends(token_fields(queries, CPU), token_fields(keys, CPU)), want)
        mask, plan = AttentionMask(queries, keys, CPU, block=16).planned()
        assert torch.equal(folded(mask), want)
        listed = torch.zeros(len(plan.rows), len(plan.columns), dtype=torch.int64)
        for row in range(len(plan.rows)):
            begin, middle = int(plan.rows.offsets[row]), int(plan.rows.partial_start[row])
            end = int(plan.rows.offsets[row + 1])
            listed[row, plan.rows.others[begin:middle].long()] = 2
            listed[row, plan.rows.others[middle:end].long()] = 1
        tiles = classify(queries, keys, 16, 16)
        assert int((listed > 0).sum()) == tiles.num_tiles
        ragged = (len(queries) % 16 > 0) or (len(keys) % 16 > 0)
        assert int((listed == FULL).sum()) <= int((tiles.kinds == FULL).sum())
        assert ragged or int((listed == FULL).sum()) == int((tiles.kinds == FULL).sum())


def folded(mask: object) -> torch.Tensor:
    """The predicate on the folded words, as the kernels evaluate it."""
    allow, always = (x[:, None] for x in mask.query_words)
    last, segment, first = (x[:, None] for x in mask.query_limits)
    position, key_segment = mask.key_places
    seen = ((allow & mask.key_words) != 0) & (position <= last)
    if mask.has_segments:
        seen &= segment == key_segment
    if mask.has_window:
        seen &= (position >= first) | ((always & mask.key_words) != 0)
    return seen


@pytest.mark.parametrize("bits", [3, 32, 40, 61])
def test_words_narrow_where_32_bits_do(bits: int):
    rng = np.random.default_rng(bits)
    used = rng.permutation(61)[:bits].astype(np.uint64)
    words = np.uint64(1) << used[rng.integers(0, bits, 200)]
    fields = Bitfield(**{**dict(full(200).arrays()), "own": words, "allow": np.roll(words, 7) | words})
    ours = token_fields(fields, CPU)
    mask = kernel_mask(ours, ours)
    assert (mask.key_words.dtype == torch.int32) == (len(np.unique(words)) <= 32)
    assert torch.equal(folded(mask), torch.from_numpy(dense(fields, fields)))


def test_planned_mask_runs_in_the_kernels():
    field = BUILT["MP"]
    at = AttentionMask(field, field, torch.device(DEVICE), block=32)
    data = tensors(len(field), len(field), heads=2, kv_heads=1, dtype=torch.float16)
    q, k, v = (x.to(DEVICE) for x in (data.q, data.k, data.v))
    out = bitfield_attention(q, k, v, *at.planned())
    dense_at = AttentionMask(field, field, CPU)
    want = dense_at.attend(*(x[0].float() for x in (data.q, data.k, data.v)), scale=data.q.shape[-1] ** -0.5)
    torch.testing.assert_close(out[0].cpu().float(), want, rtol=2e-3, atol=2e-3)


def llama(implementation: str) -> LlamaAttention:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return LlamaAttention(config, 0).double()


@pytest.mark.parametrize("name", ["EP", "MP", "gemma"])
def test_a_transformers_layer_takes_it(name: str):
    """The same outputs and gradients as transformers' own SDPA under the dense mask."""
    register_packed_sdpa()
    field = BUILT[name]
    x = torch.randn(1, len(field), 32, dtype=torch.float64)
    turns = (torch.ones(1, len(field), 8).double(), torch.zeros(1, len(field), 8).double())
    visible = torch.from_numpy(dense(field, field))[None, None]
    results = []
    for implementation, mask in ((PACKED_SDPA, AttentionMask(field, field, CPU)), ("sdpa", visible)):
        layer, inputs = llama(implementation), x.clone().requires_grad_()
        out, _ = layer(inputs, position_embeddings=turns, attention_mask=mask)
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), inputs)[0]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_padding_gets_zeros_and_gives_finite_gradients():
    field = BUILT["padded"]
    data = tensors(55, 55, dtype=torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in (data.q, data.k, data.v))
    out = AttentionMask(field, field, CPU).attend(q[0], k[0], v[0], scale=q.shape[-1] ** -0.5)
    assert not out[:, 40:].any()
    for gradient in torch.autograd.grad(out, (q, k, v), data.do[0]):
        assert gradient.isfinite().all()
        assert not gradient[:, :, 40:].any()


def test_a_layers_window_narrows_the_mask():
    """Within each document; a window that hides nothing changes nothing and plans nothing anew."""
    field = concatenate([causal(20), causal(30)])
    at = AttentionMask(field, field, CPU)
    back = torch.arange(50)[:, None] - torch.arange(50)
    assert torch.equal(at.dense(7), at.dense() & (back < 7))
    assert at.dense(51) is at.dense()
    mask, _ = at.planned(7)
    assert torch.equal(folded(mask), at.dense(7))
    with pytest.raises(ValueError, match="sliding window must be >= 1 token, got 0"):
        narrowed(field, 0)


@pytest.mark.parametrize("window", [1, 4, 9, 23, 60])
def test_a_window_counts_tokens_and_leaves_an_image_whole(window: int):
    """Text sees of an image what its window reaches, an image itself: transformers' rule, by its own mask."""
    runs = [Run(0, 10), Run(1, 20), Run(0, 5), Run(1, 10), Run(2, 3), Run(0, 4)]
    lengths = torch.tensor([run.length for run in runs])
    run_of = torch.repeat_interleave(torch.arange(len(runs)), lengths)
    is_image = torch.tensor([run.modality > 0 for run in runs])[run_of]

    def theirs(_batch, _head, q, k):
        return ((k <= q) & (q - k < window)) | (is_image[q] & (run_of[q] == run_of[k]))

    field = gemma_style(runs)
    at = AttentionMask(field, field, CPU)
    seen = create_mask(theirs, None, None, len(run_of), len(run_of), device="cpu")[0, 0]
    assert torch.equal(at.dense(window), seen)
    mask, _ = at.planned(window)
    assert torch.equal(folded(mask), seen)
    shuffled = np.random.default_rng(window).permutation(len(run_of))
    share = AttentionMask(field.take(shuffled), field, CPU)
    assert torch.equal(share.dense(window), seen[shuffled])


@pytest.mark.parametrize("window", [1, 4, 9, 23])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("prefix", lambda q, k: (q < 20) & (k < 20)),
        ("question", lambda q, k: (q >= 12) & (k < 12)),
        ("global", lambda q, k: k < 3),
        ("lambda", lambda q, k: k < 4),
    ],
)
def test_a_window_hides_nothing_that_a_mask_shows_beyond_its_own(name: str, shown, window: int):
    seen = AttentionMask(BUILT[name], BUILT[name], CPU)
    q, k = torch.arange(50)[:, None], torch.arange(50)
    assert torch.equal(seen.dense(window), seen.dense() & ((q - k < window) | shown(q, k)))


@pytest.mark.parametrize("window", [1, 4, 9, 23, 60])
def test_a_window_opens_images_of_gemma_4_and_cuts_them(window: int):
    """In layers with a window alone, even if it hides nothing: transformers' rule, by its own mask."""
    runs = [Run(0, 10), Run(1, 20), Run(0, 5), Run(1, 10), Run(0, 4)]
    run_of = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor([run.length for run in runs]))
    is_image = torch.tensor([run.modality > 0 for run in runs])[run_of]

    def theirs(_batch, _head, q, k):
        return ((k <= q) | (is_image[q] & (run_of[q] == run_of[k]))) & (q - k < window)

    field = gemma4_style(runs)
    at = AttentionMask(field, field, CPU)
    assert torch.equal(at.dense(), torch.ones(len(run_of), len(run_of)).tril().bool())
    seen = create_mask(theirs, None, None, len(run_of), len(run_of), device="cpu")[0, 0]
    assert torch.equal(at.dense(window), seen)
    mask, _ = at.planned(window)
    assert torch.equal(folded(mask), seen)
    packed = concatenate([causal(7), field])
    assert torch.equal(AttentionMask(packed, packed, CPU).dense(window)[7:, 7:], seen)


def test_what_it_cannot_do_it_refuses():
    field = causal(4)
    data, mask = tensors(4, 4), AttentionMask(field, field, CPU)
    with pytest.raises(ValueError, match=r"no soft cap, got 30.0"):
        packed_sdpa(torch.nn.Identity(), data.q, data.k, data.v, mask, softcap=30.0)
    with pytest.raises(ValueError, match="mask is on cuda, queries are on cpu"):
        AttentionMask(field, field, torch.device("cuda")).attend(data.q[0], data.k[0], data.v[0], scale=1.0)
