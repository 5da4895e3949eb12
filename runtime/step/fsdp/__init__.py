"""Sharded parameters (FSDP, HSDP): gathered for use, gradients reduced and scattered."""
