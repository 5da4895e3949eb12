"""What every kernel does with tasks, lists and token fields. Triton device functions."""

import triton
import triton.language as tl

# Triton reads module-level numbers only if they are declared constexpr.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Arguments whose values differ from batch to batch: a kernel is not compiled anew because one of them
# is 1 or a multiple of 16. What that would tell about lengths, EVEN tells.
COUNTS = (
    "heads",
    "kv_heads",
    "batch_heads",
    "group",
    "num_queries",
    "num_keys",
    "num_tokens",
    "num_tasks",
    "num_slots",
    "section",
)


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
def entries_of(tasks, num_tasks, task):
    """block, begin, end and slot of a task."""
    return (
        tl.load(tasks + task),
        tl.load(tasks + num_tasks + task),
        tl.load(tasks + 2 * num_tasks + task),
        tl.load(tasks + 3 * num_tasks + task),
    )


@triton.jit
def query_fields(
    queries,
    rows,
    num_queries,
    EVEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """allow, always, last, lowest and first of some queries; a row that does not exist allows nothing.

    `queries`: words, limits and lowest of all.
    """
    words, limits, lowest_ptr = queries
    last = _field(limits, rows, num_queries, EVEN)
    allow = _field(words, rows, num_queries, EVEN)
    always, first, lowest = allow, last, last
    if HAS_WINDOW:
        always = _field(words + num_queries, rows, num_queries, EVEN)
        first = _field(limits + 2 * num_queries, rows, num_queries, EVEN)
    if HAS_SEGMENTS:
        lowest = _field(lowest_ptr, rows, num_queries, EVEN)
    return allow, always, last, lowest, first


@triton.jit
def _field(fields, rows, count, EVEN: tl.constexpr):
    """fields[rows]; 0 for rows from `count` on, of which there are none where lengths are EVEN."""
    if EVEN:
        return tl.load(fields + rows)
    return tl.load(fields + rows, mask=rows < count, other=0)


@triton.jit
def key_fields(words, places, columns, num_keys, EVEN: tl.constexpr):
    """own and place of some keys; a key that does not exist owns nothing."""
    return _field(words, columns, num_keys, EVEN), _field(places, columns, num_keys, EVEN)


@triton.jit
def attends(queries, keys, QUERY_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """The predicate on the fields of queries, which lie along that dim, and keys, along the other."""
    allow, always = tl.expand_dims(queries[0], 1 - QUERY_DIM), tl.expand_dims(queries[1], 1 - QUERY_DIM)
    last, lowest = tl.expand_dims(queries[2], 1 - QUERY_DIM), tl.expand_dims(queries[3], 1 - QUERY_DIM)
    first = tl.expand_dims(queries[4], 1 - QUERY_DIM)
    own, index = tl.expand_dims(keys[0], QUERY_DIM), tl.expand_dims(keys[1], QUERY_DIM)
    seen = ((allow & own) != 0) & (index <= last)
    if HAS_SEGMENTS:
        seen = seen & (index >= lowest)
    if HAS_WINDOW:
        seen = seen & ((index >= first) | ((always & own) != 0))
    return seen


@triton.jit
def other_block(others, entry, end):
    """The block of one entry of a list; 0 from `end` on, which is not read.

    Loops read it a step ahead. An index that is loaded in the step that uses it ties the copies of
    keys and values to it, and the compiler then keeps none of them under way.
    """
    return tl.load(others + entry, mask=entry < end, other=0)


@triton.jit
def _rows(
    head,
    stride,
    start,
    count,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows from `start` on, BLOCK by W; BOUNDED: zeros from row `count` on."""
    index = tl.arange(0, BLOCK)
    width = tl.arange(0, W)
    tile = head + start.to(tl.int64) * stride + index[:, None] * stride + width[None, :]
    if BOUNDED:
        return tl.load(tile, mask=(start + index < count)[:, None] & (width < D)[None, :], other=0.0)
    elif W != D:
        return tl.load(tile, mask=(width < D)[None, :], other=0.0)
    else:
        return tl.load(tile)


@triton.jit
def scored_keys(
    q, fields, tiles, keys, start, SHAPE: tl.constexpr, MASKED: tl.constexpr, RULES: tl.constexpr
):
    """Keys and values from `start` on, and the queries' scores of them; -inf where one is not seen.

    Rows beyond the last key, and columns beyond the head width, are zeros. A copy ENGINE fills them by
    itself; without one `k_tiles` and `v_tiles` point to the first row of the head.

    Args:
        fields: of the queries, from `query_fields`.
        tiles: keys and values of all heads or of this one, their batch, head and strides.
        keys: words and places of the keys, and their number.
        SHAPE: D, W, BLOCK_N and whether lengths are EVEN.
        RULES: ENGINE, HAS_WINDOW, HAS_SEGMENTS and PRECISION.
    """
    k_tiles, v_tiles, kv_batch, kv_head, stride_kn, stride_vn = tiles
    key_words, key_places, num_keys = keys
    D: tl.constexpr = SHAPE[0]
    W: tl.constexpr = SHAPE[1]
    BLOCK_N: tl.constexpr = SHAPE[2]
    EVEN: tl.constexpr = SHAPE[3]
    if RULES[0]:
        k = k_tiles.load([kv_batch, kv_head, start, 0]).reshape(BLOCK_N, W)
        v = v_tiles.load([kv_batch, kv_head, start, 0]).reshape(BLOCK_N, W)
    else:
        k = _rows(k_tiles, stride_kn, start, num_keys, D, W, BLOCK_N, MASKED and not EVEN)
        v = _rows(v_tiles, stride_vn, start, num_keys, D, W, BLOCK_N, MASKED and not EVEN)
    score = tl.dot(q, tl.trans(k), input_precision=RULES[3])
    if MASKED:
        own = key_fields(key_words, key_places, start + tl.arange(0, BLOCK_N), num_keys, EVEN)
        seen = attends(fields, own, 0, RULES[1], RULES[2])
        score = tl.where(seen, score, float("-inf"))
    return k, v, score
