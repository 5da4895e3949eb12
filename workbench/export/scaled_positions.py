"""YaRN's positions in megatron-core: what it lacks, and the fields of attention that is not latent.

Source: megatron-core 0.19.2 (Apache-2.0): models/common/embeddings/yarn_rotary_pos_embedding.py, with the
formulas of transformers.
"""

from typing import Any

from workbench.export.decoder import Decoder

YARN = "yarn"
ORIGINAL = "original_max_position_embeddings"
USUAL = {ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1}
SCALES = ("mscale", "mscale_all_dim")
_TRUNCATE = "truncate"  # whether the borders of the ramp are whole numbers
_KNOWN = {"type", "rope_type", "rope_theta", "factor", _TRUNCATE, *SCALES, *USUAL}


def yarn_of(decoder: Decoder) -> dict[str, Any]:
    """As the configuration states it, with transformers' defaults for what is null or absent; empty: none."""
    stated = {key: value for key, value in decoder.rope_scaling.items() if value is not None}
    if not stated:
        return {}
    positions = decoder.most_positions or USUAL[ORIGINAL]  # the default of a configuration
    scaling = USUAL | {ORIGINAL: positions, _TRUNCATE: True} | stated
    return {"factor": positions / scaling[ORIGINAL]} | scaling


def scaling_kind(decoder: Decoder) -> str | None:
    """How the configuration scales positions: "yarn", "llama3", ...; None: not at all."""
    scaling = decoder.rope_scaling
    return str(scaling.get("rope_type", scaling.get("type"))) if scaling else None


def inexpressible_yarn(decoder: Decoder) -> str | None:
    """What megatron-core lacks of scaled positions, which must be YaRN's; None: nothing."""
    scaling = yarn_of(decoder)
    if not scaling:
        return None
    if (kind := scaling_kind(decoder)) != YARN:
        return f"positions scaled as {kind!r}"
    others = sorted(scaling.keys() - _KNOWN)
    given = [scaling[key] for key in SCALES if key in scaling]
    if others or len(given) == 1 or 0 in given:
        return f"scaled positions with {', '.join(others) or 'one of mscale and mscale_all_dim alone'}"
    if decoder.latent is not None and not scaling[_TRUNCATE]:
        return "scaled positions of latent attention that are not truncated"
    return None


def yarn_words(decoder: Decoder) -> dict[str, Any]:
    """Fields of a decoder without latent attention, as Megatron-Bridge names them."""
    scaling = yarn_of(decoder)
    words = {
        "position_embedding_type": YARN,
        "yarn_rotary_scaling_factor": float(scaling["factor"]),
        f"yarn_{ORIGINAL}": scaling[ORIGINAL],
        "yarn_beta_fast": float(scaling["beta_fast"]),
        "yarn_beta_slow": float(scaling["beta_slow"]),
        "yarn_correction_range_round_to_int": bool(scaling[_TRUNCATE]),
    }
    return words | {f"yarn_{key}": float(scaling[key]) for key in SCALES if key in scaling}
