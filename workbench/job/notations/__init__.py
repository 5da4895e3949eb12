"""Layouts in the notations of other systems, to and from a job's own."""
