"""The workbench against itself: what it predicts beside what its runtime does."""
