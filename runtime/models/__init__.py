"""One small adapter per transformers architecture: embed, layers, head."""
