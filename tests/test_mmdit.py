"""Diffusion transformers by name, and rows of them: parameters as published, FLOP in closed form."""

from dataclasses import replace

import pytest

from tests.test_predict import row
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.llm_table.row_model import model_of
from workbench.model.item_tokens import native_tokens
from workbench.model.layer import Layer
from workbench.model.mmdit import FLUX_DEV, MMDITS, SD3_MEDIUM, mmdit_layers
from workbench.model.model_graph import GENERATED
from workbench.model.zoo import from_shape, role_of

# Tensors of the published checkpoints, summed up: facebookresearch/DiT DiT-XL-2 (675M in
# table 1 of the paper; its fixed positions are no weights here),
# stabilityai/stable-diffusion-3-medium ("2B"), black-forest-labs/FLUX.1-schnell and -dev ("12B").
PUBLISHED = {
    "dit-xl-2": 675_129_632 - 256 * 1152,
    "sd3-medium": 2_028_328_000,
    "flux.1-schnell": 11_891_178_560,
    "flux.1-dev": 11_901_408_320,
}
SD3 = {"architecture": "mmdit", "hidden": 1536, "layers": 24, "heads": 24, "sequence": 4096, "patch": 2}
FLUX = {
    "architecture": "mmdit",
    "hidden": 3072,
    "layers": 19,
    "single_layers": 38,
    "heads": 24,
    "sequence": 4096,
    "text_sequence": 256,
    "qk_norm": "yes",
}


@pytest.mark.parametrize("name", MMDITS)
def test_parameters_are_those_of_the_published_checkpoints(name: str):
    assert set(PUBLISHED) == set(MMDITS)
    assert from_shape(name).num_parameters == PUBLISHED[name]
    assert role_of(name) == GENERATED


@pytest.mark.parametrize(("cells", "name"), [(SD3, "sd3-medium"), (FLUX, "flux.1-schnell")])
def test_rows_are_the_models_of_the_zoo(cells: dict, name: str):
    layers = model_of(row(**cells)).modules[0].layers
    assert layers == mmdit_layers(MMDITS[name])


def forward_flop(layers: tuple[Layer, ...], patches: int) -> float:
    return sum(layer_flop(layer, Work((RowWork(patches, patches, patches**2),))) for layer in layers)


@pytest.mark.parametrize("model", [replace(SD3_MEDIUM, layers=6), FLUX_DEV])
def test_products_of_blocks_in_closed_form(model):
    """Each stream multiplies its tokens with weights of its own, 12 h^2 a block; attention is over all.

    A block of one stream has 12 h^2 as well; what is made of a vector an image 6, 6 and 3 h^2.
    """
    h, patches, text = model.width, model.patches, model.text_tokens
    tokens = patches + text
    attention = 4 * h * tokens**2
    double = 2 * tokens * 12 * h**2 + 2 * 2 * 6 * h**2 + attention
    single = 2 * tokens * 12 * h**2 + 2 * 3 * h**2 + attention
    wanted = model.layers * double + model.single_layers * single
    if not model.single_layers:  # behind the last attention the text has no output, MLP or gates
        wanted -= 2 * text * 9 * h**2 + 2 * 4 * h**2
    assert forward_flop(mmdit_layers(model)[1:-1], patches) == pytest.approx(wanted, rel=1e-12)


def test_tokens_of_an_image_and_of_its_prompt():
    assert native_tokens(from_shape("sd3-medium", llm_width=2048)) == (4096, 154)
    assert native_tokens(from_shape("flux.1-dev", llm_width=2048)) == (4096, 512)
    assert native_tokens(from_shape("dit-xl-2", llm_width=2048)) == (256, 1)
    generator = from_shape("flux.1-dev", llm_width=2048)
    assert (generator.entering_width(0), generator.layers[0].out_width) == (2048, 4096)
    assert generator.has_loss


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (SD3 | {"text_sequence": 0}, "text_sequence: want a text beside the patches"),
        (SD3 | {"lora_rank": 8}, "lora_rank: want 0 with architecture mmdit, got 8; nearest: 0"),
        (
            SD3 | {"architecture": "dit", "single_layers": 2},
            "single_layers: want 0 without",
        ),
        (
            SD3 | {"architecture": "vit", "text_sequence": 7},
            "text_sequence: want 0 without",
        ),
    ],
)
def test_what_no_such_row_can_say(cells: dict, message: str):
    with pytest.raises(ValueError, match=message):
        row(**cells)
