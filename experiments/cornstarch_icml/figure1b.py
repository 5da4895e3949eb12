"""Figure 1b: forward and backward of SigLIP and Llama 3.2 1B, all trained or only the projector.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 2.2, Figure 1b.
Setup:   one A40, activation checkpointing. Batch, text and image size are not stated.
Given:   the frozen flags -> backward over forward by the frozen rule ([rule]); model sizes and plausible
         inputs -> times and ratios of the A40 profile ([modelled]).
Differs: the printed encoder times include its projector, 0.5 ms of backward where all else is frozen.
Ours:    computed, no simulation.
"""

from experiments.cornstarch.breakdown import Breakdown, Part
from experiments.cornstarch.modelled import Setting
from experiments.harness.printed import is_true, printed_rows
from experiments.harness.printed_pipeline import StageTimes
from experiments.harness.script import Parts, script
from workbench.data.corpus import square_image_tokens
from workbench.model.projector import Projector

IMAGE = square_image_tokens(384, 14)


def parts() -> tuple[Part, ...]:
    """The four printed pairs. Frozen LLM: input gradient and recompute; trained: weight gradient too."""
    printed_parts = []
    for row in printed_rows("cornstarch_icml_figure1b"):
        frozen = not is_true(row["llm_trainable"])
        encoder = StageTimes.from_ms(row["enc_fwd_ms"], row["enc_bwd_ms"])
        llm = StageTimes.from_ms(row["llm_fwd_ms"], row["llm_bwd_ms"])
        printed_parts += [
            Part("encoder", frozen, encoder, 0 if frozen else 3),
            Part("llm", frozen, llm, 2 if frozen else 3),
        ]
    return tuple(printed_parts)


def settings() -> dict[str, Setting]:
    """Plausible inputs; the first, a batch of 4 with 1k of text, is the one shown."""
    sizes = [(4, 1024)] + [(batch, text) for batch in (1, 2, 4, 8) for text in (512, 1024, 2048)]
    return {
        f"batch {batch}, {text} text tokens": Setting(
            text_tokens=text, items=(("vision", IMAGE),), microbatch_samples=batch
        )
        for batch, text in sizes
    }


def figure() -> Breakdown:
    """What is printed, and plausible inputs."""
    return Breakdown(
        where="Figure 1b",
        unstated="batch 1 to 8, 0.5k to 2k text tokens",
        parts=parts(),
        name="siglip-llama",
        encoder="siglip-so400m-14-384",
        llm="llama-3.2-1b",
        projector=Projector.MLP,
        settings=settings(),
    )


@script(profile="A40")
def run() -> Parts:
    return figure().evidence()
