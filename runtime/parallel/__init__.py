"""Ranks that share one stage: its weights, its tokens, its experts, its optimizer state."""
