"""Everything that one GPU can show, measured by one command that goes on where an earlier call stopped."""
