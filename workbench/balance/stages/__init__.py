"""Layers into stages: pure functions of plain numbers."""
