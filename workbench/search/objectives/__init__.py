"""Objectives of a search: steps over varying data, goodput under failures, dollars; and Pareto fronts."""
