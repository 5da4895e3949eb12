"""Emulates NCCL's behaviour on gloo, to test distributed runs for it without GPUs."""
