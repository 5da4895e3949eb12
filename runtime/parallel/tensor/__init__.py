"""Tensor and sequence parallelism: ranks that cut the weights of a stage."""
