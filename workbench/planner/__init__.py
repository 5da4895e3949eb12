"""What strategies share: layouts, stage counts, bounds, and a model of a step without its plan."""
