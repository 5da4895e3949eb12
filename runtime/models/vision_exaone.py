"""EXAONE 4.5's vision tower: Qwen2.5-VL's with fewer heads of keys and values than of queries."""

from transformers.models.exaone4_5 import modeling_exaone4_5 as exaone

from runtime.models.vision_rotary import Qwen25VisionAdapter


class ExaoneVisionAdapter(Qwen25VisionAdapter):
    """Features are its own merger's output."""

    config_class = exaone.Exaone4_5_VisionConfig
    rotary_class = exaone.Exaone4_5_VisionRotaryEmbedding
    patches_class, merger_class = exaone.Exaone4_5_PatchEmbed, exaone.Exaone4_5_PatchMerger
    layer_class = exaone.Exaone4_5_VisionBlock
    norm_class = exaone.Exaone4_5_RMSNorm
