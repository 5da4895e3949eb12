"""From files to patches to the wire and back: equal to transformers' own, and strict about files."""

import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.data.dataset import pixels_of, read_image
from runtime.data.records import read_records
from runtime.preprocess.example import example_frames, example_of, packed, preprocess
from runtime.preprocess.images import (
    MalformedImageError,
    QwenRule,
    Rule,
    SquareRule,
    cut,
    joined,
    preprocess_image,
    rule_as_json,
    rule_from_json,
)
from runtime.preprocess.messages import parse_message
from runtime.preprocess.order import OrderSettings, Reordering, Size, ordered
from tests.examples import examples
from tests.preprocess_service import folder_of_images
from workbench.data.corpus import qwen2_vl_tokens


def photograph(path: Path, height: int, width: int, mode: str = "RGB") -> Path:
    rng = np.random.default_rng(height * width)
    coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height)).convert(mode).save(path)
    return path


@pytest.mark.parametrize(("height", "width"), [(60, 90), (200, 131), (56, 56), (10, 300)])
def test_qwen_patches_are_those_of_transformers(tmp_path: Path, height: int, width: int) -> None:
    """Both frames that theirs makes of an image are our one."""
    path = photograph(tmp_path / "x.png", height, width)
    processor = Qwen2VLImageProcessorPil(do_rescale=False, do_normalize=False)
    processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 12}
    theirs = processor(Image.open(path), return_tensors="np")
    values = theirs["pixel_values"].reshape(-1, 3, 2, 14 * 14)
    np.testing.assert_array_equal(values[:, :, 0], values[:, :, 1])
    ours = preprocess_image(path, QwenRule(max_pixels=28 * 28 * 12))
    assert (1, *ours.grid) == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_array_equal(ours.values.reshape(-1, 3, 14 * 14), values[:, :, 0])


def test_a_photograph_has_the_tokens_that_the_planner_counts(tmp_path: Path) -> None:
    patches = preprocess_image(photograph(tmp_path / "x.jpg", 240, 426), QwenRule())
    assert patches.tokens == qwen2_vl_tokens(240, 426)
    assert patches.values.shape == (patches.tokens.tokens_in, 3 * 14 * 14)


@pytest.mark.parametrize(("mode", "suffix"), [("RGB", "jpg"), ("L", "png"), ("RGBA", "png"), ("P", "png")])
def test_square_patches_are_what_the_folder_gives(tmp_path: Path, mode: str, suffix: str) -> None:
    path = photograph(tmp_path / f"x.{suffix}", 50, 70, mode)
    for rule in (SquareRule(image_px=32, patch_px=8), SquareRule(image_px=32, patch_px=16, channels=1)):
        patches = preprocess_image(path, rule)
        pixels = pixels_of(joined(patches.values, patches.grid, rule.patch_px))
        assert pixels.equal(read_image(path, (rule.channels, 32, 32)))


@examples(50)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 4),
)
def test_cut_and_joined_are_inverse(
    patch: int, merge: int, rows: int, columns: int, more_rows: int, more_columns: int
) -> None:
    step = patch * merge
    shape = (rows * step + min(more_rows, step - 1), columns * step + min(more_columns, step - 1), 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    values, grid = cut(pixels, patch, merge)
    assert len(values) == grid[0] * grid[1] == rows * columns * merge**2
    whole = pixels[: rows * step, : columns * step].transpose(2, 0, 1)
    np.testing.assert_array_equal(joined(values, grid, patch, merge), whole)


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "torn", "gif", "bomb", "strip"])
def test_what_is_no_image_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.png"
    whole = photograph(tmp_path / "whole.png", 60, 60).read_bytes()
    if kind == "gif":
        Image.new("RGB", (60, 60)).save(path, format="gif")
    elif kind == "bomb":
        Image.new("1", (10_000, 9_000)).save(path)
    elif kind == "strip":
        Image.new("RGB", (2, 500)).save(path)
    elif kind != "missing":
        path.write_bytes({"empty": b"", "text": b"hello", "torn": whole[: len(whole) // 2]}[kind])
    with pytest.raises(MalformedImageError, match=f"image {path}: cannot be read"):
        preprocess_image(path, QwenRule())


@examples(50)
@given(st.data())
def test_a_damaged_file_is_an_image_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    kind = data.draw(st.sampled_from(["png", "jpg"]))
    content = bytearray(photograph(folder / f"whole.{kind}", 40, 40).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = folder / f"x.{kind}"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with suppress(MalformedImageError):  # nothing else may come out
        assert preprocess_image(path, SquareRule(image_px=16, patch_px=8)).values.shape == (4, 3 * 64)


PAGES = """
import resource, sys
from pathlib import Path
from runtime.preprocess.images import QwenRule, preprocess_image
from runtime.preprocess.producer import keep_freed_memory
keep_freed_memory()
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    preprocess_image(Path(sys.argv[1]), QwenRule())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep what they like")
def test_an_image_finds_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Its own pages are some 800; on the commit before, each image after the first mapped as many."""
    path = photograph(tmp_path / "x.jpg", 512, 512)
    done = subprocess.run([sys.executable, "-c", PAGES, path], capture_output=True, text=True, check=True)
    first, *_, last = map(int, done.stdout.split())
    assert last < 50 < first


@pytest.mark.parametrize("rule", [QwenRule(max_pixels=28 * 28 * 9), SquareRule(image_px=24, patch_px=8)])
def test_an_example_crosses_the_wire(tmp_path: Path, rule: Rule) -> None:
    folder = folder_of_images(tmp_path / "data", [(30, 60)])
    assert rule_from_json(rule_as_json(rule)) == rule
    example = preprocess(read_records(folder)[0], folder, rule)
    header, buffers = example_frames(example)
    again = example_of(
        parse_message(packed("done", task=(0, 0), example=header))["example"], [bytes(b) for b in buffers]
    )
    assert (again.id, again.tokens, again.tokens_in) == (example.id, example.tokens, example.tokens_in)
    np.testing.assert_array_equal(again.texts[0], example.texts[0])
    np.testing.assert_array_equal(again.images[0].values, example.images[0].values)
    with pytest.raises(ValueError, match="example 0: want buffers of"):
        example_of(header, buffers[:1])


def test_rules_that_are_none() -> None:
    for data, words in (
        ({"kind": "round"}, "square or qwen2-vl, got 'round'"),
        ({"kind": "square", "image_px": 8, "patch_px": 9}, "want a patch of 1 to 8"),
        ({"kind": "square", "image_px": 8, "patch_px": 4, "channels": 2}, "1 or 3 channels, got 2"),
        ({"kind": "qwen2-vl", "min_pixels": 10, "max_pixels": 9}, "min_pixels <= max_pixels"),
    ):
        with pytest.raises(ValueError, match=words):
            rule_from_json(data)


@examples(50)  # the first call compiles
@given(
    st.lists(st.builds(Size, st.integers(0, 99), st.integers(0, 99)), max_size=12),
    st.integers(1, 4),
    st.sampled_from(Reordering),
    st.integers(1, 3),
)
def test_an_order_is_a_partition_into_equal_groups(
    sizes: list[Size], num_groups: int, reordering: Reordering, microbatch: int
) -> None:
    order = OrderSettings(reordering=reordering, microbatch=microbatch, num_stages=3)
    groups = ordered(sizes, num_groups, order)
    assert sorted(i for group in groups for held in group for i in held) == list(range(len(sizes)))
    counts = [sum(map(len, group)) for group in groups]
    assert max(counts) - min(counts) <= 1
    assert all(1 <= len(held) <= microbatch for group in groups for held in group)
    if reordering is not Reordering.NONE:
        work = [[sizes[i].tokens_in + sizes[i].tokens for h in g for i in h] for g in groups]
        heaviest = max((max(each, default=0.0) for each in work), default=0.0)
        assert max(map(sum, work)) - min(map(sum, work)) <= heaviest + 1e-9
