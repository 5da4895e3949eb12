"""Forms the microbatches of a plan from its batch."""

from collections.abc import Iterator, Mapping, Sequence

from workbench.data.sample import Item, Sample
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing, routing_of

Piece = tuple[Item, ...]  # items of one sample that stay together


def batched_microbatches(
    draft: Plan, *, samples_per_microbatch: int, replicas: Sequence[int]
) -> tuple[Microbatch, ...]:
    """Form microbatches of consecutive samples, the same for every module, assigned to replicas in turn.

    Every module gets the items of those samples; each item is a row of its own. A module
    without items in a microbatch's samples skips it.

    Raises ValueError when the batch does not divide.
    """
    _check_divides(draft, samples_per_microbatch, len(replicas))
    chunks = [
        draft.batch[start : start + samples_per_microbatch]
        for start in range(0, len(draft.batch), samples_per_microbatch)
    ]
    return chunked_microbatches(
        draft, {replica: chunks[index :: len(replicas)] for index, replica in enumerate(replicas)}
    )


def chunked_microbatches(
    draft: Plan, chunks: Mapping[int, Sequence[Sequence[Sample]]]
) -> tuple[Microbatch, ...]:
    """Form one microbatch of every module from each chunk of a replica's samples.

    Each item is a row of its own; a module without items in a chunk skips it.
    """
    routing = routing_of(draft)
    return tuple(
        microbatch
        for module in draft.model.modules
        for replica, of_replica in chunks.items()
        for microbatch in _microbatches(
            module.name,
            replica,
            [[routing.items(module.name, sample.id) for sample in chunk] for chunk in of_replica],
        )
    )


def shared_microbatches(
    draft: Plan, *, samples_per_microbatch: int, dp: Mapping[str, int], rounds: int | None = 1
) -> tuple[Microbatch, ...]:
    """Split one global batch among the replicas of every module, by the degree of each module.

    The LLM sets the rounds: a round is one microbatch of each of its replicas. Replicas of another module cut
    `rounds` rounds, or the fewest that give each replica a sample, into consecutive intervals, each a
    microbatch: fan-in where the module has more replicas than the LLM, fan-out where it has fewer. The
    samples of several rounds are ordered by LLM replica, so that each interval feeds as few of them as
    possible. Where that does not divide, some intervals have one sample more, and replicas take turns to get
    them. With equal degrees and one round this is `batched_microbatches`.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    section 3 (batch intervals).
    Differs: degrees need not divide each other, and a module may have more replicas than a round has
    samples. Where it has more than the batch, intervals are of items (images, clips) and not of samples, as
    that paper's Table A3 has encoders of 32 replicas for 4 samples.

    Args:
        draft: its stages and microbatches are ignored.
        samples_per_microbatch: of the LLM.
        dp: module -> number of replicas, 0..n-1.
        rounds: that a microbatch of a module other than the LLM spans; None: all.

    Raises:
        ValueError: a batch that does not divide by the LLM's round, or gives a replica no sample and no item.
    """
    llm = draft.model.llm.name
    _check_divides(draft, samples_per_microbatch, dp[llm])
    routing, per_round = routing_of(draft), samples_per_microbatch * dp[llm]
    num_rounds = len(draft.batch) // per_round
    microbatches: list[Microbatch] = []
    for module in draft.model.modules:
        replicas, is_llm = dp[module.name], module.name == llm
        pieces = _pieces(routing, module.name, replicas)
        least = -(-replicas // per_round)  # rounds that give each replica a sample
        window = 1 if is_llm else num_rounds if rounds is None else max(rounds, least)
        intervals = _intervals(pieces, (window, dp[llm], samples_per_microbatch), replicas)
        for replica in range(replicas):
            microbatches += _microbatches(module.name, replica, intervals[replica::replicas])
    return tuple(microbatches)


def _pieces(routing: Routing, module: str, replicas: int) -> list[list[Piece]]:
    """Split each sample into pieces for one replica: all its items, or single ones if samples are too few."""
    batch = routing.plan.batch
    items = [routing.items(module, sample.id) for sample in batch]
    if replicas <= len(batch):
        return [[sample_items] for sample_items in items]
    num_items = sum(map(len, items))
    if replicas > num_items:
        raise ValueError(
            f"module {module!r}: a batch of {len(batch)} samples with {num_items} items has none for some of "
            f"{replicas} replicas; nearest: dp {max(len(batch), num_items)}"
        )
    return [[(item,) for item in sample_items] for sample_items in items]


def _intervals(
    batch: Sequence[Sequence[Piece]], shape: tuple[int, int, int], replicas: int
) -> list[Sequence[Piece]]:
    """Cut windows into consecutive pieces for replica 0, 1, ..., 0, 1, ... in turn; intervals may be empty.

    Args:
        batch: by sample, see `_pieces`.
        shape: rounds of a window, replicas of the LLM, samples of its microbatches.
    """
    intervals: list[Sequence[Piece]] = []
    rounds, readers, size = shape
    window = rounds * readers * size
    first_larger = 0  # first replica whose interval gets one piece more
    for first in range(0, len(batch), window):
        last = min(first + window, len(batch))
        chunks = [batch[start : start + size] for start in range(first, last, size)]
        ordered = [
            piece
            for reader in range(readers)
            for chunk in chunks[reader::readers]
            for sample in chunk
            for piece in sample
        ]
        share, rest = divmod(len(ordered), replicas)
        begin = 0
        for replica in range(replicas):
            end = begin + share + ((replica - first_larger) % replicas < rest)
            intervals.append(ordered[begin:end])
            begin = end
        first_larger = (first_larger + rest) % replicas
    return intervals


def _microbatches(module: str, replica: int, chunks: Sequence[Sequence[Piece]]) -> Iterator[Microbatch]:
    """Yield a microbatch per chunk that has items of the module; each item is a row of its own."""
    index = 0
    for chunk in chunks:
        rows = tuple([(item,) for piece in chunk for item in piece])
        if rows:
            yield Microbatch(module=module, replica=replica, index=index, rows=rows)
            index += 1


def _check_divides(draft: Plan, samples_per_microbatch: int, replicas: int) -> None:
    unit, num_samples = samples_per_microbatch * replicas, len(draft.batch)
    if samples_per_microbatch < 1 or num_samples % unit:
        below = num_samples - num_samples % unit if unit > 0 else 0
        nearest = f"; nearest: {f'{below} or ' if below else ''}{below + unit} samples" if unit > 0 else ""
        raise ValueError(
            f"batch of {num_samples} samples: want a multiple of microbatch x replicas, "
            f"got {samples_per_microbatch} x {replicas}{nearest}"
        )
