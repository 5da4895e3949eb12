"""Triton kernels, each beside a plain PyTorch reference; they know nothing of plans and models."""
