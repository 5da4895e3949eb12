"""What a cell says is computed again in the backward."""

from difflib import get_close_matches

from workbench.llm_table.llm_row import Recomputed
from workbench.model.block_modules import BlockModule

JOIN = "+"
SPELLED = {"layernorm": "norm", "layer_norm": "norm"}
WHOLE = {"none": Recomputed.NONE, "selective": Recomputed.SELECTIVE, "full": Recomputed.FULL}


def read_modules(text: str) -> tuple[Recomputed, tuple[BlockModule, ...]]:
    """What a cell says, and its modules in the order of `BlockModule`; ValueError for an unknown word."""
    words = [SPELLED.get(word.strip().lower(), word.strip().lower()) for word in text.split(JOIN)]
    if len(words) == 1 and words[0] in WHOLE:
        return WHOLE[words[0]], ()
    known = [str(module) for module in BlockModule]
    for word in words:
        if word not in known:
            near = get_close_matches(word, (*WHOLE, *known), n=1, cutoff=0.0)
            raise ValueError(
                f"recompute: want one of {', '.join((*WHOLE, *known))}, or modules with + between, "
                f"got {text!r}; nearest: {near[0]}"
            )
    return Recomputed.MODULES, tuple(module for module in BlockModule if module in words)
