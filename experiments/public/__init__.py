"""The workbench against published rows of other people's training runs."""
