"""Algorithms as printed or as first written, kept to be compared with: oracles of benches and tests."""
