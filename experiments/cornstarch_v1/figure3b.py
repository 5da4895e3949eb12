"""Figure 3b: forward and backward of CLIP, projector and Mistral 7B, frozen or not.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 2.3.1, Figure 3b.
Setup:   one A40, batch of 2, activation checkpointing; the projector is always trained. Which CLIP, the text
         length and the precision are not stated.
Given:   the frozen flags -> backward over forward by the frozen rule ([rule]); model sizes and plausible
         inputs -> times and ratios of the A40 profile ([modelled]).
Differs: the printed backward of the frozen LLM is 1.34 forwards. With activation checkpointing, which the
         caption states, the recompute alone is 1 and the input gradient another 1.
         The projector's backward is 2.4 to 2.5 forwards in both cases; the rule gives 2 (no input gradient
         behind a frozen encoder) and 3.
Ours:    computed, no simulation.
"""

from experiments.cornstarch.breakdown import Breakdown, Part
from experiments.cornstarch.modelled import Setting
from experiments.harness.printed import is_true, printed_rows
from experiments.harness.printed_pipeline import StageTimes
from experiments.harness.script import Parts, script
from workbench.data.corpus import ItemTokens, square_image_tokens
from workbench.model.projector import Projector

BATCH = 2
RULE_FORWARDS = {  # (part, frozen) -> forwards that a backward takes, recompute included
    ("encoder", True): 0,
    ("projector", True): 2,
    ("llm", True): 2,
    ("encoder", False): 3,
    ("projector", False): 3,
    ("llm", False): 3,
}
IMAGES = (
    square_image_tokens(336, 14, num_class_tokens=1),
    square_image_tokens(224, 14, num_class_tokens=1),
    ItemTokens(12 * 577, 576),  # 4 x 3 tiles of 336 px, pooled to the tokens of one
)


def parts() -> tuple[Part, ...]:
    """The six printed pairs."""
    printed_parts = []
    for row in printed_rows("cornstarch_v1_figure3b"):
        frozen = is_true(row["encoder_and_llm_frozen"])
        times = StageTimes.from_ms(row["fwd_ms"], row["bwd_ms"])
        printed_parts.append(Part(row["module"], frozen, times, RULE_FORWARDS[row["module"], frozen]))
    return tuple(printed_parts)


def settings() -> dict[str, Setting]:
    """Plausible inputs; the first, one 336 px image and 1k of text, is the one shown."""
    sizes = [(IMAGES[0], 1024)] + [(image, text) for image in IMAGES for text in (512, 1024, 2048)]
    return {
        f"{image.tokens_in} patches, {text} text tokens": Setting(
            text_tokens=text, items=(("vision", image),), microbatch_samples=BATCH
        )
        for image, text in sizes
    }


def figure() -> Breakdown:
    """What is printed, and plausible inputs."""
    return Breakdown(
        where="Figure 3b",
        unstated=(
            "CLIP L/14 at 224 or 336 px or as many tiles of it as cover 1280x720, 0.5k to 2k text tokens"
        ),
        parts=parts(),
        name="clip-mistral",
        encoder="clip-vit-l-14-336",
        llm="mistral-7b-v0.1",
        projector=Projector.LINEAR,  # section 6.1
        settings=settings(),
    )


@script(profile="A40")
def run() -> Parts:
    ruled, modelled = figure().evidence()
    modelled.causes |= {
        "*/projector/*": "kernels of a projector are shorter than their launches, which are not priced here",
        "*/llm/frozen/*": "print has 1.34 forwards, less than its stated recompute and the input gradient",
    }
    return [ruled, modelled]
