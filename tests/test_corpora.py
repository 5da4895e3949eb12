"""Corpora and users' own sizes: what is drawn, what becomes of it, what is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.data.corpora import CORPORA, Corpus, corpus
from workbench.data.corpus import ItemTokens, qwen2_vl_tokens, whisper_tokens
from workbench.data.size_files import read_sizes
from workbench.data.sizes import Rules, Sizes, samples_of

RULES = Rules(
    image=lambda height, width: [qwen2_vl_tokens(height, width)],
    audio=whisper_tokens,
)


@pytest.mark.parametrize("each", CORPORA, ids=lambda each: each.name)
def test_draws_are_seeded_and_say_what_was_assumed(each: Corpus):
    assert each.draw(20, 3) == each.draw(20, 3)
    assert each.draw(20, 3) != each.draw(20, 4)
    assert each.draw(20, 3)[:5] == each.draw(5, 3)
    assert each.measured
    assert each.assumed
    samples = samples_of(each.draw(20, 0), RULES)
    assert [sample.id for sample in samples] == list(range(20))
    assert all(sample.num_tokens > 0 for sample in samples)


def test_coco_has_the_mean_of_the_measured_table():
    sizes = corpus("coco-captions").draw(4000, 0)
    patches = [qwen2_vl_tokens(*size.images[0]).tokens_in for size in sizes]
    assert sum(patches) / len(patches) == pytest.approx(1393, rel=0.02)
    assert sum(sum(size.text_tokens) for size in sizes) / len(sizes) == pytest.approx(11.88, rel=0.03)


def test_interleaved_sequences_are_full():
    for size in corpus("laion-interleaved-like").draw(50, 1):
        tokens = sum(-(-h // 16) * -(-w // 16) for h, w in size.images) + sum(size.text_tokens)
        assert tokens == 8192


def test_several_items_of_one_image_stand_side_by_side():
    rules = Rules(image=lambda height, width: [ItemTokens(4, 1), ItemTokens(8, 2)])
    (sample,) = samples_of([Sizes(text_tokens=(3, 5), images=((10, 10),))], rules)
    assert [(s.modality, s.k, s.tokens_in, s.tokens_out) for s in sample.segments] == [
        ("text", 0, 3, 3),
        ("vision", 0, 4, 1),
        ("vision", 1, 8, 2),
        ("text", 1, 5, 5),
    ]


def test_a_modality_without_an_encoder_leaves_its_text():
    (sample,) = samples_of([Sizes(text_tokens=(3, 5), audio_s=(2.0,))], Rules(image=RULES.image))
    assert [(s.modality, s.tokens_in) for s in sample.segments] == [("text", 8)]


ROWS: list[dict[str, Any]] = [
    {"image_width": 640, "image_height": 480, "text_tokens": 12, "audio_seconds": None, "note": "x"},
    {"image_width": [64, 32], "image_height": [48, 16], "text_tokens": 3, "audio_seconds": 1.5, "note": "y"},
    {"image_width": None, "image_height": None, "text_tokens": 7, "audio_seconds": [2.0, 3.5], "note": "z"},
]
EXPECTED = (
    Sizes(text_tokens=(0, 12), images=((480, 640),)),
    Sizes(text_tokens=(0, 0, 0, 3), images=((48, 64), (16, 32)), audio_s=(1.5,)),
    Sizes(text_tokens=(0, 0, 7), audio_s=(2.0, 3.5)),
)


def as_lists(rows: list[dict[str, Any]]) -> pa.Table:
    """One type per column, as arrow wants it."""
    many = ("image_width", "image_height", "audio_seconds")
    return pa.Table.from_pylist(
        [
            {
                k: ([v] if v is not None and not isinstance(v, list) else v) if k in many else v
                for k, v in row.items()
            }
            for row in rows
        ]
    )


def test_json_lines_are_read(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert read_sizes(file) == EXPECTED


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_is_read(encoding: str, tmp_path: Path):
    """As the library of Python writes it, lists as their text; blank lines are none."""
    file = tmp_path / "a.csv"
    with file.open("w", newline="", encoding=encoding) as out:
        writer = csv.DictWriter(out, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
        out.write("\r\n")
    assert read_sizes(file) == EXPECTED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"want a column text_tokens, got none"),
        ("text_tokens\n", r"there are no rows"),
        ("text_tokns\n3\n", r"want a column text_tokens.*nearest is 'text_tokns'"),
        ("text_tokens,text_tokens\n3,4\n", r"want each column once, text_tokens is there 2 times"),
        ("text_tokens,name\n3\n", r"row 1: want 2 cells, as the header has, got 1"),
        ("text_tokens\n3\n4,5\n", r"row 2: want 1 cells, as the header has, got 2"),
        ("text_tokens\n3\n\nfour\n", r"row 2: text_tokens: want a number or a list.*got 'four'"),
        ('text_tokens\n" "\n', r"row 1: text_tokens: want one number, got None"),
        ("text_tokens\n" + "[" * 100_000 + "\n", r"row 1: text_tokens: want a number or a list"),
        ("text_tokens\n" + "7" * 5000 + "\n", r"row 1: text_tokens: want a number or a list"),
        ("text_tokens\n" + "7" * 200_000 + "\n", r"not CSV: field larger than field limit"),
        ('text_tokens\n"3"4\n', r"not CSV"),
        ("text_tokens\nNaN\n", r"row 1: text_tokens: want numbers, got nan"),
        ('text_tokens,image_width,image_height\n3,"[4, 5]",6\n', r"row 1: want as many widths as heights"),
        ("text_tokens,images\n3,a.png\n", r"'images' is not a size; want image_width, image_height"),
    ],
)
def test_bad_csv_is_named(text: str, words: str, tmp_path: Path):
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_sizes(file)


def test_parquet_is_read(tmp_path: Path):
    file = tmp_path / "a.parquet"
    pq.write_table(as_lists(ROWS), file)
    assert read_sizes(file) == EXPECTED


def test_a_saved_data_set_is_read(tmp_path: Path):
    """The layout of Hugging Face's `save_to_disk`: arrow streams and a state that lists them."""
    table = as_lists(ROWS)
    for name, part in (("data-00000-of-00002.arrow", table[:1]), ("data-00001-of-00002.arrow", table[1:])):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert read_sizes(tmp_path) == EXPECTED


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text_tokns": 3}', r"want a column text_tokens.*nearest is 'text_tokns'"),
        ('{"text_tokens": 0}', r"row 1: want >= 1 text token"),
        ('{"text_tokens": -4}', r"row 1: want >= 1 text token"),
        ('{"text_tokens": 2.5}', r"row 1: text_tokens: want whole numbers, got 2.5"),
        ('{"text_tokens": "3"}', r"row 1: text_tokens: want numbers, got '3'"),
        ('{"text_tokens": null}', r"row 1: text_tokens: want one number"),
        ('{"text_tokens": 3, "image_width": 5}', r"row 1: want as many widths as heights"),
        (
            '{"text_tokens": 3, "image_width": 0, "image_height": 4}',
            r"sides >= 1 px and at most 1000000 px, got 4 x 0",
        ),
        ('{"text_tokens": 3, "audio_seconds": 0}', r"must last > 0 s and at most 1,000,000 s, got 0"),
        ('{"text_tokens": 3, "audio_seconds": Infinity}', r"want numbers, got inf"),
        ('{"text_tokens": 3, "images": [[8, 8]]}', r"'images' is not a size; want image_width, image_height"),
        ('{"text_tokens": 3, "audio": "a.wav"}', r"'audio' is not a size; want audio_seconds"),
        ("[1]", r"row 1: want an object"),
        ("{", r"row 1: not JSON"),
        ("", r"there are no rows"),
    ],
)
def test_bad_rows_are_named(line: str, words: str, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=words):
        read_sizes(file)


def test_images_beside_their_sizes_or_without_any_are_ignored(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text_tokens": 3, "image": "a.png", "image_width": 5, "image_height": 4}\n'
        '{"text_tokens": 2, "image": null, "videos": []}\n'
    )
    first, second = read_sizes(file)
    assert (first.images, second.images) == (((4, 5),), ())


def test_images_of_a_table_want_sizes(tmp_path: Path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text_tokens": [3], "image": ["a.png"]}), file)
    with pytest.raises(ValueError, match="'image' is not a size; want image_width, image_height"):
        read_sizes(file)


def test_files_that_are_none_are_named(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a parquet file"):
        read_sizes(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_sizes(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="not a saved data set"):
        read_sizes(tmp_path)
    with pytest.raises(ValueError, match=r"got '.tsv'"):
        read_sizes(tmp_path / "a.tsv")
    with pytest.raises(ValueError, match="no corpus 'laion'"):
        corpus("laion")
