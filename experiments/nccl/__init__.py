"""Emulates NCCL's behaviour on gloo, to test without GPUs what a distributed run meets on them."""
