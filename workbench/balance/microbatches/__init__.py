"""Samples into microbatches and replicas, and their order: pure functions of plain numbers."""
