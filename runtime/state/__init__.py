"""Weights and optimizer state: from seeds and folders, into checkpoints and back."""
