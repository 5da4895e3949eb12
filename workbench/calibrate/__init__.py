"""From measurement rows to a profile."""
