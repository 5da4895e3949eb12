"""One file per system: each composes balance and schedule into a plan."""
