"""The number of tokens of an item in a module: of native size, an image, a clip or a video."""

import json
from collections.abc import Sequence
from math import isqrt, log
from typing import Any

from workbench.data.corpus import ItemTokens, Tiled, Video
from workbench.data.sample import Sample
from workbench.model.config_aliases import without_aliases
from workbench.model.config_fields import flag
from workbench.model.families.family import Architecture, Encoder, LanguageModel
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.families.tiles import NEWLINE, SHRINKS
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Pointwise, TokenCount
from workbench.model.mmdit import JOINT, TEXT
from workbench.model.model_graph import ModelGraph, Module
from workbench.model.projector import POOL, SHUFFLE
from workbench.model.transformer import CROSS


def native_tokens(module: Module) -> tuple[int, int] | None:
    """(tokens inside the module, tokens in the LLM) of an item of native size; None for any size.

    The table of positions gives the tokens that enter; a class token stays inside; the projector merges
    tokens. A generator's attention gives the positions of its latent and its prompt. An encoder without a
    table takes any size. Families whose layers do not determine the numbers have their own rules.
    """
    family = family_of(module)
    if family is not None and family.native_tokens is not None:
        return family.native_tokens(source_config(module))
    if module.has_loss:
        return _latent_tokens(module)
    first, last = module.layers[0], module.layers[-1]
    tables = [op for op in first.operators if isinstance(op, Lookup) and op.name == "position_embedding"]
    if not tables:
        return None
    tokens_in = tables[0].num_rows
    return tokens_in, (tokens_in - class_tokens(first)) // merged_tokens(last) // merged_inside(last)


def takes_any_size(module: Module) -> bool:
    """Whether an encoder takes images of any size, instead of resizing them to its native one."""
    family = family_of(module)
    has_rule = isinstance(family, Encoder) and family.image_tokens is not None
    return has_rule or native_tokens(module) is None


def packs_tiles(module: Module) -> bool:
    """Whether an image is one item of several tiles, whose features its projector puts together."""
    return isinstance(family_of(module), Encoder) and flag(source_config(module), NEWLINE)


def pads_items(module: Module) -> bool:
    """Whether items of an encoder are padded to full length, and only the first of their tokens are read."""
    family = family_of(module)
    return isinstance(family, Encoder) and family.pads_items


def ends_lone_tiles(module: Module) -> bool:
    """Whether images that share a sample are one tile each and a token that ends its row: LLaVA-OneVision."""
    return packs_tiles(module) and source_config(module).get(SHRINKS) is not None


def lone_tile(module: Module) -> ItemTokens:
    """Size of an image that is a single tile of a module that puts tiles together; one token ends it."""
    native = native_tokens(module)
    assert native is not None, "its tiles have one size"
    return ItemTokens(native[0], native[1] + 1)


def image_tokens(module: Module, height_px: int, width_px: int) -> ItemTokens | Tiled:
    """Tokens of an image in an encoder of any size, or in one of one size that puts tiles together.

    Where its projector merges squares of patches, images are resized to whole squares.

    Raises:
        ValueError: the encoder takes one size, its processor's rule is unknown, or the rule rejects the
            image.
    """
    family = family_of(module)
    if packs_tiles(module):
        return tile_tokens(module, height_px, width_px)[0]
    if not isinstance(family, Encoder) or family.image_tokens is None:
        if native_tokens(module) is None:
            raise ValueError(
                f"module {module.name!r} takes images of any size, and no rule says how many tokens one "
                "makes; give its 'tokens'"
            )
        raise ValueError(f"module {module.name!r} takes one image size; leave out 'images'")
    config, merged = source_config(module), merged_tokens(module.layers[-1])
    if merged == 1:
        return family.image_tokens(config, height_px, width_px)
    squares = {"spatial_merge_size": isqrt(merged)}
    inside = family.image_tokens(config | squares, height_px, width_px).tokens_in
    behind = (inside - class_tokens(module.layers[0])) // merged_inside(module.layers[-1])
    return ItemTokens(inside, behind // merged)


def patch_grid(tokens: ItemTokens, height_px: int, width_px: int) -> tuple[int, int]:
    """(rows, columns) of patches of an image that is resized to whole squares of merged patches.

    Of the grids with so many squares, the one whose aspect ratio is nearest to the image's. It is the one of
    a processor that keeps the aspect ratio, which moves a side by less than a square, while a side of another
    grid with as many squares differs by one or more.

    Args:
        tokens: of the image, as `image_tokens` counts them.

    Complexity: O(tokens.tokens_out).

    Example:
        >>> patch_grid(ItemTokens(tokens_in=48, tokens_out=12), 300, 100)
        (12, 4)
    """
    squares, side = tokens.tokens_out, isqrt(tokens.tokens_in // tokens.tokens_out)
    grids = ((rows, squares // rows) for rows in range(1, squares + 1) if squares % rows == 0)
    aspect = log(height_px / width_px)
    rows, columns = min(grids, key=lambda grid: abs(log(grid[0] / grid[1]) - aspect))
    return side * rows, side * columns


def split_px(module: Module, height_px: int, width_px: int) -> Sequence[tuple[int, int]]:
    """(height, width) in pixels of the images that the model's processor makes of one, each an item."""
    family = family_of(module)
    if not isinstance(family, Encoder):
        return ((height_px, width_px),)
    return family.splits(source_config(module), height_px, width_px)


def tile_tokens(module: Module, height_px: int, width_px: int) -> tuple[ItemTokens | Tiled, ...]:
    """Of an image before an encoder of one size, as the model's processor cuts it.

    One item a tile, or one of all tiles where the projector puts them together.

    Raises:
        ValueError: the encoder takes any size, or does not say its own.
    """
    family, native, config = family_of(module), native_tokens(module), source_config(module)
    if not isinstance(family, Encoder) or native is None:
        raise ValueError(f"module {module.name!r} does not say its image size; leave out the tiling")
    return family.tiles(config, ItemTokens(*native), height_px, width_px)


def clip_tokens(module: Module, duration_s: float) -> tuple[ItemTokens, ...]:
    """Tokens of a clip, one item for each of the encoder's windows; ValueError for other encoders."""
    family = family_of(module)
    if not isinstance(family, Encoder) or family.clip_tokens is None:
        raise ValueError(f"module {module.name!r} is no audio encoder; leave out 'seconds'")
    merged = merged_tokens(module.layers[-1])
    clips = family.clip_tokens(source_config(module), duration_s)
    return tuple(ItemTokens(clip.tokens_in, clip.tokens_out // merged) for clip in clips)


def video_of(module: Module, height_px: int, width_px: int, duration_s: float) -> Video:
    """Tokens of a video, one item for each frame or step that the model's processor samples.

    Raises:
        ValueError: the processor's rule for videos is unknown, or rejects the video.
    """
    family = family_of(module)
    if not isinstance(family, Encoder) or family.video is None:
        known = ", ".join(each.name for each in ARCHITECTURES.values() if getattr(each, "video", None))
        raise ValueError(
            f"module {module.name!r}: no rule says which frames of a video it sees; want one of {known}"
        )
    return family.video(source_config(module), height_px, width_px, duration_s)


def check_item(module: Module, tokens: ItemTokens) -> None:
    """Raise ValueError for an item of more tokens than the module has positions."""
    most = _num_positions(module)
    if most is not None and tokens.tokens_in > most:
        raise ValueError(
            f"module {module.name!r} has {most} positions, got items of {tokens.tokens_in} tokens"
        )


def check_lengths(model: ModelGraph, batch: Sequence[Sample]) -> None:
    """Raise ValueError for a sample, or an item in it, of more tokens than its module has positions.

    Complexity: O(segments of the batch) for each module with limited positions.
    """
    for module in model.modules:
        if (most := _num_positions(module)) is None:
            continue
        for sample in batch:
            if (longest := _longest(module, sample)) > most:
                raise ValueError(
                    f"module {module.name!r} has {most} positions, sample {sample.id} has {longest} tokens"
                )


def _longest(module: Module, sample: Sample) -> int:
    """Tokens of the longest sequence that a module attends over in a sample; 0 without work."""
    if isinstance(family_of(module), LanguageModel):
        return sample.num_tokens
    return max((segment.tile_tokens for segment in sample.of(module.modality)), default=0)


def _num_positions(module: Module) -> int | None:
    """The number of the module's positions; None: unlimited."""
    family = family_of(module)
    if family is None or not family.has_longest_item:
        return None
    if isinstance(family, LanguageModel):
        return family.longest_item and family.longest_item(source_config(module))
    native = native_tokens(module)
    return native and native[0]


def family_of(module: Module) -> Architecture | None:
    """The family of the module's configuration; None where it has none."""
    return None if module.source is None else ARCHITECTURES.get(module.source.architecture)


def source_config(module: Module) -> dict[str, Any]:
    """The module's config.json without aliases; empty where it has none."""
    if module.source is None:
        return {}
    return without_aliases(json.loads(module.source.config) | {"model_type": module.source.architecture})


def _latent_tokens(module: Module) -> tuple[int, int] | None:
    """Keys of a UNet's first self-attention, and of its first cross-attention to the prompt.

    For a diffusion transformer: keys of the image and of the text; a class counts as one token.
    """
    keys: dict[str, int] = {}
    for operator in (operator for layer in module.layers for operator in layer.operators):
        if isinstance(operator, Attention) and operator.num_keys is not None:
            keys.setdefault(operator.name, operator.num_keys)
    if JOINT in keys:
        text = [op for layer in module.layers for op in layer.operators if op.name == TEXT]
        ratio = text[0].tokens_scale if text and isinstance(text[0], Matmul) else 0.0
        patches = round(keys[JOINT] / (1.0 + ratio))
        return patches, max(1, keys[JOINT] - patches)
    latent, prompt = keys.get("self.attention"), keys.get(f"{CROSS}.attention")
    return None if latent is None or prompt is None else (latent, prompt)


def merged_tokens(projector: Layer) -> int:
    """The number of neighbouring tokens that a projector layer merges into one."""
    for operator in projector.operators:
        if isinstance(operator, Pointwise) and operator.name in (POOL, SHUFFLE):
            return int(operator.tokens_scale)
    return 1


def merged_inside(projector: Layer) -> int:
    """The number of neighbouring tokens that became one before a projector layer, by its first norm."""
    first = projector.operators[0]
    is_fewer = isinstance(first, Pointwise) and first.tokens is TokenCount.IN and first.tokens_scale < 1
    return round(1 / first.tokens_scale) if is_fewer else 1  # type: ignore[union-attr]


def evenly_near(num_tokens: int, wanted: int) -> int:
    """The divisor of `num_tokens` that is nearest to `wanted`; of two the larger.

    Example:
        >>> evenly_near(576, 432)
        576
    """
    divisors = (number for number in range(1, num_tokens + 1) if num_tokens % number == 0)
    return min(divisors, key=lambda number: (abs(number - wanted), -number))


def class_tokens(embed: Layer) -> int:
    """The number of class tokens that an encoder's first layer adds; they do not leave the encoder."""
    tables = (each for each in embed.operators if isinstance(each, Pointwise) and each.name == "class_token")
    return sum(numel // table.width for table in tables for _, numel in table.weights)
