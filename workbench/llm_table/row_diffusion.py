"""Diffusion transformers over patches of a latent: with a text, or modulated by time and class (adaLN-Zero).

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2 and figure 3.
"""

from dataclasses import replace

from workbench.llm_table.llm_row import Architecture, LlmRow, YesNo
from workbench.model.layer import Operator, Pointwise
from workbench.model.mmdit import Mmdit, elementwise, of_image

LATENT_CHANNELS = 4
PREDICTED_CHANNELS = 8  # noise and its variance
NORMS = ("attention_norm", "mlp_norm")
SD3_POOLED, FLUX_POOLED = 2048, 768  # widths of the pooled text vector


def mmdit_of(row: LlmRow) -> Mmdit:
    """The row's transformer: of classes, or with a text, like Flux where it has single-stream blocks and like
    Stable Diffusion 3 where it has none.
    """
    is_flux = row.single_layers > 0
    sizes = Mmdit(
        width=row.hidden,
        heads=row.heads,
        head_dim=row.head_dim,
        ffn=row.ffn,
        layers=row.layers,
        single_layers=row.single_layers,
        patches=row.sequence,
        text_tokens=row.text_sequence,
        pooled_width=FLUX_POOLED if is_flux else SD3_POOLED,
        qk_norm=row.qk_norm is YesNo.YES,
        rotary=is_flux,
    )
    if row.architecture is Architecture.MMDIT:
        return sizes
    in_patch = row.patch**2
    return replace(
        sizes,
        classes=row.vocab,
        patch_elements=LATENT_CHANNELS * in_patch,
        out_elements=PREDICTED_CHANNELS * in_patch,
    )


def modulated(operators: tuple[Operator, ...], row: LlmRow) -> tuple[Operator, ...]:
    """A block with weightless norms: shifted and scaled after them, gated before sums."""
    modulated_operators: list[Operator] = [of_image(mmdit_of(row), "modulation", row.hidden, 6 * row.hidden)]
    for each in operators:
        if each.name in NORMS:
            assert isinstance(each, Pointwise)
            modulated_operators += [
                replace(each, weights=()),
                elementwise(f"{each.name}.modulated", row.hidden),
            ]
        elif each.name.endswith("residual"):
            modulated_operators += [elementwise(f"{each.name}.gated", row.hidden), each]
        else:
            modulated_operators.append(each)
    return tuple(modulated_operators)
