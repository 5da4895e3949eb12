"""The plan, and the one lowering from it to what machines need."""
