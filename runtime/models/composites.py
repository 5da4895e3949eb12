"""Composite models that the installed transformers knows."""

from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workbench.model.composites.whole import ANY, Whole


def composite_models() -> tuple[Whole, ...]:
    """Every configuration with configurations inside, and every model of text and something else; sorted."""
    parts_by_type = {kind: _parts(kind) for kind in CONFIG_MAPPING}
    listed = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    whole = {kind for names in listed for kind in names} | {
        kind for kind, parts in parts_by_type.items() if parts
    }
    return tuple(Whole(model_type=kind, parts=parts_by_type.get(kind, {})) for kind in sorted(whole))


def _parts(kind: str) -> dict[str, str]:
    inner = CONFIG_MAPPING[kind].sub_configs
    return {key: ANY if config is AutoConfig else str(config.model_type) for key, config in inner.items()}
