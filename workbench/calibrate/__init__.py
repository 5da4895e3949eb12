"""Calibration: from measured rows to a profile."""
