"""The dimensions of known models: the rows of shapes.csv."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SHAPES_CSV = Path(__file__).with_name("shapes.csv")
UNET = "sd-2.1-unet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One row of shapes.csv; sizes that a model does not have are 0.

    Args:
        name: of the model; role: "llm", "vision" or "audio".
        hidden: width of the residual stream; ffn: inner width of the MLP.
        patch_px, image_px: of encoders with one image size.
        merge: neighbouring tokens that are merged into one after the encoder.
    """

    name: str
    role: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int
    patch_px: int
    image_px: int
    merge: int


@cache
def shapes() -> tuple[Shape, ...]:
    """Every transformer of shapes.csv, in file order (the UNet of the last row is not one)."""
    with _SHAPES_CSV.open(encoding="utf-8", newline="") as file:
        return tuple(_shape(row) for row in csv.DictReader(file) if row["name"] != UNET)


def _shape(row: dict[str, str]) -> Shape:
    def number(key: str) -> int:
        return int(row[key] or 0) if (row[key] or "0").isdigit() else 0

    merge_sides = row["merge"].partition("x")
    return Shape(
        name=row["name"],
        role=row["role"],
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads") or number("heads"),
        head_dim=number("head_dim"),
        ffn=number("ffn"),
        vocab=number("vocab"),
        max_seq=number("max_seq"),
        patch_px=number("patch_or_frame"),
        image_px=int(row["native_input"].partition("x")[0]) if "x" in row["native_input"] else 0,
        merge=int(merge_sides[0]) * int(merge_sides[2]) if merge_sides[2].isdigit() else 1,
    )
