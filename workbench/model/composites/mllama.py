"""Llama 3.2 Vision: tiles that the language model reads by cross-attention."""

from workbench.model.composites.composite import (
    DECODER,
    LLM,
    VISION,
    Composite,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
)
from workbench.model.config_fields import Config
from workbench.model.projector import Projector


def _mllama(config: Config) -> Parts:
    return Parts(
        modules={
            VISION: Part(
                config=part_config(config, "vision_config", "mllama_vision_model"),
                projector=Projector.LINEAR,
                weights={"": "model.vision_model.", "projector.linear.": "model.multi_modal_projector."},
            ),
            LLM: Part(config=text_config(config, "mllama_text_model"), weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
    )


MLLAMA = Composite(name="Llama 3.2 Vision", model_type="mllama", take_apart=_mllama)
