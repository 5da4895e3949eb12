"""How many tokens an encoder makes of its native input, read off its own layers."""

from workbench.graph.layer import Layer, Lookup, Pointwise
from workbench.graph.model_graph import Module


def native_tokens(module: Module) -> tuple[int, int] | None:
    """(tokens inside the encoder, tokens for the LLM) of one item of the size it was built for.

    The table of positions says how many tokens enter; a class token stays inside; the projector
    says how many become one. None for an encoder without such a table: it takes any size.
    """
    first, last = module.layers[0], module.layers[-1]
    tables = [op for op in first.operators if isinstance(op, Lookup) and op.name == "position_embedding"]
    if not tables:
        return None
    tokens_in = tables[0].num_rows
    return tokens_in, (tokens_in - _class_tokens(first)) // merged_tokens(last)


def merged_tokens(projector: Layer) -> int:
    """Neighbouring tokens that become one in a projector layer."""
    for operator in projector.operators:
        if isinstance(operator, Pointwise) and operator.name == "pool":
            return int(operator.tokens_scale)
    return 1


def _class_tokens(embed: Layer) -> int:
    return sum(operator.name == "class_token" for operator in embed.operators)
