"""Finds the fastest plan that fits."""
