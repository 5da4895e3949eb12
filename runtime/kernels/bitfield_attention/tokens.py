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
