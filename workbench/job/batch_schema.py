"""What a job.yaml may say of its batch."""

from typing import Annotated, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from workbench.job.packed_rows import MOST_STEP_TOKENS, check_unmasked
from workbench.job.sample_sizes import Tiling
from workbench.job.strict import Count, Items, Seconds, Share, Strict
from workbench.masks.patterns import CAUSAL, PATTERNS, canonical

Mask = Annotated[
    str, WithJsonSchema({"type": "string", "pattern": rf"^({'|'.join(PATTERNS)})(\(.*\))?$"})
]  # editors know the names


PackTokens = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS, strict=True)]


def _mask(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError("want a name or a call, as sliding_window(window=4096)")
    return canonical(said)


class ItemSpec(Strict):
    """Items (images, videos, audio clips) of one modality in a sample.

    Give sizes by `images` and `videos`, by `seconds`, or by `tokens`; default: the encoder's native input.

    Args:
        each: only in `fixed`: items per sample.
        most: only in `mixture`: a sample with items has 1 to this many.
        missing: only in `mixture`: share of samples without items.
        images: (height, width) in pixels, for encoders with variable input size and those that put tiles
            together.
        videos: (height, width, seconds), for encoders whose model defines which frames it samples.
        seconds: length of an audio clip; a clip longer than the encoder's window becomes several items.
        tokens: (tokens into the encoder's blocks, tokens into the LLM's sequence) per item.
    """

    each: Items = 1
    most: Annotated[Items, Field(ge=1)] | None = None
    missing: Share = 0.0
    images: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)] | None = None
    videos: Annotated[tuple[tuple[Count, Count, Seconds], ...], Field(min_length=1)] | None = None
    seconds: Seconds | None = None
    tokens: tuple[Count, Count] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if sum(value is not None for value in (self.images or self.videos, self.seconds, self.tokens)) > 1:
            raise ValueError("want at most one of 'images' with 'videos', 'seconds' and 'tokens'")
        return self


class FixedSpec(Strict):
    """Equal samples.

    Args:
        text_tokens: text tokens per sample.
        items: items per sample, by modality.
    """

    text_tokens: Count
    items: dict[str, ItemSpec] = Field(default={})

    @model_validator(mode="after")
    def _no_chance(self) -> Self:
        if any(item.most is not None or item.missing for item in self.items.values()):
            raise ValueError("'most' and 'missing' belong to a 'mixture'")
        return self


class MixtureSpec(Strict):
    """Random samples of different sizes.

    Args:
        seed: random seed.
        text_tokens: smallest and largest number of text tokens of a sample.
        items: items per sample, by modality.
    """

    seed: Annotated[int, Field(ge=0, strict=True)]
    text_tokens: tuple[Count, Count]
    items: dict[str, ItemSpec] = Field(default={})

    @model_validator(mode="after")
    def _no_fixed_number(self) -> Self:
        if any(item.each != 1 or item.seconds is not None for item in self.items.values()):
            raise ValueError("'each' and 'seconds' belong to 'fixed'; a mixture has 'most' and 'missing'")
        return self


class BatchSpec(Strict):
    """The global batch. Its samples come from exactly one of `fixed`, `mixture` and `sizes`.

    Args:
        samples: samples per optimizer step.
        microbatch_samples: samples per microbatch of the LLM.
        replicas: data-parallel replicas of every module whose layout has no `dp`.
        mask: attention mask of the LLM: a name, or a call such as `sliding_window(window=4096)`. A list
            repeats over the samples, starting with the first.
        fixed: equal samples.
        mixture: random samples of different sizes.
        sizes: file with the sizes of samples, or name of a corpus, as for `--sizes`.
        tiling: only with `sizes`: `anyres` cuts images as the model's processor does, as `--tiling`.
        pack_tokens: only with `sizes`: every sample is a row of at most this many tokens, which packs several
            of the sizes' samples; they do not see each other.
    """

    samples: Annotated[Count, Field(le=100_000)]
    microbatch_samples: Count = 1
    replicas: Count = 1
    mask: Mask | Annotated[tuple[Mask, ...], Field(min_length=1)] = CAUSAL
    fixed: FixedSpec | None = None
    mixture: MixtureSpec | None = None
    sizes: Annotated[str, Field(min_length=1)] | None = None
    tiling: Tiling = Tiling.NONE
    pack_tokens: PackTokens | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(value is not None for value in (self.fixed, self.mixture, self.sizes)) != 1:
            raise ValueError("want exactly one of 'fixed', 'mixture' and 'sizes'")
        if self.tiling is not Tiling.NONE and self.sizes is None:
            raise ValueError("'tiling' belongs to 'sizes'; say how many tiles by 'each' or 'most'")
        if self.pack_tokens is not None:
            if self.sizes is None:
                raise ValueError("'pack_tokens' packs samples of 'sizes'; want both, or neither")
            check_unmasked((self.mask,) if isinstance(self.mask, str) else self.mask)
        return self

    @field_validator("mask", mode="before")
    @classmethod
    def _known_masks(cls, said: object) -> object:
        if not isinstance(said, list | tuple):
            return _mask(said)
        return tuple(_mask(each) for each in said)
