"""How many tokens a module makes of an item of its native size, read off itself."""

import json

from workbench.model.dit import DIT, dit_tokens
from workbench.model.layer import Attention, Layer, Lookup, Pointwise
from workbench.model.mllama import VISION_MODEL, tower_of
from workbench.model.model_graph import Module


def native_tokens(module: Module) -> tuple[int, int] | None:
    """(tokens inside the module, tokens in the LLM) of one item of the size it was built for.

    The table of positions says how many tokens enter; a class token stays inside; the projector
    says how many become one. A generator's attention says how many positions its latent and its
    prompt have. None for an encoder without such a table: it takes any size.
    """
    if module.source is not None and module.source.architecture == DIT:
        return dit_tokens({"model_type": DIT, **json.loads(module.source.config)})
    if module.source is not None and module.source.architecture == VISION_MODEL:
        return tower_of({"model_type": VISION_MODEL, **json.loads(module.source.config)}).tokens, 1
    if module.has_loss:
        return _latent_tokens(module)
    first, last = module.layers[0], module.layers[-1]
    tables = [op for op in first.operators if isinstance(op, Lookup) and op.name == "position_embedding"]
    if not tables:
        return None
    tokens_in = tables[0].num_rows
    return tokens_in, (tokens_in - _class_tokens(first)) // merged_tokens(last)


def _latent_tokens(module: Module) -> tuple[int, int] | None:
    """Keys of a UNet's first attention to itself, and of its first to the prompt."""
    keys: dict[str, int] = {}
    for operator in (operator for layer in module.layers for operator in layer.operators):
        if isinstance(operator, Attention) and operator.num_keys is not None:
            keys.setdefault(operator.name, operator.num_keys)
    found = keys.get("self.attention"), keys.get("cross.attention")
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def merged_tokens(projector: Layer) -> int:
    """Neighbouring tokens that become one in a projector layer."""
    for operator in projector.operators:
        if isinstance(operator, Pointwise) and operator.name == "pool":
            return int(operator.tokens_scale)
    return 1


def _class_tokens(embed: Layer) -> int:
    return sum(operator.name == "class_token" for operator in embed.operators)
