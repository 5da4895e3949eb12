"""Algorithms as printed or as first written, kept for comparison: oracles of benchmarks and tests."""
