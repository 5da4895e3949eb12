"""The parts of a composite configuration, and helpers that composites share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.model.config_fields import Config, count, flag, text, whole
from workbench.model.feature_layers import FeatureLayers, states_read
from workbench.model.projector import ProjectorKind, ProjectorStep, Steps
from workbench.model.transformer import Norm

VISION, AUDIO, LLM = "vision", "audio", "llm"
TILES = (
    "an image becomes several tiles, each an item: say how many by `each`, or `most` in a mixture, or count "
    "those of your images by `init --data FILE` or `plan --sizes FILE --tiling anyres`"
)
PACKED = (
    "an image is one item of several tiles: give sizes by `images`, or count those of your images by "
    "`init --data FILE` or `plan --sizes FILE`"
)
VISION_TOWER = {"": "model.vision_tower."}  # prefixes of weights of most image encoders
AUDIO_TOWER = {"": "model.audio_tower."}
PROJECTOR = {"projector.": "model.multi_modal_projector."}
CLIP_S = 30  # Whisper's window
CLIP = {"seconds": CLIP_S}
PAGE = {"images": [[448, 448]]}  # of towers that have no size of their own
THINKER = "thinker."  # prefix of the part without the talker
DECODER = {"model.": "model.language_model.", "lm_head.": "lm_head."}  # prefixes of most language models
QWEN3_SMALL = {  # Qwen3-0.6B, the default language model of several composites
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module of a composite.

    Args:
        config: its own config.json.
        projector: of an encoder; None: the family's own.
        feature_layer: hidden state of an encoder that its projector reads, or several; None: its output.
        weights: prefix of weight names in its own checkpoint -> prefix in the composite's; the longest
            matching prefix counts.
        transposed: own names of weights that the composite holds as [in, out].
        respelled: parts of names in the composite, and what released files have in their place.
        items: a job's keys for one item of the size that the model was trained with: `images`, `seconds`,
            or none where the module itself determines it.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, str]
    transposed: tuple[str, ...] = ()
    respelled: tuple[tuple[str, str], ...] = ()
    projector: ProjectorKind | None = None
    feature_layer: FeatureLayers | None = None
    items: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Weights of a composite that no module has.

    Args:
        weights: prefix of their names in the model that transformers builds.
        what: what they are, and why they are left out.
    """

    weights: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A composite taken apart.

    Args:
        modules: name -> part; the LLM last.
        token_ids: encoder's name -> id of the placeholder token that its outputs replace.
        dropped: weights that no module has.
        notes: properties that a job cannot express.
    """

    modules: Mapping[str, Part]
    token_ids: Mapping[str, int]
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """One kind of composite.

    Args:
        name: as in its papers.
        model_type: of its configuration.
        take_apart: configuration -> parts; ValueError for unsupported values.
    """

    name: str
    model_type: str
    take_apart: Callable[[Config], Parts]


SIGLIP_HEAD = Dropped(weights="model.vision_tower.head.", what="SigLIP's pooling head")


def name_in_composite(part: Part, name: str) -> str:
    """The name of a part's weight in the composite's checkpoint."""
    prefix = max((start for start in part.weights if name.startswith(start)), key=len)
    return part.weights[prefix] + name.removeprefix(prefix)


def names_in_files(part: Part, name: str) -> Iterator[str]:
    """Yield the names of a part's weight in checkpoints: transformers' own, older ones, and released ones."""
    inside = name_in_composite(part, name)
    yield from spellings(inside)
    yield _released(part, inside)


def starts_in_files(part: Part) -> Iterator[str]:
    """Yield what the names of a part's weights begin with in checkpoints."""
    for start in part.weights.values():
        yield from spellings(start)
        if released := _released(part, start):
            yield released


def _released(part: Part, name: str) -> str:
    for here, stored in part.respelled:
        name = name.replace(here, stored, 1)
    return name


def spellings(name: str) -> Iterator[str]:
    """Yield a weight's name in a composite, then its names in checkpoints of older transformers releases."""
    yield name
    outer = THINKER if name.startswith(THINKER) else ""
    inner = name.removeprefix(outer)
    for prefix, older_prefixes in _OLDER.items():
        if inner.startswith(prefix):
            yield from (outer + older + inner.removeprefix(prefix) for older in older_prefixes)


_OLDER = {  # prefix of a name -> its prefixes in checkpoints
    "model.language_model.": ("language_model.model.", "model."),
    "lm_head.": ("language_model.lm_head.",),
    "model.vision_tower.": (
        "vision_tower.",
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
    ),
    "model.vision_model.": ("vision_model.",),
    "model.image_tower.": ("image_tower.", "image_tower.vision_model."),
    "model.video_tower.": ("video_tower.", "video_tower.vision_model."),
    "model.audio_tower.": ("audio_tower.",),
    "model.visual.": ("visual.",),
    "model.projector.": ("mlp_AR.",),  # PaddleOCR-VL
    "model.multi_modal_projector.": ("multi_modal_projector.",),
    "model.image_newline": ("image_newline",),
}


def part_config(config: Config, key: str, model_type: str, absent: Config | None = None) -> dict[str, Any]:
    """A nested configuration; `absent` is used where the outer one lacks it."""
    inner = config.get(key)
    if inner is None:
        return {"model_type": model_type, **(absent or {})}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{config['model_type']}: {key} must be an object, got {type(inner).__name__}")
    return {"model_type": model_type, **inner}


def typed_config(config: Config, key: str, model_type: str) -> dict[str, Any]:
    """A nested configuration as one of this type, whatever type it names."""
    return {**part_config(config, key, model_type), "model_type": model_type}


def text_config(
    config: Config, model_type: str, *, absent: Config | None = None, ties: bool | None = None
) -> dict[str, Any]:
    """The language model's configuration; the outer one decides whether head and embedding are tied.

    Args:
        config: the composite's.
        model_type: of the language model, where the configuration has none.
        absent: the configuration to use where there is none.
        ties: the outer configuration's default; None: the inner one decides.
    """
    inner = part_config(config, "text_config", model_type, absent)
    if ties is None and config.get("tie_word_embeddings") is None:
        return inner
    return {**inner, "tie_word_embeddings": flag(config, "tie_word_embeddings", default=bool(ties))}


def mlp_steps(act: str, *, bias: bool = True) -> Steps:
    """Two matmuls to the LLM's width, with an activation between them."""
    out = ProjectorStep(linear_out=True, bias=bias)
    return (out, ProjectorStep(act=act), out)


def normed_squares(width: int, side: int, *, inner: int | None = None, eps: float = 1e-5) -> Steps:
    """A norm of every patch, squares of patches side by side, an MLP.

    Args:
        width: of a patch; side: of a square.
        inner: width inside the MLP; None: a square's.
        eps: of the norm.
    """
    return (
        ProjectorStep(norm=Norm.LAYER, eps=eps),
        ProjectorStep(merge=side**2),
        ProjectorStep(linear=inner or side**2 * width),
        ProjectorStep(act="gelu"),
        ProjectorStep(linear_out=True),
    )


def merging_tower(vision: Config) -> Part:
    """A tower for images of any size that ends with a merger, such as Qwen's."""
    return Part(config=vision, weights={"": "model.visual."}, items=PAGE)


def two_linears(first: int, second: int) -> dict[str, str]:
    """Prefixes of the matmuls of a projector of steps, as in most composites."""
    name = "model.multi_modal_projector.linear"
    return {f"projector.{first}.": f"{name}_1.", f"projector.{second}.": f"{name}_2."}


_FEATURES = "vision_feature_layer"
_TOKEN_KEYS = {
    VISION: ("image_token_index", "image_token_id"),
    AUDIO: ("audio_token_index", "audio_token_id"),
}


def joined(
    config: Config,
    encoders: Mapping[str, Part],
    llm: Config,
    *,
    weights: Mapping[str, str] = DECODER,
    dropped: tuple[Dropped, ...] = (),
    notes: tuple[str, ...] = (),
) -> Parts:
    """Encoders in front of a language model, at the tokens that the composite's keys name.

    Differs: composites of transformers, other than Gemma's, neither scale nor cap logits as their text models
    do, so these do not.

    Args:
        llm: its configuration; weights: prefixes of its weights.
        encoders, dropped, notes: as in `Parts`.
    """
    ids = {
        name: next((config[key] for key in _TOKEN_KEYS[name] if isinstance(config.get(key), int)), None)
        for name in encoders
    }
    plain, unscaled = _with_plain_logits(str(config["model_type"]), llm)
    return Parts(
        modules={**encoders, LLM: Part(config=plain, weights=weights)},
        token_ids={name: number for name, number in ids.items() if number is not None},
        dropped=dropped,
        notes=(*notes, *unscaled),
    )


def _with_plain_logits(composite: str, llm: Config) -> tuple[Config, tuple[str, ...]]:
    """The language model's configuration without what changes logits, and a note where it had some."""
    key, usual, plain = _LOGITS.get(str(llm["model_type"]), ("", None, None))
    given = llm.get(key, usual)
    if composite in _CHANGES_LOGITS or given == plain:
        return llm, ()
    note = (
        f"logits are as in transformers' composite, which reads no {key}; {key}: {given} of llm changes them"
    )
    return {**llm, key: plain}, (note,)


_LOGITS = {  # model_type -> the key of what changes its logits, its default, the value that changes nothing
    "cohere2": ("logit_scale", 0.0625, 1.0),
    "gemma2": ("final_logit_softcapping", 30.0, None),
    "gemma3_text": ("final_logit_softcapping", None, None),
    "granite": ("logits_scaling", 1.0, 1.0),
    "granitemoehybrid": ("logits_scaling", 1.0, 1.0),
}
_CHANGES_LOGITS = ("paligemma", "gemma3")  # composites that do as their language models


def whole_or(config: Config, key: str, default: int) -> int:
    """A whole number of any sign; an absent or null one is the default.

    Raises:
        ValueError: something else, such as a list of layers.
    """
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{config['model_type']}: {key} must be a whole number, got {value!r}")
    return value


def feature_layers(config: Config, default: FeatureLayers) -> FeatureLayers:
    """The hidden states of `vision_feature_layer`, a whole number or a list of such.

    Raises:
        ValueError: something else.
    """
    listed = config.get(_FEATURES)
    if not isinstance(listed, list | tuple):
        return default if listed is None else whole_or(config, _FEATURES, 0)
    if not listed or any(type(each) is not int for each in listed):
        raise ValueError(
            f"{config['model_type']}: {_FEATURES} must be a whole number, or a list of some, got "
            f"{listed!r:.60}"
        )
    return tuple(listed) if len(listed) > 1 else int(listed[0])


def unread_blocks(vision: Config, feature_layer: FeatureLayers, names: str) -> tuple[Dropped, ...]:
    """Blocks after the last hidden state that the projector reads, as dropped weights."""
    num = count(vision, "num_hidden_layers", 12)
    num_kept = max(states_read(feature_layer, num + 1))
    what = f"block behind hidden state {feature_layer}, which nothing reads"
    return tuple(Dropped(weights=f"{names}.{index}.", what=what) for index in range(num_kept, num))


def check_width(
    config: Config, tower: Config, key: str, llm: Config, usual: int, *, where: str = "vision_config"
) -> None:
    """Raise ValueError unless a tower emits the LLM's width, whose default is `usual`."""
    width, given = whole(llm, "hidden_size", usual), whole(tower, key, 3584)
    if width != given:
        raise ValueError(
            f"{config['model_type']}: {where}.{key} must be the LLM's hidden_size {width}, got {given}; "
            f"nearest: {width}"
        )


DROPS_FIRST, KEEPS_ALL = "default", "full"
_SELECTED = "vision_feature_select_strategy"
_WITH_CLASS_TOKEN = ("clip_vision_model", "dinov2", "internvl_vision")


def check_selected(config: Config, tower: Config, absent: str) -> None:
    """Raise ValueError unless an encoder's class token, and nothing else, is dropped at its output.

    Args:
        config: of the composite; tower: of the encoder.
        absent: the composite's default.
    """
    kind = str(tower["model_type"])
    has_class = kind in _WITH_CLASS_TOKEN
    selected, expected = text(config, _SELECTED, absent), DROPS_FIRST if has_class else KEEPS_ALL
    if selected != expected:
        why = "its class token would reach the LLM" if has_class else "its first patch would be dropped"
        raise ValueError(
            f"{config['model_type']}: {_SELECTED} must be {expected!r} behind {kind}, got {selected!r}: {why}"
        )
