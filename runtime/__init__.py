"""Real execution of a lowered plan with torch.distributed."""
