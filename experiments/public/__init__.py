"""The workbench against published training runs."""
