"""Rules between the cells of a row with a pattern of blocks of one mixer."""

from workbench.llm_table.llm_row import Architecture, LlmRow
from workbench.llm_table.refusal import check_divides, refuse, want_together, want_zero
from workbench.model.families import nemotron_h
from workbench.model.families.nemotron_h import letter_of

MAMBA, EXPERTS = (letter_of(kind) for kind in (nemotron_h.MAMBA, nemotron_h.EXPERTS))
SIZES = ("mamba_heads", "mamba_groups", "mamba_state", "mamba_head_dim", "mamba_chunk")
NONE_WITH_IT = ("window", "linear_key_heads", "kv_lora", "lora_rank", "first_dense_layers", "mtp_layers")


def check_pattern(row: LlmRow) -> None:
    """ValueError for unknown letters, for sizes without their letter or the reverse, and contradictions."""
    want_together(row, SIZES, "want it with M in the pattern alone", has=MAMBA in row.pattern)
    if not row.pattern:
        return
    letters = nemotron_h.OF_LETTER
    unknown = next((letter for letter in row.pattern if letter not in letters), None)
    if unknown is not None:
        refuse("pattern", f"want {' or '.join(letters)} for each block", repr(unknown), MAMBA)
    if len(row.pattern) != row.layers:
        refuse("layers", "want as many as the pattern has letters", row.layers, len(row.pattern))
    if row.architecture is not Architecture.LLAMA:
        refuse("pattern", "want it with architecture llama alone", row.architecture, Architecture.LLAMA)
    if (EXPERTS in row.pattern) != (row.experts > 0):
        refuse("experts", "want them with E in the pattern alone", row.experts, 0 if row.experts else 8)
    want_zero(row, NONE_WITH_IT, "with a pattern")
    if MAMBA in row.pattern:
        _check_mamba(row)


def _check_mamba(row: LlmRow) -> None:
    if row.cp > 1:
        refuse("cp", "want 1 with M in the pattern", row.cp, 1)
    check_divides("mamba_heads", row.mamba_heads, "mamba_groups", row.mamba_groups)
    check_divides("mamba_groups", row.mamba_groups, "tp", row.tp)
