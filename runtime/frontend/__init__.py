"""Users' own multimodal models: written down in torch, run under a plan."""
