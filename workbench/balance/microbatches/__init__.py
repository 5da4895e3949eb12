"""Assignment of samples to microbatches and replicas, and their order: pure functions of plain numbers."""
