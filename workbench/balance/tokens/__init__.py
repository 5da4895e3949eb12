"""Assignment of tokens to context-parallel ranks: pure functions of plain numbers."""
