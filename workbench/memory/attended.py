"""Keys and values that attentions read, where these have other rows than their queries."""

from workbench.memory.setting import Setting
from workbench.model.layer import Attention, Layer, TokenCount


def keys_per_query(layer: Layer, operator: Attention, setting: Setting) -> float:
    """Return the rows of keys and values that one rank has for each of its queries.

    Images that a text reads, and a prompt of fixed length, have rows of their own: those of the product that
    makes values, in a UNet `<name>.v`.
    """
    num_queries = setting.tokens(operator)
    if operator.keys is TokenCount.CONTEXT and num_queries:
        return setting.work.tokens(TokenCount.CONTEXT) / num_queries
    if operator.num_keys is None:
        return 1.0
    values = f"{operator.name.removesuffix('attention')}v"
    made = (setting.tokens(each) for each in layer.operators if each.name == values)
    return next(made, num_queries) / num_queries
