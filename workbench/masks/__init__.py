"""Attention masks: one specification per token, patterns that build it, tiles that kernels and plans use."""
