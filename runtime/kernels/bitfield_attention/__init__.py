"""Attention under a bitfield mask, skipping empty tiles."""
