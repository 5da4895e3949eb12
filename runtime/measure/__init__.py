"""Microbenchmarks of a machine: operators, layers, messages, the executor itself."""
