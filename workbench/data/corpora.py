"""Corpora to draw samples from: measured sizes, and synthetic ones modelled on those of the papers."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.data.sizes import Sizes
from workbench.on_demand import OnDemand

pq = OnDemand("pyarrow.parquet")
_TABLES = Path(__file__).parent / "tables"

Column = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Sizes of samples, drawn without end.

    Args:
        name: as users type it.
        measured: what was measured, and on what.
        assumed: what was not measured.
        draw_one: draws one sample.
    """

    name: str
    measured: str
    assumed: str
    draw_one: Callable[[random.Random], Sizes]

    def draw(self, num: int, seed: int) -> tuple[Sizes, ...]:
        """Draw `num` samples; equal seeds give equal samples, and longer draws start like shorter ones."""
        if num < 1:
            raise ValueError(f"corpus {self.name!r}: want >= 1 sample, got {num}")
        return tuple(islice(self.stream(seed), num))

    def stream(self, seed: int) -> Iterator[Sizes]:
        """Yield samples without end; equal seeds give equal ones."""
        rng = random.Random(seed)
        while True:
            yield self.draw_one(rng)


def corpus(name: str) -> Corpus:
    """A corpus by name; ValueError lists the names."""
    corpora = {each.name: each for each in CORPORA}
    if name not in corpora:
        raise ValueError(f"no corpus {name!r}; there are {', '.join(sorted(corpora))}")
    return corpora[name]


@cache
def _table(name: str) -> dict[str, Column]:
    columns = pq.read_table(_TABLES / f"{name}.parquet").to_pydict()
    return {column: tuple(values) for column, values in columns.items()}


def _row(table: dict[str, Column], rng: random.Random) -> int:
    return rng.randrange(len(next(iter(table.values()))))


def _image(table: dict[str, Column], row: int) -> tuple[int, int]:
    return table["image_height"][row], table["image_width"][row]


def _image_and_text(name: str) -> Callable[[random.Random], Sizes]:
    """Draw a row of a table unchanged: the image first, then its text."""

    def draw_one(rng: random.Random) -> Sizes:
        table = _table(name)
        row = _row(table, rng)
        return Sizes(text_tokens=(0, table["text_tokens"][row]), images=(_image(table, row),))

    return draw_one


def _clip_and_text(name: str) -> Callable[[random.Random], Sizes]:
    def draw_one(rng: random.Random) -> Sizes:
        table = _table(name)
        row = _row(table, rng)
        return Sizes(text_tokens=(0, table["text_tokens"][row]), audio_s=(float(table["audio_s"][row]),))

    return draw_one


def _llava_150k(rng: random.Random) -> Sizes:
    """A COCO image; 58 : 23 : 77 conversations, details and complex questions (thousands)."""
    images, answers = _table("coco_captions"), _table("llava_answers")
    kind = rng.choices(("conv", "detail", "complex"), (58, 23, 77))[0]
    of_kind = [row for row, row_kind in enumerate(answers["kind"]) if row_kind == kind]
    turns = rng.randint(2, 4) if kind == "conv" else 1
    rows = [rng.choice(of_kind) for _ in range(turns)]
    text = sum(answers["prompt_tokens"][row] + answers["answer_tokens"][row] for row in rows)
    return Sizes(text_tokens=(0, text), images=(_image(images, _row(images, rng)),))


def _cocoqa(rng: random.Random) -> Sizes:
    images, prompts = _table("coco_captions"), _table("gqa_prompts")
    text = prompts["text_tokens"][_row(prompts, rng)] + 1
    return Sizes(text_tokens=(0, text), images=(_image(images, _row(images, rng)),))


def _synthchartnet(rng: random.Random) -> Sizes:
    """Charts of 4 to 12 by 3 to 9 inches at 120 dpi; tables of 2 to 60 rows and 2 to 6 columns."""
    side_px = (round(120 * rng.triangular(3, 9, 4.8)), round(120 * rng.triangular(4, 12, 6.4)))
    rows, columns = round(min(60.0, 2 + rng.lognormvariate(2.2, 0.8))), rng.randint(2, 6)
    return Sizes(text_tokens=(0, 20 + rows * columns * rng.randint(3, 6)), images=(side_px,))


def _laion_interleaved(rng: random.Random) -> Sizes:
    """Alternate images and captions up to 8,192 tokens, with one image token per 16 x 16 px."""
    remaining, texts, images = 8192, [0], list[tuple[int, int]]()
    while True:
        side = rng.lognormvariate(5.9, 0.6)
        aspect = rng.lognormvariate(0, 0.25)
        side_px = tuple(min(1024, max(64, round(side * scale))) for scale in (aspect, 1 / aspect))
        text = 1 + round(rng.lognormvariate(2.5, 0.9))
        tokens = -(-side_px[0] // 16) * -(-side_px[1] // 16)
        if tokens + text > remaining:
            texts[-1] += remaining
            return Sizes(text_tokens=tuple(texts), images=tuple(images))
        images.append((side_px[0], side_px[1]))
        texts.append(text)
        remaining -= tokens + text


_COCO = "image sizes of COCO 2017 validation"

CORPORA: Sequence[Corpus] = (
    Corpus(
        name="coco-captions",
        measured=f"{_COCO} with the caption of each",
        assumed="nothing",
        draw_one=_image_and_text("coco_captions"),
    ),
    Corpus(
        name="llava-pretrain",
        measured="2,183 images and captions of LLaVA's pretraining mix; the source had resized the images",
        assumed="nothing",
        draw_one=_image_and_text("llava_pretrain"),
    ),
    Corpus(
        name="llava-150k-like",
        measured=f"{_COCO}; lengths of 90 questions and answers by kind; the share of kinds",
        assumed="2 to 4 turns per conversation; image and text sizes independent",
        draw_one=_llava_150k,
    ),
    Corpus(
        name="cocoqa-like",
        measured=f"{_COCO}; lengths of 12,578 GQA questions in place of CocoQA's",
        assumed="one-word answers; image and text sizes independent",
        draw_one=_cocoqa,
    ),
    Corpus(
        name="chartqa-bars",
        measured="questions and answers on 15,983 bar charts",
        assumed="image sizes, estimated from label boxes",
        draw_one=_image_and_text("chartqa_bars"),
    ),
    Corpus(
        name="synthchartnet-like",
        measured="nothing",
        assumed="chart sizes at 120 dpi and the number of cells of a table, both skewed",
        draw_one=_synthchartnet,
    ),
    Corpus(
        name="laion-interleaved-like",
        measured="nothing",
        assumed="lognormal sides and captions, interleaved to 8,192 tokens as in DistTrain, section 2.3",
        draw_one=_laion_interleaved,
    ),
    Corpus(
        name="librispeech",
        measured="5,323 utterances with their transcripts",
        assumed="nothing",
        draw_one=_clip_and_text("librispeech"),
    ),
    Corpus(
        name="librispeech-mix",
        measured="10,646 mixtures of two and three speakers with their transcripts",
        assumed="nothing",
        draw_one=_clip_and_text("librispeech_mix"),
    ),
)
