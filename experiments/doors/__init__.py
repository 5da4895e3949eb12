"""Doors of the workbench, each held against what is behind it: launchers, recordings, formats."""
