"""Attention under a mask on one GPU, and under token distributions on several."""
