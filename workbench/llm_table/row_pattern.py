"""Blocks of one mixer each, by a row's pattern of letters, as in Nemotron-H."""

from workbench.llm_table.llm_row import LlmRow
from workbench.model.experts import Experts, expert_operators
from workbench.model.families.nemotron_h import ATTENTION, EXPERTS, MAMBA, OF_LETTER
from workbench.model.layer import Operator
from workbench.model.mamba import Mamba, mamba_operators
from workbench.model.transformer import Block, attention_operators, mixer_operators, mlp_operators


def pattern_blocks(row: LlmRow, block: Block, experts: Experts | None) -> list[tuple[Operator, ...]]:
    """[blocks] operators of each block: a Mamba-2 mixer, attention, an MLP or experts.

    Args:
        block: with the sizes of attention and MLP.
        experts: where the pattern has some.
    """
    made = {letter: _operators(row, letter, block, experts) for letter in dict.fromkeys(row.pattern)}
    return [made[letter] for letter in row.pattern]


def _operators(row: LlmRow, letter: str, block: Block, experts: Experts | None) -> tuple[Operator, ...]:
    width, kind = row.hidden, OF_LETTER[letter]
    if kind == MAMBA:
        return mixer_operators("attention", width, mamba_operators(width, _mamba(row)))
    if kind == ATTENTION:
        return mixer_operators("attention", width, attention_operators(width, block.heads))
    if kind == EXPERTS:
        assert experts is not None, "a pattern with experts has their sizes"
        return mixer_operators("mlp", width, expert_operators(width, experts))
    return mixer_operators("mlp", width, mlp_operators("mlp", width, block.mlp))


def _mamba(row: LlmRow) -> Mamba:
    return Mamba(
        num=row.mamba_heads,
        groups=row.mamba_groups,
        state=row.mamba_state,
        dim=row.mamba_head_dim,
        kernel=row.conv_kernel,
        chunk=row.mamba_chunk,
    )
