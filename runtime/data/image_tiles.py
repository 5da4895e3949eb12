"""Cut an image into an overview and a grid of tiles, as the processors of LLaVA-NeXT and LLaVA-OneVision."""

from math import ceil

from PIL import Image


def tiles_of(image: Image.Image, grid: tuple[int, int], side_px: int) -> list[Image.Image]:
    """The whole image resized to a tile, then the tiles of its canvas, row by row.

    On the canvas, the image keeps its aspect ratio and is centred; the rest is black.

    Source: `get_image_patches` of transformers' LLaVA-NeXT image processor.

    Args:
        grid: (rows, columns) of the canvas.
        side_px: side of a tile.
    """
    height, width = grid[0] * side_px, grid[1] * side_px
    higher, wider = height / image.height, width / image.width
    if wider < higher:
        size = width, min(ceil(image.height * wider), height)
    else:
        size = min(ceil(image.width * higher), width), height
    canvas = Image.new(image.mode, (width, height))
    fitted = image.resize(size, Image.Resampling.BILINEAR)
    canvas.paste(fitted, ((width - size[0]) // 2, (height - size[1]) // 2))
    boxes = (
        (left, top, left + side_px, top + side_px)
        for top in range(0, height, side_px)
        for left in range(0, width, side_px)
    )
    overview = image.resize((side_px, side_px), Image.Resampling.BILINEAR)
    return [overview, *(canvas.crop(box) for box in boxes)]
