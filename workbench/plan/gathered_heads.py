"""How many heads of keys and values context-parallel ranks gather and attend to at a time."""

QUERY_BLOCK = 128  # queries of one program of an attention kernel
ENOUGH_PROGRAMS = 128  # enough for a large GPU's compute units: an H100 has 132, an A40 84


def heads_per_gather(num_heads: int, num_kv_heads: int, num_tokens: int) -> int:
    """Return the key/value heads of one launch: the least divisor whose queries fill a GPU, else all.

    While one launch computes, the keys and values of the next are in flight; fewer heads hide more of that,
    but a launch of few programs leaves compute units idle, and every gather has its latency. The result
    follows from the plan's sizes alone, so that every rank, every device and the simulator agree.

    Source: Cornstarch (ICML) section 4.3.2, which gathers head by head.
    Differs: there always one head; `experiments.bench.gathered_heads` compares both with the best number.

    Args:
        num_heads, num_kv_heads: of one tensor-parallel rank.
        num_tokens: the most that one context-parallel rank owns.

    Complexity: O(num_kv_heads).
    """
    programs = num_heads // num_kv_heads * -(-num_tokens // QUERY_BLOCK)
    fitting = (n for n in range(1, num_kv_heads) if num_kv_heads % n == 0 and n * programs >= ENOUGH_PROGRAMS)
    return next(fitting, num_kv_heads)
