"""A diffusion transformer over the patches of a latent, its blocks modulated by time and class (adaLN-Zero).

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2 and figure 3. Time
and class yield one vector per image, so that their products work on one of its tokens.
"""

from dataclasses import replace

from workbench.llm_table.llm_row import LlmRow, YesNo
from workbench.model.layer import Layer, LayerKind, Lookup, Matmul, Operator, Pointwise
from workbench.model.mmdit import Mmdit
from workbench.model.transformer import residual

LATENT_CHANNELS = 4
PREDICTED_CHANNELS = 8  # noise and its variance
TIME_WIDTH = 256  # of the sines and cosines of a time
NORMS = ("attention_norm", "mlp_norm")


SD3_POOLED, FLUX_POOLED = 2048, 768  # widths of the pooled text vector


def mmdit_of(row: LlmRow) -> Mmdit:
    """The row's multimodal transformer: like Flux with single-stream blocks, else like Stable Diffusion 3."""
    is_flux = row.single_layers > 0
    return Mmdit(
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


def modulated(operators: tuple[Operator, ...], row: LlmRow) -> tuple[Operator, ...]:
    """A block with weightless norms: shifted and scaled after them, gated before sums."""
    modulated_operators: list[Operator] = [_of_image(row, "modulation", row.hidden, 6 * row.hidden)]
    for each in operators:
        if each.name in NORMS:
            assert isinstance(each, Pointwise)
            modulated_operators += [replace(each, weights=()), _elementwise(row, f"{each.name}.modulated")]
        elif each.name.endswith("residual"):
            modulated_operators += [_elementwise(row, f"{each.name}.gated"), each]
        else:
            modulated_operators.append(each)
    return tuple(modulated_operators)


def patches(row: LlmRow) -> Layer:
    """Patches of the latent with fixed positions, and the vector of time and class."""
    operators = (
        Matmul(
            name="patches", in_features=LATENT_CHANNELS * row.patch**2, out_features=row.hidden, bias=True
        ),
        residual("add_positions", row.hidden),
        _of_image(row, "time.0", TIME_WIDTH, row.hidden),
        _of_image(row, "time.2", row.hidden, row.hidden),
        Lookup(name="classes", num_rows=row.vocab + 1, width=row.hidden),  # plus one for no class
    )
    return Layer(name="embed", kind=LayerKind.EMBED, operators=operators, out_width=row.hidden)


def noise_head(row: LlmRow) -> Layer:
    """Noise and variance of every element of every patch."""
    elements = PREDICTED_CHANNELS * row.patch**2
    operators = (
        _of_image(row, "modulation", row.hidden, 2 * row.hidden),
        _elementwise(row, "final_norm"),
        _elementwise(row, "final_norm.modulated"),
        Matmul(name="out", in_features=row.hidden, out_features=elements, bias=True),
        Pointwise(name="loss", width=elements, num_passes=2),
    )
    return Layer(name="head", kind=LayerKind.HEAD, operators=operators, out_width=elements)


def _of_image(row: LlmRow, name: str, in_features: int, out_features: int) -> Matmul:
    return Matmul(
        name=name,
        in_features=in_features,
        out_features=out_features,
        bias=True,
        tokens_scale=1 / row.sequence,
    )


def _elementwise(row: LlmRow, name: str) -> Pointwise:
    """Every element read and written once."""
    return Pointwise(name=name, width=row.hidden, num_passes=2)
