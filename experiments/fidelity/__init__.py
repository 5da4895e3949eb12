"""The workbench against itself: its predictions compared with runs of its own runtime."""
