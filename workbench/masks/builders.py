"""Attention masks used in training, each as a `Bitfield`: one sequence per call, packed by `concatenate`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.float_sum import float_sum
from workbench.masks.bitfield import MAX_MODALITY, NO_LIMIT, TEXT_BIT, Bitfield, concatenate, uniform

TEXT = 0
_ANSWER_BIT = 2
_SINK_BIT = 2


class Run(NamedTuple):
    """Consecutive tokens of one modality: 0 is text, 1 to 60 are encoders; one image is one run."""

    modality: int
    length: int


class Groups(Enum):
    """Which tokens of an encoder see each other, in both directions."""

    PER_ENCODER = "all tokens of one encoder in the document"
    PER_ITEM = "the tokens of one image or clip"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Modalities of a random multimodal sequence besides text.

    Cornstarch fixes the tokens per modality and places them at random, and prints neither for the masks of
    its attention tables (v1 Table 4; ICML Table 3). Ours: 30 % of one encoder in items of 2,048 tokens,
    15 % of another in items of 1,024.

    Args:
        shares: of the sequence, one for each encoder, at most 1 in all.
        spans: tokens of one item of each encoder; the last item may be shorter.
    """

    shares: tuple[float, ...] = (0.30, 0.15)
    spans: tuple[int, ...] = (2048, 1024)

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.spans) or len(self.shares) > MAX_MODALITY:
            raise ValueError(
                f"want a share and a span for each of at most {MAX_MODALITY} encoders, "
                f"got {len(self.shares)} shares and {len(self.spans)} spans"
            )
        if any(not share >= 0 for share in self.shares) or not float_sum(self.shares) <= 1:
            raise ValueError(f"shares must be >= 0 and add up to at most 1, got {self.shares}")
        if any(span < 1 for span in self.spans):
            raise ValueError(f"spans must be >= 1 token, got {self.spans}")

    def items(self, length: int) -> list[list[Run]]:
        """[encoder] its items in a sequence of `length` tokens; shares are rounded down."""
        items = []
        for modality, (share, span) in enumerate(zip(self.shares, self.spans, strict=True), start=1):
            whole, rest = divmod(int(share * length), span)
            items.append([Run(modality, span)] * whole + [Run(modality, rest)] * (rest > 0))
        return items


MIXTURE = Mixture()


def causal(length: int) -> Bitfield:
    """Every token sees itself and those before it."""
    return uniform(length, causal=True)


def full(length: int) -> Bitfield:
    """Every token sees every token."""
    return uniform(length, causal=False)


def document(lengths: Sequence[int]) -> Bitfield:
    """Packed documents, full inside."""
    return concatenate([full(length) for length in lengths])


def causal_document(lengths: Sequence[int]) -> Bitfield:
    """Packed documents, causal inside."""
    return concatenate([causal(length) for length in lengths])


def prefix_lm(prefix: int, length: int) -> Bitfield:
    """The first `prefix` tokens see each other, the rest is causal; ValueError if prefix > length or < 0."""
    if not 0 <= prefix <= length:
        raise ValueError(f"prefix must be 0 to {length} tokens, got {prefix}")
    index = np.arange(length)
    inside = index < prefix
    return _with_items(
        uniform(length, causal=~inside), np.where(inside, 0, index), np.where(inside, prefix, index + 1)
    )


def shared_question(question: int, answers: Sequence[int]) -> Bitfield:
    """One question and several answers to it: all causal, an answer sees the question and itself."""
    lengths = _lengths((question, *answers))
    field = uniform(sum(lengths), causal=True)
    start = np.repeat(_starts(lengths), lengths)
    is_answer = start >= question if question else np.ones(len(field), np.bool_)
    both = TEXT_BIT | _ANSWER_BIT
    return _changed(
        field,
        allow=np.full(len(field), both),
        own=np.where(is_answer, _ANSWER_BIT, TEXT_BIT),
        first=np.where(is_answer, start, 0),
        always=np.where(is_answer, TEXT_BIT, 0),
    )


def sliding_window(length: int, window: int) -> Bitfield:
    """Causal, each token sees itself and the window - 1 tokens before it; ValueError if window < 1."""
    return lambda_shaped(length, sinks=0, window=window)


def lambda_shaped(length: int, *, sinks: int, window: int) -> Bitfield:
    """A sliding window, and the first `sinks` tokens always; ValueError if window < 1 or sinks < 0."""
    if window < 1 or sinks < 0:
        raise ValueError(f"want a window >= 1 and sinks >= 0, got window {window}, sinks {sinks}")
    index = np.arange(max(length, 0))
    return _windowed(uniform(length, causal=True), np.maximum(index - window + 1, 0), index < sinks)


def two_sided_window(length: int, *, before: int, after: int) -> Bitfield:
    """Each token sees itself, `before` tokens in front and `after` behind it; ValueError if one is < 0."""
    return global_window(length, before=before, after=after, tokens=0)


def global_window(length: int, *, before: int, after: int, tokens: int) -> Bitfield:
    """A two-sided window, and the first `tokens` tokens, which see all and which all see.

    Global attention of Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), at the front as in
    ETC and BigBird.

    Raises:
        ValueError: before, after or tokens < 0.
    """
    if min(before, after, tokens) < 0:
        raise ValueError(f"want before, after and tokens >= 0, got {before}, {after} and {tokens}")
    index = np.arange(max(length, 0))
    is_global = index < tokens
    first = np.where(is_global, 0, np.maximum(index - before, 0))
    last = np.where(is_global, NO_LIMIT, np.minimum(index + after, NO_LIMIT))
    return _changed(_windowed(uniform(length, causal=False), first, is_global), last=last)


def causal_blockwise(lengths: Sequence[int], *, window: int = 1, sinks: int = 0) -> Bitfield:
    """Causal blocks for in-context learning: demonstrations, and last the question that sees them all.

    A token sees the blocks of its window, its own being the last of them, and the first `sinks` blocks;
    a token of the last block sees everything before it.
    window=1, sinks=0 is FlashMask's (Wang et al. 2024, arXiv 2410.01359); DCP (Jiang et al. 2025) names
    blocks of 256 tokens and the number 2, which we take for the window.

    Raises:
        ValueError: window < 1, sinks < 0 or a negative length.
    """
    if window < 1 or sinks < 0:
        raise ValueError(f"want a window >= 1 and sinks >= 0 blocks, got window {window}, sinks {sinks}")
    sizes = _lengths(lengths)
    starts = _starts(sizes)
    opens = starts[np.maximum(np.arange(len(sizes)) - window + 1, 0)]
    opens[-1:] = 0
    block = np.repeat(np.arange(len(sizes)), sizes)
    return _windowed(uniform(sum(sizes), causal=True), opens[block], block < sinks)


def multimodal(runs: Sequence[Run], groups: Groups = Groups.PER_ENCODER) -> Bitfield:
    """Text among encoder outputs: one document of the masks that Cornstarch draws.

    Text sees, causally, everything before it. A modality token sees its own group and nothing else:
    all tokens of its encoder, before and after it, or those of its own item. Prepended or embedded is
    a matter of the runs' order.

    Raises:
        ValueError: a modality outside 0 to 60, or a negative length.
    """
    modality_t, start_t = _spread(runs)
    bit_t = np.uint64(1) << modality_t.astype(np.uint64)
    text_t = modality_t == TEXT
    seen = int(np.bitwise_or.reduce(bit_t)) | TEXT_BIT if len(bit_t) else TEXT_BIT
    index = np.arange(len(modality_t))
    field = _changed(
        uniform(len(index), causal=text_t), own=bit_t, allow=np.where(text_t, np.uint64(seen), bit_t)
    )
    if groups is Groups.PER_ENCODER:
        return field
    return _changed(_with_items(field, *_items(runs)), first=np.where(text_t, 0, start_t))


def encoder_prepended(
    length: int, *, seed: int, mixture: Mixture = MIXTURE, groups: Groups = Groups.PER_ENCODER
) -> Bitfield:
    """EP of Cornstarch v1 Figure 11a and ICML Figure 7a: all encoder outputs, then the text.

    Random: the order of the encoders; an encoder's items stand together. ValueError if length < 0.
    """
    return multimodal(_prepended(_sized(length), mixture, np.random.default_rng(seed)), groups)


def encoder_embedded(
    length: int, *, seed: int, mixture: Mixture = MIXTURE, groups: Groups = Groups.PER_ENCODER
) -> Bitfield:
    """EE of Cornstarch v1 Figure 11b and ICML Figure 7b: encoder outputs stand among the text.

    Random: the order of all items and the text between them, every division of the text into
    items + 1 parts (empty ones too) by uniform cuts. ValueError if length < 0.
    """
    return multimodal(_embedded(_sized(length), mixture, np.random.default_rng(seed)), groups)


def multimodal_packed(
    length: int,
    *,
    seed: int,
    documents: int = 12,
    mixture: Mixture = MIXTURE,
    groups: Groups = Groups.PER_ENCODER,
) -> Bitfield:
    """MP of Cornstarch v1 Figure 11c and ICML Figure 7c: sequences of different patterns, packed.

    Random: where documents end (distinct uniform cuts), whether each is EP or EE (evenly), and what is random
    in those. The number of documents is not printed; 12 is ours.

    Raises:
        ValueError: not 1 <= documents <= length.
    """
    if not 1 <= documents <= length:
        raise ValueError(f"documents must be 1 to {length}, one token each at least, got {documents}")
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(length - 1, documents - 1, replace=False)) + 1
    lengths = np.diff([0, *cuts.tolist(), length]).tolist()
    patterns = (_prepended, _embedded)
    drawn = [patterns[rng.integers(2)](each, mixture, rng) for each in lengths]
    return concatenate([multimodal(runs, groups) for runs in drawn])


DRAWN: Mapping[str, Callable[..., Bitfield]] = {
    "EP": encoder_prepended,
    "EE": encoder_embedded,
    "MP": multimodal_packed,
}
"""The papers' masks by their names: of a length and a seed."""


def gemma_style(runs: Sequence[Run]) -> Bitfield:
    """Causal throughout, and the tokens of one image or clip see each other too.

    The rule of Gemma 3 in transformers: causal or same image. Errors as in `multimodal`.
    """
    modality_t, _ = _spread(runs)
    return _with_items(uniform(len(modality_t), causal=modality_t == TEXT), *_items(runs))


def gemma4_style(runs: Sequence[Run]) -> Bitfield:
    """Causal throughout, and in layers with a window the tokens of one image or clip see each other too.

    The rule of Gemma 4 in transformers: in the window, and causal or same image. Errors as in `multimodal`.
    """
    modality_t, _ = _spread(runs)
    _, end = _items(runs)
    field = uniform(len(modality_t), causal=True)
    return _changed(field, last=np.where(modality_t == TEXT, NO_LIMIT, end - 1))


def narrowed(field: Bitfield, window: int | None) -> Bitfield:
    """The same, each token seeing at most the last `window` positions, its own and its item's among them.

    Keys that the field shows always, such as sinks, stay visible beyond it. A window that the field has
    already stays where it is narrower. Of keys behind a token it hides none, and shows those up to the
    `last` of a causal token.

    Raises:
        ValueError: a window below 1.
    """
    if window is None:
        return field
    if window < 1:
        raise ValueError(f"sliding window must be >= 1 token, got {window}")
    opens = np.minimum(field.position.astype(np.int64) - (window - 1), field.start)
    causal = field.causal & ~field.opens_in_windows
    return _changed(field, first=np.maximum(field.first, opens), causal=causal)


def chunked(field: Bitfield, chunk: int | None) -> Bitfield:
    """The same, each token seeing nothing in front of its chunk; segments fall into chunks from their start.

    With a causal mask it is that of chunked attention in transformers (Llama 4).

    Raises:
        ValueError: a chunk below 1.
    """
    if chunk is None:
        return field
    if chunk < 1:
        raise ValueError(f"attention chunk must be >= 1 token, got {chunk}")
    position, segment = field.position.astype(np.int64), field.segment + 1  # padding is one too
    start = np.full(int(segment.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(start, segment, position)
    return _changed(field, first=np.maximum(field.first, position - (position - start[segment]) % chunk))


def _prepended(length: int, mixture: Mixture, rng: np.random.Generator) -> list[Run]:
    items = mixture.items(length)
    runs = [item for encoder in rng.permutation(len(items)) for item in items[encoder]]
    return [*runs, Run(TEXT, length - sum(run.length for run in runs))]


def _embedded(length: int, mixture: Mixture, rng: np.random.Generator) -> list[Run]:
    items = [item for of_encoder in mixture.items(length) for item in of_encoder]
    text = length - sum(item.length for item in items)
    cuts = np.sort(rng.integers(0, text + 1, len(items))).tolist()
    texts = [Run(TEXT, part) for part in np.diff([0, *cuts, text]).tolist()]
    shuffled = [items[index] for index in rng.permutation(len(items))]
    return [run for pair in zip(texts, shuffled, strict=False) for run in pair] + texts[-1:]


def _sized(length: int) -> int:
    return _lengths((length,))[0]


def _changed(field: Bitfield, **arrays: npt.NDArray[np.generic]) -> Bitfield:
    return Bitfield(**{**dict(field.arrays()), **arrays})


def _with_items(field: Bitfield, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Bitfield:
    """Tokens that are not causal see up to the end of their item."""
    return _changed(field, start=start, last=np.where(field.causal, NO_LIMIT, end - 1))


def _items(runs: Sequence[Run]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """int64[T] each: where the item of every token starts and ends; a text token is one."""
    lengths = _lengths([run.length for run in runs])
    modality_t, start_t = _spread(runs)
    index, text_t = np.arange(len(start_t)), modality_t == TEXT
    end_t = start_t + np.repeat(np.asarray(lengths, np.int64), lengths)
    return np.where(text_t, index, start_t), np.where(text_t, index + 1, end_t)


def _windowed(field: Bitfield, first: npt.NDArray[np.int64], sink: npt.NDArray[np.bool_]) -> Bitfield:
    words = np.full(len(field), TEXT_BIT | _SINK_BIT)
    sinks = np.full(len(field), _SINK_BIT if sink.any() else 0)
    own = np.where(sink, _SINK_BIT, TEXT_BIT)
    return _changed(field, allow=words, own=own, first=first, always=sinks)


def _spread(runs: Sequence[Run]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """int64[T] each: the modality of every token, and where its run starts."""
    lengths = _lengths([run.length for run in runs])
    for run in runs:
        if not 0 <= run.modality <= MAX_MODALITY:
            raise ValueError(f"modality must be 0 (text) to {MAX_MODALITY}, got {run.modality}")
    modalities = np.array([run.modality for run in runs], np.int64)
    return np.repeat(modalities, lengths), np.repeat(_starts(lengths), lengths)


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"length {index} must be >= 0 tokens, got {length}")
    return tuple(lengths)


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)[:-1]
