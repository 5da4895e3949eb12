"""Training on nodes that come and go, on a virtual clock."""
