"""What every kernel does with tasks, lists and token fields. Triton device functions."""

import triton
import triton.language as tl

# Triton reads module-level numbers only if they are declared constexpr.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def task_and_head(num_tasks, num_heads, section):
    """Longest tasks of all heads of a section first, then the next section's.

    Heads run fastest, so the query heads of one group meet in the cache.
    """
    pid = tl.program_id(0)
    which = pid // (num_tasks * section)
    inside = pid - which * num_tasks * section
    width = tl.minimum(section, num_heads - which * section)
    return inside // width, which * section + inside % width


@triton.jit
def query_fields(words, limits, rows, inside, num_queries, HAS_WINDOW: tl.constexpr):
    """allow, always, last, segment and first of some queries; a row that does not exist allows nothing."""
    allow = tl.load(words + rows, mask=inside, other=0)
    last = tl.load(limits + rows, mask=inside, other=0)
    segment = tl.load(limits + num_queries + rows, mask=inside, other=-1)
    if HAS_WINDOW:
        always = tl.load(words + num_queries + rows, mask=inside, other=0)
        first = tl.load(limits + 2 * num_queries + rows, mask=inside, other=0)
    else:
        always, first = allow, last
    return allow, always, last, segment, first


@triton.jit
def key_fields(words, places, columns, inside, num_keys):
    """own, position and segment of some keys; a key that does not exist owns nothing."""
    own = tl.load(words + columns, mask=inside, other=0)
    position = tl.load(places + columns, mask=inside, other=0)
    segment = tl.load(places + num_keys + columns, mask=inside, other=-1)
    return own, position, segment


@triton.jit
def attends(
    allow,
    always,
    last,
    query_segment,
    first,
    own,
    position,
    key_segment,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """The predicate on fields that are broadcast against each other."""
    seen = ((allow & own) != 0) & (position <= last)
    if HAS_SEGMENTS:
        seen = seen & (query_segment == key_segment)
    if HAS_WINDOW:
        seen = seen & ((position >= first) | ((always & own) != 0))
    return seen


@triton.jit
def scored_keys(
    q,
    allow,
    always,
    last,
    query_segment,
    first,
    k_head,
    v_head,
    stride_kn,
    stride_vn,
    key_words,
    key_places,
    start,
    num_keys,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values from `start` on, and the queries' scores of them; -inf where one is not seen.

    A tile that is FULL (not MASKED) lies within the keys, so it is loaded without a bound.
    """
    place = tl.arange(0, BLOCK_N)
    width = tl.arange(0, D)
    k_tile = k_head + start.to(tl.int64) * stride_kn + place[:, None] * stride_kn + width[None, :]
    v_tile = v_head + start.to(tl.int64) * stride_vn + place[:, None] * stride_vn + width[None, :]
    if MASKED:
        columns = start + place
        inside = columns < num_keys
        k = tl.load(k_tile, mask=inside[:, None], other=0.0)
        v = tl.load(v_tile, mask=inside[:, None], other=0.0)
    else:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        own, position, segment = key_fields(key_words, key_places, columns, inside, num_keys)
        seen = attends(
            allow[:, None],
            always[:, None],
            last[:, None],
            query_segment[:, None],
            first[:, None],
            own[None, :],
            position[None, :],
            segment[None, :],
            HAS_WINDOW,
            HAS_SEGMENTS,
        )
        score = tl.where(seen, score, float("-inf"))
    return k, v, score
