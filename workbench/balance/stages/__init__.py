"""Partition of layers into stages: pure functions of plain numbers."""
