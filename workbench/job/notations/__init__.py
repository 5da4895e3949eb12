"""Converts a job's layouts to and from the notations of other systems."""
