"""Known models by their published dimensions: rows of shapes.csv as modules."""

import difflib
from collections.abc import Callable
from typing import Any

from workbench.model.diffusion import STABLE_DIFFUSION_2_1, behind_projector, unet_layers
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.families.vit import shaped_siglip, siglip
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Layer
from workbench.model.mmdit import MMDITS, behind_text_projector, mmdit_layers
from workbench.model.model_graph import GENERATED, TEXT, Module
from workbench.model.module_layers import bert_embedding, bert_head, block_layers, patch_embedding
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.shape import UNET, Shape, shapes
from workbench.model.trainable import Trainable, with_trainable
from workbench.model.transformer import Block, Heads, Mlp, Norm, Placement, vit_block


def shape_names() -> tuple[str, ...]:
    """Names that `from_shape` knows: rows in file order, then diffusion transformers."""
    return (*(shape.name for shape in shapes()), UNET, *MMDITS)


def role_of(name: str) -> str:
    """ "llm", "vision", "audio" or "generator"; ValueError for an unknown name."""
    return GENERATED if name == UNET or name in MMDITS else _find(name).role


def from_shape(
    name: str,
    *,
    module: str | None = None,
    llm_width: int | None = None,
    projector: Projector | None = None,
    trainable: Trainable = Trainable.ALL,
) -> Module:
    """The module of a row of shapes.csv, or of a diffusion transformer.

    Where transformers has the architecture, the module carries the configuration with which a
    runtime builds it. An encoder's modality is its role, an LLM's is "text".

    Args:
        name: as in the file.
        module: name of the module; default the role.
        llm_width: hidden width of the LLM; required for encoders, adds a projector to generators; None for
            others.
        projector: of an encoder; default MLP, for Qwen2-VL vision its own merger.
        trainable: which part of it is trained.

    Raises:
        ValueError: unknown name (the nearest known one is named), or arguments that do not fit.
    """
    if name == UNET:
        layers = unet_layers()
        if llm_width is not None:
            layers = behind_projector(layers, STABLE_DIFFUSION_2_1.prompt_width, llm_width)
        return with_trainable(
            Module(name=module or "generator", modality=GENERATED, layers=layers), trainable
        )
    if name in MMDITS:
        layers = mmdit_layers(MMDITS[name])
        if llm_width is not None:
            layers = behind_text_projector(layers, MMDITS[name], llm_width)
        return with_trainable(
            Module(name=module or "generator", modality=GENERATED, layers=layers), trainable
        )
    shape = _find(name)
    module_name = module or shape.role
    if name in _CUSTOM:
        layers = _CUSTOM[name](shape, projector, llm_width)
        modality = TEXT if shape.role == "llm" else shape.role
        return with_trainable(Module(name=module_name, modality=modality, layers=layers), trainable)
    return module_from_config(
        _config(shape),
        name=module_name,
        modality=TEXT if shape.role == "llm" else shape.role,
        trainable=trainable,
        projector=projector,
        llm_width=llm_width,
    )


def _config(shape: Shape) -> dict[str, Any]:
    """The configuration by the family with the longest matching name prefix."""
    family_of_prefix = {
        prefix: make for family in ARCHITECTURES.values() for prefix, make in family.shapes.items()
    }
    return family_of_prefix[
        max((prefix for prefix in family_of_prefix if shape.name.startswith(prefix)), key=len)
    ](shape)


def eva_clip(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    """EVA-CLIP's vision tower: class token, learned positions, queries and values with a bias.

    EVA02-E norms after instead of before; parameters and work are the same.
    """
    block = vit_block(width=shape.hidden, num_heads=shape.heads, ffn=shape.ffn, activation="gelu", bias="qvo")
    embed = patch_embedding(
        patch_elements=3 * shape.patch_px**2,
        width=shape.hidden,
        bias=True,
        num_patches=(shape.image_px // shape.patch_px) ** 2,
        has_class_token=True,
    )
    return (embed, *block_layers(block, shape.layers), _projector(shape, projector, llm_width))


def _pooled_siglip(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    """Phi-4-multimodal's vision encoder: SigLIP, then the mean of every 2 x 2 patches."""
    return (*siglip(shaped_siglip(shape)).layers, _projector(shape, projector, llm_width))


def _projector(shape: Shape, projector: Projector | None, llm_width: int | None) -> Layer:
    if llm_width is None:
        raise ValueError(f"{shape.name}: an encoder needs llm_width, the width its projector ends with")
    if projector is Projector.MERGER:
        raise ValueError(f"{shape.name}: its projector must be 'linear' or 'mlp', got 'merger'")
    return projector_layer(
        Projection(
            kind=projector or Projector.MLP,
            in_width=shape.hidden,
            out_width=llm_width,
            norm=Norm.LAYER,
            merge=shape.merge,
        )
    )


def _bert(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    if projector is not None or llm_width is not None:
        raise ValueError(f"{shape.name} is a language model: it has neither projector nor llm_width")
    heads = Heads(num=shape.heads, num_kv=shape.heads, dim=shape.head_dim, causal=False, bias="qkvo")
    block = Block(
        width=shape.hidden,
        heads=heads,
        mlp=Mlp(width=shape.ffn, gated=False, activation="gelu", bias=True),
        norm=Norm.LAYER,
        placement=Placement.POST,
    )
    return (
        bert_embedding(shape.vocab, shape.hidden, num_positions=512),
        *block_layers(block, shape.layers),
        bert_head(shape.vocab, shape.hidden),
    )


def _find(name: str) -> Shape:
    matches = [shape for shape in shapes() if shape.name == name]
    if not matches:
        near = difflib.get_close_matches(name, shape_names(), n=1, cutoff=0.3)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"unknown model {name!r}{hint}")
    return matches[0]


_CUSTOM: dict[str, Callable[[Shape, Projector | None, int | None], tuple[Layer, ...]]] = {
    "bert-large": _bert,
    "eva-clip-g-14": eva_clip,
    "eva02-clip-e-14": eva_clip,
    "siglip-so400m-14-448 (phi-4-mm)": _pooled_siglip,
}
