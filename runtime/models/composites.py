"""Composite models that the installed transformers knows."""

from transformers.models.auto import modeling_auto


def composite_types() -> tuple[str, ...]:
    """`model_type` of every model of text and something else, sorted."""
    named = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return tuple(sorted({kind for names in named for kind in names}))
