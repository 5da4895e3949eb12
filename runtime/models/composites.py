"""Composite models that the installed transformers knows."""

from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workbench.model.composites.whole import ANY, Whole


def composite_models() -> tuple[Whole, ...]:
    """Every configuration with configurations inside, and every model of text and something else; sorted."""
    found = {kind: _parts(kind) for kind in CONFIG_MAPPING}
    named = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    whole = {kind for names in named for kind in names} | {kind for kind, parts in found.items() if parts}
    return tuple(Whole(model_type=kind, parts=found.get(kind, {})) for kind in sorted(whole))


def _parts(kind: str) -> dict[str, str]:
    inner = CONFIG_MAPPING[kind].sub_configs
    return {key: ANY if made is AutoConfig else str(made.model_type) for key, made in inner.items()}
