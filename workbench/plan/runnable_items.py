"""Which item sizes an encoder or a generator can run."""

from math import isqrt, prod

from workbench.data.corpus import ItemTokens
from workbench.data.sample import Segment
from workbench.model.config_fields import whole
from workbench.model.families.dit import TIME_TOKENS
from workbench.model.families.family import Encoder, Generator
from workbench.model.families.tiles import packed_tokens
from workbench.model.item_tokens import (
    check_item,
    class_tokens,
    evenly_near,
    family_of,
    lone_tile,
    merged_inside,
    merged_tokens,
    native_tokens,
    packs_tiles,
    pads_items,
    source_config,
)
from workbench.model.layer import TokenCount
from workbench.model.model_graph import Module
from workbench.model.projector import Projector, ProjectorKind, Steps, from_text, grid_text, merged_by

VISION = "vision"  # a family's role


def check_segment(module: Module, segment: Segment) -> None:
    """Raise ValueError if the module cannot turn `tokens_in` into `tokens_out`. O(steps of a projector)."""
    family = family_of(module)
    if isinstance(family, Generator):
        _check_generated(segment)
    if not isinstance(family, Encoder):
        return
    check_item(module, ItemTokens(segment.tile_tokens, segment.tokens_out))
    longest = family.longest_item and family.longest_item(source_config(module))
    if longest is not None and segment.tokens_in > longest:
        raise ValueError(f"takes up to {longest} tokens, got {segment.tokens_in}")
    is_read = module.layers[-1].emits is TokenCount.IN
    if is_read or family.takes_native_only(source_config(module)):
        _check_native(module, segment)
    if segment.unpadded is not None or _is_ended(module, segment):
        _check_packed(module, segment)
    elif not is_read:
        _check_projected(module, segment)


def _is_ended(module: Module, segment: Segment) -> bool:
    """Whether a tile alone has the token that ends a row."""
    return packs_tiles(module) and segment.tokens_out == lone_tile(module).tokens_out


def _check_packed(module: Module, segment: Segment) -> None:
    """Check the size of an image in tiles, or of a tile alone with the token that ends a row."""
    native = native_tokens(module)
    if not packs_tiles(module) or native is None:
        raise ValueError("its tiles are put together, and its encoder has no image_newline")
    if segment.tile_tokens != native[0]:
        raise ValueError(f"want tiles of {native[0]} tokens, got {segment.tile_tokens}")
    num_out = lone_tile(module).tokens_out
    if segment.unpadded is not None and segment.grid is not None:
        along = isqrt(native[1])
        room = segment.grid[0] * along, segment.grid[1] * along
        for filled, most in zip(segment.unpadded, room, strict=True):
            if filled > most or (most - filled) % 2:
                raise ValueError(
                    f"want {segment.unpadded[0]} x {segment.unpadded[1]} unpadded features within "
                    f"{room[0]} x {room[1]}, as much padding on both sides"
                )
        num_out = packed_tokens(source_config(module), native[1], segment.unpadded)
    if segment.tokens_out != num_out:
        raise ValueError(f"its projector makes {num_out} tokens, got {segment.tokens_out}")


def _check_projected(module: Module, segment: Segment) -> None:
    num_patches = segment.tokens_in - class_tokens(module.layers[0])
    if num_patches < 1:
        raise ValueError(f"want more tokens than the class token, got {segment.tokens_in}")
    if segment.grid is not None and prod(segment.grid) != num_patches:
        raise ValueError(f"{num_patches} tokens are not {segment.grid[0]} rows of {segment.grid[1]}")
    merged = merged_tokens(module.layers[-1])
    if pads_items(module):
        _check_padded(segment, num_patches // merged)
        return
    assert module.source is not None, "it is of a family"
    assert module.source.projector is not None, "an encoder ends with one"
    projector = from_text(module.source.projector)
    if (inside := merged_inside(module.layers[-1])) > 1:
        num_out = _merged_inside(module, segment, num_patches, inside, projector)
    elif not isinstance(projector, Projector):
        num_out = _merged(
            projector, num_patches, _patch_grid(module, segment, num_patches, isqrt(merged_by(projector)))
        )
    elif projector is Projector.MERGER:
        side = whole(source_config(module), "spatial_merge_size", 2)
        num_out = num_patches // _merged_square(side, num_patches, segment.grid)
    elif merged == 1 and num_patches % segment.tokens_out:
        nearest = evenly_near(num_patches, segment.tokens_out)
        raise ValueError(
            f"{num_patches} tokens do not shrink evenly to {segment.tokens_out}; nearest: {nearest}"
        )
    else:
        num_out = segment.tokens_out if merged == 1 else num_patches // merged
    if num_out != segment.tokens_out:
        raise ValueError(f"its projector makes {num_out} tokens of {num_patches}, got {segment.tokens_out}")


def _merged_inside(
    module: Module, segment: Segment, num_patches: int, inside: int, projector: ProjectorKind
) -> int:
    """Return the tokens of a tower that makes one of `inside` patches, and of its projector after that."""
    steps = () if isinstance(projector, Projector) else projector
    grid = _patch_grid(module, segment, num_patches, isqrt(inside * merged_by(steps)))
    _merged_square(isqrt(inside), num_patches, grid)
    side = isqrt(inside)
    squares = None if grid is None else (grid[0] // side, grid[1] // side)
    return _merged(steps, num_patches // inside, squares)


def _check_padded(segment: Segment, most: int) -> None:
    if segment.tokens_out > most:
        raise ValueError(
            f"its projector makes at most {most} tokens of {segment.tokens_in}, got {segment.tokens_out}"
        )


def _check_generated(segment: Segment) -> None:
    least = segment.tokens_out + TIME_TOKENS + 1
    if segment.tokens_in < least:
        raise ValueError(
            f"an item holds {TIME_TOKENS} token of time, its condition and its patches; want at least "
            f"{least} tokens inside, got {segment.tokens_in}"
        )


def _check_native(module: Module, segment: Segment) -> None:
    """Check the size of items for a tower with positions of one size, or read by cross-attention."""
    native = native_tokens(module)
    if native is None or segment.tokens_in == native[0]:
        return
    raise ValueError(f"want the {native[0]} tokens of an image of its one size, got {segment.tokens_in}")


def _merged_square(side: int, num_patches: int, grid: tuple[int, int] | None) -> int:
    """Return the tokens of a square that merges into one; ValueError if squares do not fit."""
    if num_patches % side**2 or (grid is not None and any(length % side for length in grid)):
        raise ValueError(f"{num_patches} tokens{grid_text(grid)} do not merge {side} x {side} to one")
    return side**2


def _patch_grid(module: Module, segment: Segment, num_patches: int, side: int) -> tuple[int, int] | None:
    """Return rows and columns of an image's patches; None where they are chosen so that squares fit."""
    family, native = family_of(module), native_tokens(module)
    assert family is not None, "it is an encoder"
    if family.role != VISION or segment.grid is not None:
        return segment.grid
    if native is not None and segment.tokens_in == native[0] and isqrt(num_patches) ** 2 == num_patches:
        return isqrt(num_patches), isqrt(num_patches)
    _merged_square(side, num_patches, None)
    return None


def _merged(steps: Steps, num_patches: int, grid: tuple[int, int] | None) -> int:
    """Return the tokens after the projector's steps."""
    for merge in (step.merge for step in steps if step.merge is not None):
        side = isqrt(merge)
        if num_patches % merge or (grid is not None and any(length % side for length in grid)):
            raise ValueError(f"{num_patches} tokens{grid_text(grid)} do not merge {merge} to one")
        num_patches //= merge
        grid = None if grid is None else (grid[0] // side, grid[1] // side)
    return num_patches
