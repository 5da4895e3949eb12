"""The 64-bit word per token of Cornstarch: as its paper describes it, and as its released kernel reads it."""

import numpy as np
import numpy.typing as npt

from workbench.masks.bitfield import MAX_MODALITY, PADDING, TEXT_BIT, Bitfield, Words, uniform


def from_paper_word(word: npt.ArrayLike, *, causal_bit: int = 63) -> Bitfield:
    """The single 64-bit word per token of Cornstarch (ICML) section 4.2 and Figure 4, as they describe it.

    Bit 0 is set for text and bit i for encoder i; the causal bit is the most significant one. A text
    word carries besides the bits of all modalities it attends to. Read so: a token with bit 0 belongs to text
    alone and may see every group of its word; any other token belongs to, and may see, the groups of
    its word. A word without groups is padding. All tokens are one segment: the word has no documents.
    Differs: the paper says what a text token sees, not that others do not see it through the bits
    that it carries; were it to own them all, images would see the text.

    Args:
        word: int64[T] or uint64[T].
        causal_bit: 61 to 63; 62 is where the authors' released code puts it.

    Raises:
        ValueError: not 64-bit integers, or a bit is set that is neither a group nor the causal bit.
    """
    if not MAX_MODALITY < causal_bit < 64:
        raise ValueError(
            f"causal_bit must be 61 to 63, above the {MAX_MODALITY} modalities, got {causal_bit}"
        )
    word_t = _paper_words(word)
    flag = np.uint64(1 << causal_bit)
    group_t = word_t & ~flag
    text_t = (group_t & np.uint64(TEXT_BIT)) != 0
    place_t = np.arange(len(word_t), dtype=np.int32)
    return Bitfield(
        allow=group_t,
        own=np.where(text_t, np.uint64(TEXT_BIT), group_t),
        causal=(word_t & flag) != 0,
        segment=np.where(group_t == 0, PADDING, 0),
        position=place_t,
        first=np.zeros_like(place_t),
        always=np.zeros_like(group_t),
    )


def from_released_word(word: npt.ArrayLike) -> Bitfield:
    """The same word as the authors' public kernel reads it: bits 62 and 63 are never looked at.

    A token with bit 0 sees, causally, every token whose word shares a bit with its own; any other token
    sees exactly the tokens with the same word. Equality of words is not overlap of bits, so every
    distinct word becomes a group.

    Raises:
        ValueError: not 64-bit integers, or more than 61 distinct words.
    """
    word_t = _paper_words(word) & np.uint64(2**62 - 1)
    distinct, kind_t = np.unique(word_t, return_inverse=True)
    groups = distinct[distinct != 0]
    if len(groups) > MAX_MODALITY + 1:
        raise ValueError(f"want at most {MAX_MODALITY + 1} distinct words, got {len(groups)}")
    bit = {int(group): 1 << index for index, group in enumerate(groups)}
    sees = {
        group: sum(bit[other] for other in bit if group & other) if group & TEXT_BIT else bit[group]
        for group in bit
    }
    own = np.array([bit.get(int(each), 0) for each in distinct], np.uint64)
    allow = np.array([sees.get(int(each), 0) for each in distinct], np.uint64)
    field = uniform(len(word_t), causal=(word_t & np.uint64(TEXT_BIT)) != 0)
    words = {"allow": allow[kind_t], "own": own[kind_t], "segment": np.where(word_t == 0, PADDING, 0)}
    return Bitfield(**{**dict(field.arrays()), **words})


def _paper_words(word: npt.ArrayLike) -> Words:
    word_t = np.asarray(word)
    if word_t.ndim != 1 or word_t.dtype not in (np.int64, np.uint64):
        raise ValueError(f"words must be int64[T] or uint64[T], got {word_t.dtype}{list(word_t.shape)}")
    return word_t.view(np.uint64)
