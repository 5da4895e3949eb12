"""One step of training on a virtual clock."""
