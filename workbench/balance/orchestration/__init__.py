"""Ranks and degrees for every module: pure functions of plain numbers."""
