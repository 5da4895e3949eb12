"""Random masks: bitfields of any shape, and every builder beside a predicate written without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from tests.paper_words import from_paper_word, from_released_word
from workbench.masks import builders
from workbench.masks.bitfield import Bitfield, concatenate, pad
from workbench.masks.builders import Groups, Run

Rng = np.random.Generator
Token = Callable[[str], torch.Tensor]  # the label of that name
Rule = Callable[[Token, Token], torch.Tensor]  # (query, key) -> bool


@dataclass(frozen=True, slots=True)
class Case:
    """A bitfield, and labels of its tokens that a rule speaks of: name -> int[T], or one for all."""

    field: Bitfield
    labels: dict[str, Any]

    def label(self, name: str) -> np.ndarray:
        """int64[T]; `place` is always there, and a label that a case does not have is 0."""
        value = np.arange(len(self.field)) if name == "place" else self.labels.get(name, 0)
        return np.broadcast_to(np.asarray(value, np.int64), (len(self.field),))


def flex_masks(cases: Sequence[Case], rule: Rule) -> list[np.ndarray]:
    """bool[T, T] of every case: PyTorch's eager evaluation of the rule, all cases as one batch."""
    names = sorted({name for case in cases for name in case.labels} | {"place"})
    size = max(1, *(len(case.field) for case in cases))
    table = {name: torch.zeros(len(cases), size, dtype=torch.int64) for name in names}
    for name, index in ((name, index) for name in names for index in range(len(cases))):
        values = cases[index].label(name)
        table[name][index, : len(values)] = torch.tensor(values)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return rule(lambda name: table[name][b, q], lambda name: table[name][b, k])

    masks = create_mask(mask_mod, len(cases), None, size, size, device="cpu")[:, 0].numpy()
    return [mask[: len(case.field), : len(case.field)] for mask, case in zip(masks, cases, strict=True)]


def random_bitfield(rng: Rng, length: int, *, num_groups: int = 3, num_segments: int = 3) -> Bitfield:
    """Any field at all: runs or noise, windows or none, positions in order, shuffled or shared."""

    def runs(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, rng.integers(1, 20, length))[:length] if rng.random() < 0.6 else values

    def words() -> np.ndarray:
        return runs(rng.integers(0, 1 << num_groups, length))

    index = rng.integers(0, max(1, length), length) if rng.random() < 0.5 else np.arange(length)
    windows = {
        "none": np.zeros(length, np.int64),
        "sliding": np.maximum(0, index - rng.integers(0, max(1, length))),
        "any": rng.integers(0, max(1, length), length),
    }
    segment = runs(rng.integers(-1, num_segments, length))
    return Bitfield(
        allow=words(),
        own=words(),
        causal=runs(rng.random(length) < 0.7),
        segment=np.sort(segment) if rng.random() < 0.7 else segment,
        position=index,
        first=windows[rng.choice(list(windows))],
        always=words() if rng.random() < 0.5 else np.zeros(length, np.int64),
    )


@st.composite
def bitfields(draw: Any, *, min_length: int = 0, max_length: int = 150) -> Bitfield:
    length = draw(st.integers(min_length, max_length))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_groups, num_segments = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return random_bitfield(rng, length, num_groups=num_groups, num_segments=num_segments)


def random_runs(rng: Rng, *, encoders: int = 3) -> list[Run]:
    """Text among several items of several encoders, some of them next to each other, some empty."""
    return [
        Run(int(rng.integers(0, encoders + 1)), int(rng.integers(0, 7))) for _ in range(rng.integers(1, 9))
    ]


def _labels(runs: Sequence[Run]) -> dict[str, Any]:
    """Modality and number of the run of every token."""
    sizes = [run.length for run in runs]
    return {"kind": np.repeat([run.modality for run in runs], sizes), "item": _ids(sizes)}


def _lengths(rng: Rng, most: int = 5) -> list[int]:
    return [int(each) for each in rng.integers(0, 12, rng.integers(1, most + 1))]


def _ids(lengths: Sequence[int]) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def _size(rng: Rng) -> int:
    return int(rng.integers(0, 40))


def _causal(rng: Rng) -> Case:
    return Case(builders.causal(_size(rng)), {})


def _full(rng: Rng) -> Case:
    return Case(builders.full(_size(rng)), {})


def _document(rng: Rng) -> Case:
    lengths = _lengths(rng)
    return Case(builders.document(lengths), {"part": _ids(lengths)})


def _causal_document(rng: Rng) -> Case:
    lengths = _lengths(rng)
    return Case(builders.causal_document(lengths), {"part": _ids(lengths)})


def _prefix_lm(rng: Rng) -> Case:
    length = _size(rng)
    prefix = int(rng.integers(0, length + 1))
    return Case(builders.prefix_lm(prefix, length), {"in_prefix": np.arange(length) < prefix})


def _shared_question(rng: Rng) -> Case:
    lengths = _lengths(rng, most=6)
    return Case(builders.shared_question(lengths[0], lengths[1:]), {"part": _ids(lengths)})


def _sliding_window(rng: Rng) -> Case:
    length, window = _size(rng), int(rng.integers(1, 50))
    return Case(builders.sliding_window(length, window), {"window": window})


def _lambda_shaped(rng: Rng) -> Case:
    length, sinks, window = _size(rng), int(rng.integers(0, 10)), int(rng.integers(1, 50))
    return Case(
        builders.lambda_shaped(length, sinks=sinks, window=window), {"window": window, "sinks": sinks}
    )


def _causal_blockwise(rng: Rng) -> Case:
    lengths, window, sinks = _lengths(rng, most=7), int(rng.integers(1, 4)), int(rng.integers(0, 3))
    labels = {"part": _ids(lengths), "window": window, "sinks": sinks, "last": len(lengths) - 1}
    return Case(builders.causal_blockwise(lengths, window=window, sinks=sinks), labels)


def _multimodal(rng: Rng) -> Case:
    runs = random_runs(rng)
    return Case(builders.multimodal(runs), _labels(runs))


def _multimodal_items(rng: Rng) -> Case:
    runs = random_runs(rng)
    return Case(builders.multimodal(runs, Groups.PER_ITEM), _labels(runs))


def _gemma_style(rng: Rng) -> Case:
    runs = random_runs(rng)
    return Case(builders.gemma_style(runs), _labels(runs))


def _gemma4_style(rng: Rng) -> Case:
    runs = random_runs(rng)
    return Case(builders.gemma4_style(runs), _labels(runs))


def _gemma4_in_windows(rng: Rng) -> Case:
    runs, window = random_runs(rng), int(rng.integers(1, 12))
    field = builders.narrowed(builders.gemma4_style(runs), window)
    return Case(field, {**_labels(runs), "window": window})


def _paper_word(rng: Rng) -> Case:
    """Text carries the causal bit and some modalities, others their own bit; zeros are padding."""
    size = int(rng.integers(1, 40))
    kind = rng.integers(-1, 4, size)
    sees = rng.integers(0, 8, size) << 1 | 1
    groups = np.where(kind == 0, sees, np.where(kind > 0, 1 << np.maximum(kind, 0), 0))
    causal_bit = int(rng.integers(61, 64))
    word = groups.astype(np.uint64) | np.where(kind == 0, np.uint64(1 << causal_bit), np.uint64(0))
    return Case(from_paper_word(word.view(np.int64), causal_bit=causal_bit), {"kind": kind, "groups": groups})


def _released_word(rng: Rng) -> Case:
    groups = np.repeat(rng.integers(0, 16, 8), rng.integers(0, 6, 8))
    return Case(from_released_word(groups | np.where(groups & 1, 1 << 62, 0)), {"groups": groups})


def _any_field(rng: Rng) -> Case:
    field = random_bitfield(rng, _size(rng))
    return Case(field, {name: array.astype(np.int64) for name, array in field.arrays()})


def _before(q: Token, k: Token) -> torch.Tensor:
    return k("place") <= q("place")


def _near(q: Token, k: Token) -> torch.Tensor:
    return q("place") - k("place") < q("window")


def _same(name: str) -> Rule:
    return lambda q, k: q(name) == k(name)


def _grouped(name: str) -> Rule:
    """Text before it all, others their own group only."""
    return lambda q, k: torch.where(
        q("kind") == 0, _before(q, k), (q("kind") == k("kind")) & (q(name) == k(name))
    )


def _paper_rule(q: Token, k: Token) -> torch.Tensor:
    carries = (q("groups") >> torch.clamp(k("kind"), min=0)) & 1 == 1
    text = (q("kind") == 0) & carries & _before(q, k)
    return (k("kind") >= 0) & (text | ((q("kind") > 0) & (q("kind") == k("kind"))))


def _released_rule(q: Token, k: Token) -> torch.Tensor:
    overlap = (q("groups") & k("groups") != 0) & _before(q, k)
    return torch.where(q("groups") & 1 == 1, overlap, (q("groups") == k("groups")) & (q("groups") != 0))


def _specification(q: Token, k: Token) -> torch.Tensor:
    together = (q("segment") == k("segment")) & (q("segment") >= 0)
    ordered = (q("causal") == 0) | (k("position") <= q("position"))
    kept = (k("position") >= q("first")) | (q("always") & k("own") != 0)
    return together & (q("allow") & k("own") != 0) & ordered & kept


# The patterns of one sequence, each with what it should mean in words of its own.
ONE_SEQUENCE: dict[str, tuple[Callable[[Rng], Case], Rule]] = {
    "causal": (_causal, _before),
    "full": (_full, lambda q, k: q("place") >= 0),
    "prefix-lm": (_prefix_lm, lambda q, k: _before(q, k) | (q("in_prefix") * k("in_prefix") == 1)),
    "shared-question": (
        _shared_question,
        lambda q, k: _before(q, k) & ((k("part") == 0) | (k("part") == q("part"))),
    ),
    "sliding-window": (_sliding_window, lambda q, k: _before(q, k) & _near(q, k)),
    "lambda": (
        _lambda_shaped,
        lambda q, k: _before(q, k) & (_near(q, k) | (k("place") < k("sinks"))),
    ),
    "causal-blockwise": (
        _causal_blockwise,
        lambda q, k: (
            _before(q, k)
            & ((q("part") - k("part") < q("window")) | (k("part") < k("sinks")) | (q("part") == q("last")))
        ),
    ),
    "multimodal": (_multimodal, _grouped("kind")),
    "multimodal-items": (_multimodal_items, _grouped("item")),
    "gemma": (
        _gemma_style,
        lambda q, k: _before(q, k) | ((q("kind") > 0) & (q("item") == k("item"))),
    ),
    "gemma4": (_gemma4_style, _before),
    "gemma4-in-windows": (
        _gemma4_in_windows,
        lambda q, k: (
            (_before(q, k) | ((q("kind") > 0) & (q("item") == k("item"))))
            & (q("place") - k("place") < q("window"))
        ),
    ),
}
CASES: dict[str, tuple[Callable[[Rng], Case], Rule]] = {
    **ONE_SEQUENCE,
    "document": (_document, _same("part")),
    "causal-document": (_causal_document, lambda q, k: _before(q, k) & _same("part")(q, k)),
    "paper-word": (_paper_word, _paper_rule),
    "released-word": (_released_word, _released_rule),
    "any-field": (_any_field, _specification),
}


def packed_case(rng: Rng) -> Case:
    """A few sequences of different patterns in one row, and padding after them."""
    patterns = rng.integers(0, len(ONE_SEQUENCE), rng.integers(1, 5)).tolist()
    parts = [list(ONE_SEQUENCE.values())[pattern][0](rng) for pattern in patterns]
    sizes = [len(part.field) for part in parts]
    tail = np.full(int(rng.integers(0, 9)), -1)
    names = sorted({name for part in parts for name in part.labels} | {"place"})
    labels = {name: np.concatenate([*(part.label(name) for part in parts), tail]) for name in names}
    labels["document"] = np.concatenate([_ids(sizes), tail])
    labels["pattern"] = np.concatenate([np.repeat(patterns, sizes), tail])
    field = pad(concatenate([part.field for part in parts]), sum(sizes) + len(tail))
    return Case(field, {**labels, "local": labels.pop("place")})


def packed_rule(q: Token, k: Token) -> torch.Tensor:
    """Each document by its own pattern's rule, with places counted from its start."""
    inner = [lambda name, at=at: at("local" if name == "place" else name) for at in (q, k)]
    seen = q("place") < 0
    for pattern, (_, rule) in enumerate(ONE_SEQUENCE.values()):
        seen = seen | ((q("pattern") == pattern) & rule(*inner))
    return seen & (q("document") == k("document")) & (q("document") >= 0)
