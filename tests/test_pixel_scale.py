"""Pixels are scaled as a checkpoint's processor scales them."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from runtime.data.dataset import pixels_of
from runtime.data.pixels import scaled
from tests import tiny_models
from workbench.data.sample import Segment
from workbench.model.composites.composite import VISION
from workbench.model.model_graph import Module
from workbench.model.pixel_scale import MEAN, STD, pixel_scale, scale_keys
from workbench.model.processor_config import with_processor

PROCESSORS = {
    "clip": CLIPImageProcessorPil(do_resize=False, do_center_crop=False),
    "siglip": SiglipImageProcessorPil(do_resize=False),
    "in [0, 1]": CLIPImageProcessorPil(do_resize=False, do_center_crop=False, do_normalize=False),
}
IMAGE = Segment(VISION, 0, 4, 4)


def encoder(processor: dict) -> Module:
    return tiny_models.encoder(with_processor(tiny_models.CLIP, processor), VISION)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_the_processor(name: str):
    bytes_HWC = np.random.default_rng(0).integers(0, 256, (32, 24, 3), np.uint8)
    theirs = PROCESSORS[name](Image.fromarray(bytes_HWC), return_tensors="pt")["pixel_values"][0]
    module = encoder(PROCESSORS[name].to_dict())
    ours = scaled(pixels_of(bytes_HWC.transpose(2, 0, 1)), IMAGE, module)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)


def test_tiles_and_steps_of_videos_have_their_channels_elsewhere():
    module = encoder({MEAN: [0.1, 0.2, 0.3], STD: [0.5, 0.25, 0.125]})
    image = torch.rand(3, 4, 6) * 2 - 1
    alone = scaled(image, IMAGE, module)
    tiles = scaled(image.expand(3, 3, 4, 6), IMAGE, module)
    assert torch.equal(tiles, alone.expand(3, 3, 4, 6))
    step = Segment(VISION, 0, 4, 4, frame=(0, 0))
    frames = scaled(image[:, None].expand(3, 3, 4, 6), step, module)
    assert torch.equal(frames, alone[:, None].expand(3, 3, 4, 6))


def test_without_a_processor_pixels_stay():
    image = torch.rand(3, 4, 6)
    assert scaled(image, IMAGE, tiny_models.encoder(tiny_models.CLIP, VISION)) is image


@pytest.mark.parametrize(
    ("processor", "keys"),
    [
        ({}, {}),
        ({MEAN: [0.5]}, {}),
        ({"do_normalize": False, MEAN: [0.5], STD: [0.5]}, {MEAN: [0.0], STD: [1.0]}),
        ({"do_rescale": False, MEAN: [0.5], STD: [0.5]}, {}),
        ({"rescale_factor": 1 / 127.5, MEAN: [0.5], STD: [0.5]}, {}),
        ({"rescale_factor": 0.00392156862745098, MEAN: [0.5], STD: [0.5]}, {MEAN: [0.5], STD: [0.5]}),
        ({"rescale_factor": "1/255", MEAN: [0.5], STD: [0.5]}, {}),
    ],
)
def test_what_a_mean_cannot_say_is_left_out(processor: dict, keys: dict):
    assert scale_keys(processor) == keys


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({MEAN: [0.5]}, "image_std must be a list of numbers"),
        ({MEAN: [0.5, 0.5], STD: [0.5]}, "equally many channels, got 2 and 1"),
        ({MEAN: [0.5], STD: [0.0]}, "image_std must be > 0"),
        ({MEAN: "0.5", STD: [0.5]}, "image_mean must be a list of numbers"),
        ({MEAN: [math.nan], STD: [0.5]}, "image_mean must be a list of numbers"),
        ({MEAN: [], STD: []}, "got none"),
        ({MEAN: [True], STD: [0.5]}, "image_mean must be a list of numbers"),
    ],
)
def test_means_that_are_none_are_refused(keys: dict, words: str):
    with pytest.raises(ValueError, match=words):
        pixel_scale(keys)


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(ValueError, match="image_mean has 2 channels, its images 3"):
        scaled(torch.zeros(3, 4, 4), IMAGE, encoder({MEAN: [0.5, 0.5], STD: [0.5, 0.5]}))
