"""Masks of samples by name: parses `sliding_window(window=4096)` and builds it for a sample's segments.

The text is a call with literal arguments, the same in job files, data folders, plans and `Sample.mask`.
"""

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from workbench.data.sample import Sample, Segment
from workbench.masks import builders
from workbench.masks.bitfield import Bitfield, concatenate
from workbench.masks.builders import MIXTURE, Groups, Mixture, Run

CAUSAL, FULL = "causal", "full"
DOCUMENT, CAUSAL_DOCUMENT = "document", "causal_document"
LONGEST_TEXT = 100_000
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _PatternKind:
    """The values a parameter may have, in words and as a predicate."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _are(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(fits(each) for each in value)


_WHOLE = _PatternKind("a whole number >= 0", _is_whole)
_PARTS = _PatternKind(
    "a list of token counts, or a number of equal parts",
    lambda value: _is_whole(value) or _are(_is_whole)(value),
)
_WHOLES = _PatternKind("a list of whole numbers", _are(_is_whole))
_SHARES = _PatternKind(
    "a list of numbers", _are(lambda each: isinstance(each, int | float) and not isinstance(each, bool))
)
_GROUPS = {"per_encoder": Groups.PER_ENCODER, "per_item": Groups.PER_ITEM}
_GROUP = _PatternKind(
    " or ".join(map(repr, _GROUPS)), lambda value: isinstance(value, str) and value in _GROUPS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One mask by name.

    Args:
        about: who sees whom, in one line.
        build: builds it from a sample's runs and the parameters.
        wanted: required parameters.
        optional: optional parameters.
    """

    about: str
    build: Callable[..., Bitfield]
    wanted: Mapping[str, _PatternKind] = field(default_factory=dict)
    optional: Mapping[str, _PatternKind] = field(default_factory=dict)


def mask(name: str, **parameters: Any) -> str:
    """The validated text of a mask, as in `Sample.mask`.

    Example:
        >>> mask("sliding_window", window=4096)
        'sliding_window(window=4096)'

    Raises:
        ValueError: an unknown mask or parameter, with the nearest one; a missing or invalid parameter.
    """
    pattern = _pattern(name)
    known = {**pattern.wanted, **pattern.optional}
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"mask {name}: unknown parameter {key!r}; {_nearest(key, list(known))}")
        if not known[key].fits(value):
            raise ValueError(f"mask {name}: {key} must be {known[key].words}, got {value!r:.60}")
    for key, kind in pattern.wanted.items():
        if key not in parameters:
            raise ValueError(f"mask {name}: want {key}, {kind.words}")
    arguments = ", ".join(f"{key}={parameters[key]!r}" for key in known if key in parameters)
    return f"{name}({arguments})" if arguments else name


def canonical(text: str) -> str:
    """The text as `mask` writes it: equal masks have equal texts; ValueError as there, or if it is no
    call.
    """
    name, parameters = _read(text)
    return mask(name, **parameters)


def sample_bitfield(rows: Sequence[Sequence[Sample]]) -> Bitfield:
    """The LLM's mask of packed rows of samples, row after row in wire order; O(tokens).

    Every sample is a segment of its own, or several where its mask packs documents.

    Raises:
        ValueError: no such mask, one that does not fit its sample, or more than 60 encoder modalities.
    """
    samples = [sample for row in rows for sample in row]
    names = sorted({part.modality for sample in samples for part in sample.segments} - {"text"})
    number = {name: index for index, name in enumerate(("text", *names))}
    return concatenate([_of_sample(sample, number) for sample in samples])


def check_masks(samples: Iterable[Sample]) -> None:
    """Refuse masks that do not fit their samples.

    Raises:
        ValueError: as `sample_bitfield`.
    """
    for sample in samples:
        if sample.mask not in (CAUSAL, FULL):
            wrong = _complaint(sample.mask, sample.segments)
            if wrong is not None:
                raise ValueError(f"sample {sample.id}: {wrong}")


def document_lengths(sample: Sample) -> tuple[int, ...]:
    """Tokens of each document that the sample's mask packs; of the sample where it packs none.

    Documents of `multimodal_packed`, which are random, count as one.

    Raises:
        ValueError: as `sample_bitfield`.
    """
    name, parameters = _read(sample.mask)
    if name not in (DOCUMENT, CAUSAL_DOCUMENT):
        return (sample.num_tokens,)
    runs = [Run(0, part.tokens_out) for part in sample.segments]
    return tuple(filter(None, _parts(sample.num_tokens, parameters.get("lengths"), runs)))


@lru_cache(maxsize=4096)
def _complaint(text: str, segments: tuple[Segment, ...]) -> str | None:
    """Why a mask does not fit such segments; None: it does."""
    number = {name: index for index, name in enumerate(dict.fromkeys(part.modality for part in segments))}
    try:
        _built(text, [Run(number[part.modality], part.tokens_out) for part in segments])
    except ValueError as error:
        return str(error)
    return None


def _of_sample(sample: Sample, number: dict[str, int]) -> Bitfield:
    try:
        return _built(sample.mask, [Run(number[part.modality], part.tokens_out) for part in sample.segments])
    except ValueError as error:
        raise ValueError(f"sample {sample.id}: {error}") from None


def _built(text: str, runs: Sequence[Run]) -> Bitfield:
    name, parameters = _read(text)
    mask(name, **parameters)
    return PATTERNS[name].build(runs, **parameters)


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call."""
    if text in PATTERNS:
        return text, {}
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"mask: want at most {LONGEST_TEXT} characters, got {len(text)}")
    name = text.partition("(")[0].strip()
    _pattern(name)
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError
        return name, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"mask {text!r:.60}: want name(parameter=value, ...), as sliding_window(window=4096)"
        ) from None


def _pattern(name: str) -> Pattern:
    if name not in PATTERNS:
        raise ValueError(
            f"mask {name!r:.60}: want one of {', '.join(PATTERNS)}; {_nearest(name, list(PATTERNS))}"
        )
    return PATTERNS[name]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"nearest: {near[0]}" if near else "it has none"


def _length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def _parts(total: int, parts: int | list[int] | None, runs: Sequence[Run]) -> list[int]:
    """Lengths that add up to the total: as given, equal ones, or one for each segment."""
    if parts is None:
        return [run.length for run in runs]
    if isinstance(parts, int):
        if not 1 <= parts <= total:
            raise ValueError(f"mask: want 1 to {total} parts of {total} tokens, got {parts}")
        return [total // parts + (part < total % parts) for part in range(parts)]
    if sum(parts) != total:
        raise ValueError(f"mask: the parts must add up to the {total} tokens, got {sum(parts)}")
    return parts


def _documents(build: Callable[[Sequence[int]], Bitfield]) -> Callable[..., Bitfield]:
    return lambda runs, lengths=None: build(_parts(_length(runs), lengths, runs))


def _prefix(runs: Sequence[Run], prefix: int | None = None) -> Bitfield:
    """By default the prefix is everything before the last segment, which is the answer."""
    length = _length(runs[:-1]) if prefix is None else prefix
    return builders.prefix_lm(length, _length(runs))


def _question(runs: Sequence[Run], question: int, answers: int | list[int]) -> Bitfield:
    rest = _length(runs) - question
    if rest < 0:
        raise ValueError(f"mask: question must be at most the {_length(runs)} tokens, got {question}")
    return builders.shared_question(question, _parts(rest, answers, ()))


def _blockwise(
    runs: Sequence[Run], lengths: int | list[int] | None = None, window: int = 1, sinks: int = 0
) -> Bitfield:
    return builders.causal_blockwise(_parts(_length(runs), lengths, runs), window=window, sinks=sinks)


def _multimodal(runs: Sequence[Run], groups: str = "per_encoder") -> Bitfield:
    return builders.multimodal(runs, _GROUPS[groups])


def _gemma(runs: Sequence[Run], window: int | None = None) -> Bitfield:
    return builders.narrowed(builders.gemma_style(runs), window)


def _random(build: Callable[..., Bitfield]) -> Callable[..., Bitfield]:
    """Build from the sample's length alone."""

    def built(
        runs: Sequence[Run],
        seed: int,
        shares: Sequence[float] = MIXTURE.shares,
        spans: Sequence[int] = MIXTURE.spans,
        groups: str = "per_encoder",
        **more: int,
    ) -> Bitfield:
        mixture = Mixture(tuple(shares), tuple(spans))
        return build(_length(runs), seed=seed, mixture=mixture, groups=_GROUPS[groups], **more)

    return built


_LENGTHS = {"lengths": _PARTS}
_DRAWN = {"shares": _SHARES, "spans": _WHOLES, "groups": _GROUP}
PATTERNS: Mapping[str, Pattern] = {
    CAUSAL: Pattern(
        about="itself and all tokens before it", build=lambda runs: builders.causal(_length(runs))
    ),
    FULL: Pattern(about="all tokens", build=lambda runs: builders.full(_length(runs))),
    "multimodal": Pattern(
        about="text: all tokens before it; encoder tokens: those of the same encoder, or of the same item",
        build=_multimodal,
        optional={"groups": _GROUP},
    ),
    "multimodal_items": Pattern(
        about="as `multimodal` with `groups` per item",
        build=lambda runs: builders.multimodal(runs, Groups.PER_ITEM),
    ),
    "gemma": Pattern(
        about="all tokens before it, optionally in a window; tokens of one image or clip: each other too",
        build=_gemma,
        optional={"window": _WHOLE},
    ),
    "gemma4": Pattern(
        about="all tokens before it; in layers with a window, tokens of one image or clip: each other too",
        build=builders.gemma4_style,
    ),
    "prefix_lm": Pattern(
        about="prefix tokens: the prefix; others: all before; default prefix: all segments but the last",
        build=_prefix,
        optional={"prefix": _WHOLE},
    ),
    DOCUMENT: Pattern(
        about="all tokens of its packed document", build=_documents(builders.document), optional=_LENGTHS
    ),
    CAUSAL_DOCUMENT: Pattern(
        about="itself and all tokens before it in its packed document",
        build=_documents(builders.causal_document),
        optional=_LENGTHS,
    ),
    "shared_question": Pattern(
        about="causal, one question with several answers: an answer attends to the question and itself",
        build=_question,
        wanted={"question": _WHOLE, "answers": _PARTS},
    ),
    "sliding_window": Pattern(
        about="each token sees itself and the window - 1 tokens before it",
        build=lambda runs, window: builders.sliding_window(_length(runs), window),
        wanted={"window": _WHOLE},
    ),
    "two_sided_window": Pattern(
        about="itself, `before` tokens before it and `after` tokens after it",
        build=lambda runs, **parameters: builders.two_sided_window(_length(runs), **parameters),
        wanted={"before": _WHOLE, "after": _WHOLE},
    ),
    "global_window": Pattern(
        about="a two-sided window; the first `tokens` attend to all, and all attend to them",
        build=lambda runs, **parameters: builders.global_window(_length(runs), **parameters),
        wanted={"before": _WHOLE, "after": _WHOLE, "tokens": _WHOLE},
    ),
    "lambda_shaped": Pattern(
        about="a sliding window, and the first `sinks` tokens",
        build=lambda runs, **parameters: builders.lambda_shaped(_length(runs), **parameters),
        wanted={"sinks": _WHOLE, "window": _WHOLE},
    ),
    "causal_blockwise": Pattern(
        about="causal, a window of blocks and the first `sinks` blocks; the last block attends to all",
        build=_blockwise,
        optional={**_LENGTHS, "window": _WHOLE, "sinks": _WHOLE},
    ),
    "encoder_prepended": Pattern(
        about="as `multimodal`, with random encoder outputs before random text",
        build=_random(builders.encoder_prepended),
        wanted={"seed": _WHOLE},
        optional=_DRAWN,
    ),
    "encoder_embedded": Pattern(
        about="as `multimodal`, with random encoder outputs inside random text",
        build=_random(builders.encoder_embedded),
        wanted={"seed": _WHOLE},
        optional=_DRAWN,
    ),
    "multimodal_packed": Pattern(
        about="several packed random documents of the two kinds above",
        build=_random(builders.multimodal_packed),
        wanted={"seed": _WHOLE},
        optional={"documents": _WHOLE, **_DRAWN},
    ),
}
