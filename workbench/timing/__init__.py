"""Seconds of every action, from a plan and a cost model, and whether the plan can be run."""
