"""Attention masks: one specification per token, builders for patterns, and tiles for kernels and plans."""
