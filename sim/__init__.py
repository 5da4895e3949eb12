"""Discrete-event execution of a lowered plan."""
