"""The data set folder: made the same twice, read strictly, and good enough to learn from."""

import json
import pickle
import wave
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.audio_utils import mel_filter_bank
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from runtime.data.dataset import (
    FolderSource,
    main,
    read_image,
    read_wave,
    samples_of,
)
from runtime.data.mel import log_mel, mel_filters
from runtime.data.records import BOS, EOS, VOCAB_SIZE, read_records
from runtime.data.scenes import make
from runtime.preprocess.source import source_of
from runtime.reference import Reference
from runtime.step.optimizer import OptimizerSettings
from tests import tiny_models
from tests.test_checkpoint_attacks import files_of_at_most
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import TEXT, ModelGraph, connect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "scenes"
    make(target, num_samples=12, seed=1)
    return target


def byte_model() -> ModelGraph:
    text = tiny_models.llm(tiny_models.LLAMA | {"vocab_size": VOCAB_SIZE})
    sounds = tiny_models.encoder(tiny_models.WHISPER | {"max_source_positions": 40}, "audio")
    return connect("bytes", (tiny_models.encoder(tiny_models.SIGLIP, "vision"), text), (sounds, text))


def test_the_same_seed_makes_the_same_folder(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", num_samples=12, seed=1)
    make(tmp_path / "other", num_samples=12, seed=2)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert len(files) > 12
    for file in files:
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert (folder / "data.jsonl").read_text() != (tmp_path / "other" / "data.jsonl").read_text()


def test_samples_have_the_sizes_of_the_encoders(folder: Path) -> None:
    samples = samples_of(folder, byte_model())
    records = read_records(folder)
    assert {s.modality for sample in samples for s in sample.segments} == {TEXT, "vision", "audio"}
    for sample, record in zip(samples, records, strict=True):
        assert [s.modality for s in sample.segments] == [
            {"text": TEXT, "image": "vision", "audio": "audio"}[kind] for kind, _ in record.segments
        ]
        written = sum(len(text.encode()) for text in record.of(TEXT))
        assert sum(s.tokens_out for s in sample.of(TEXT)) == written + 2
        assert all(s.tokens_in == 9 for s in sample.of("vision"))
        assert all(15 <= s.tokens_in <= 40 for s in sample.of("audio"))


def test_a_clip_of_several_windows_is_refused(folder: Path) -> None:
    """Two tokens become one; a clip of one window is read."""
    omni = tiny_models.WHISPER | {"model_type": "qwen2_5_omni_audio_encoder", "max_source_positions": 1500}
    text = tiny_models.llm(tiny_models.LLAMA | {"vocab_size": VOCAB_SIZE})
    vision = tiny_models.encoder(tiny_models.SIGLIP, "vision")

    def samples(window: int) -> Any:
        sounds = tiny_models.encoder(omni | {"n_window": window}, "audio")
        return samples_of(folder, connect("bytes", (vision, text), (sounds, text)))

    assert all(s.tokens_out == s.tokens_in // 2 for sample in samples(1500) for s in sample.of("audio"))
    with pytest.raises(ValueError, match=r"clip .*wav: \d+ frames are several windows of 20, and a folder's"):
        samples(10)


def test_a_source_gives_what_the_plan_asks_for(folder: Path) -> None:
    source = pickle.loads(pickle.dumps(FolderSource(folder)))
    for sample in samples_of(folder, byte_model()):
        texts = [source.token_ids(sample.id, s, VOCAB_SIZE) for s in sample.of(TEXT)]
        assert [len(ids) for ids in texts] == [s.tokens_out for s in sample.of(TEXT)]
        joined = torch.cat(texts).tolist()
        assert joined[0] == BOS
        assert joined[-1] == EOS
        assert bytes(joined[1:-1]).decode() == "".join(source.records[sample.id].of(TEXT))
        for segment in sample.of("vision"):
            image = source.raw(sample.id, segment, (3, 12, 12))
            assert image.shape == (3, 12, 12)
            assert -1 <= image.min() < image.max() <= 1
        for segment in sample.of("audio"):
            mel = source.raw(sample.id, segment, (8, 2 * segment.tokens_in))
            assert mel.shape == (8, 2 * segment.tokens_in)


def test_images_keep_their_orientation(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, 8:, 0] = 255  # red on the right
    Image.fromarray(pixels).save(tmp_path / "red.png")
    (tmp_path / "data.jsonl").write_text('{"id": 5, "segments": [{"image": "red.png"}, {"text": "x"}]}\n')
    image = FolderSource(tmp_path).raw(5, Segment("vision", 0, 1, 1), (3, 8, 16))
    assert torch.equal(image[0, :, 8:], torch.ones(8, 8))
    assert torch.equal(image[0, :, :8], -torch.ones(8, 8))
    assert torch.equal(image[1:], -torch.ones(2, 8, 16))
    grey = FolderSource(tmp_path).raw(5, Segment("vision", 0, 1, 1), (1, 4, 8))
    assert grey.shape == (1, 4, 8)


def test_mel_frames_are_whispers(folder: Path) -> None:
    clip = read_wave(next((folder / "audio").glob("*.wav")))
    extractor = WhisperFeatureExtractor(feature_size=80)
    theirs = extractor(
        clip.numpy(), sampling_rate=16000, padding="do_not_pad", return_tensors="np"
    ).input_features[0]
    ours = log_mel(clip, 80)
    assert ours.shape == theirs.shape == (80, len(clip) // 160)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-4)


@pytest.mark.parametrize("num_bins", [8, 80, 128])
def test_mel_filters_are_slaneys(num_bins: int) -> None:
    theirs = mel_filter_bank(201, num_bins, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(num_bins).numpy(), theirs, atol=1e-12)


def test_a_tiny_model_learns_the_folder(folder: Path) -> None:
    """Two thirds of the loss go in 25 steps; uniform guessing costs log 259 = 5.56."""
    model = byte_model()
    plan = tiny_models.plan_of(model, samples_of(folder, model)[:6])
    settings = OptimizerSettings(learning_rate=1e-2)
    reference = Reference(plan, seed=0, dtype=torch.float32, optimizer=settings)
    source = FolderSource(folder)
    losses = [reference.step(source).loss for _ in range(25)]
    assert losses[0] == pytest.approx(5.56, abs=0.1)
    assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({}, None, id="same"),
        pytest.param(
            {"segments": [{"text": "abc"}, {"image": "x.png"}]},
            r"sample 5 has text\[0\] of 5 tokens, in the plan text\[0\] of 4 tokens",
            id="longer",
        ),
        pytest.param(
            {"segments": [{"image": "x.png"}, {"text": "ab"}]},
            r"sample 5 has vision\[0\] of 9 tokens, in the plan text\[0\] of 4 tokens",
            id="order",
        ),
        pytest.param(
            {"segments": [{"text": "ab"}]},
            r"sample 5 has no such segment, in the plan vision\[0\] of 9 tokens",
            id="fewer",
        ),
        pytest.param({"mask": "full"}, "sample 5 has mask 'full', in the plan 'causal'", id="mask"),
        pytest.param({"id": 6}, "no sample 5, which the plan has", id="id"),
    ],
)
def test_data_are_those_that_the_plan_was_made_with(
    tmp_path: Path, change: dict[str, object], words: str | None
) -> None:
    """Sizes are counted by hand: two bytes between BOS and EOS, an image of 3 x 3 patches of 4 px."""
    planned = Sample(5, (Segment(TEXT, 0, 4, 4), Segment("vision", 0, 9, 9)))
    plan = tiny_models.plan_of(byte_model(), (planned,))
    line = {"id": 5, "segments": [{"text": "ab"}, {"image": "x.png"}]} | change
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    with nullcontext() if words is None else pytest.raises(ValueError, match=f"--data .*: {words}"):
        source_of(str(tmp_path), None, plan, timeout_s=1.0)


def test_make_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make", str(tmp_path / "d"), "--samples", "4", "--kinds", "image"]) == 0
    assert capsys.readouterr().out.endswith(" images, 0 clips\n")
    assert not list((tmp_path / "d" / "audio").iterdir())
    assert main(["make", str(tmp_path / "d")]) == 2
    assert capsys.readouterr().err.endswith("exists already; give a new one\n")
    assert main(["make", str(tmp_path / "e"), "--kinds", "video"]) == 2
    assert "kinds are image and audio, got 'video'" in capsys.readouterr().err
    assert main(["make", str(tmp_path / "e"), "--samples", "0"]) == 2
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "line 1: not an example", id="json"),
        pytest.param('{"id": 1}', "want the keys id", id="keys"),
        pytest.param(
            '{"id": 1, "segments": [{"video": "x"}]}', "a segment is text, image or audio", id="kind"
        ),
        pytest.param('{"id": 1, "segments": [{"image": "x"}]}', "want at least one text", id="no-text"),
        pytest.param(
            '{"id": 1, "segments": [{"text": "x"}], "mask": "round"}',
            "mask 'round': want one of causal, full, .*nearest",
            id="mask",
        ),
        pytest.param(
            '{"id": 1, "segments": [{"text": "x"}, {"image": "\\u0000"}]}',
            "line 1: .*want the name of a file",
            id="no-name",
        ),
        pytest.param("", "no examples in it", id="empty"),
        pytest.param('{"id": 1, "segments": [{"text": "x"}]}\n' * 2, "line 2: id 1 occurs twice", id="twice"),
    ],
)
def test_wrong_folders_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_records(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(b"RIFF")
    (tmp_path / "x.png").write_bytes(b"PNG")
    with pytest.raises(ValueError, match=r"clip .*x\.wav: cannot be read"):
        read_wave(tmp_path / "x.wav")
    with pytest.raises(ValueError, match=r"clip .*y\.wav: cannot be read"):
        read_wave(tmp_path / "y.wav")
    with pytest.raises(ValueError, match=r"image .*x\.png: cannot be read"):
        read_image(tmp_path / "x.png", (3, 4, 4))
    with wave.open(str(tmp_path / "fast.wav"), "wb") as file:
        file.setparams((2, 2, 44100, 0, "NONE", "none"))
    with pytest.raises(ValueError, match="want 1 channel of 16 bits at 16000 Hz, got 2 of 16 bits at 44100"):
        read_wave(tmp_path / "fast.wav")


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    source = FolderSource(folder)
    with pytest.raises(ValueError, match="bytes need a vocabulary of 259, the model has 64"):
        source.token_ids(0, Segment(TEXT, 0, 3, 3), 64)
    with pytest.raises(ValueError, match="no sample 99"):
        source.token_ids(99, Segment(TEXT, 0, 3, 3), 300)
    with pytest.raises(ValueError, match="segments of text, want number 9"):
        source.token_ids(0, Segment(TEXT, 9, 3, 3), 300)
    text_only = ModelGraph(name="text", modules=(tiny_models.llm(),))
    with pytest.raises(ValueError, match="want one encoder for them in model 'text', got none"):
        samples_of(folder, text_only)
    with pytest.raises(ValueError, match=r"no data.jsonl in it"):
        read_records(tmp_path)
    with pytest.raises(ValueError, match="want more than 200 samples, got 200"):
        log_mel(torch.zeros(200), 8)


def test_places_and_counts_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder, samples in ((tmp_path / "file" / "data", "1"), (tmp_path / "data", str(10**12))):
        assert main(["make", str(folder), "--samples", samples]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kinds", ["image", "audio"])
def test_a_full_disk_names_the_folder_and_leaves_nothing(
    kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(100):
        code = main(["make", str(tmp_path / "data"), "--samples", "8", "--kinds", kinds])
    assert code == 2
    assert capsys.readouterr().err == f"error: [Errno 27] File too large: '{tmp_path / 'data'}'\n"
    assert not list(tmp_path.iterdir())
