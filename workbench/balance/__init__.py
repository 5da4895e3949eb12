"""Balancing algorithms: pure functions of plain numbers."""
