"""Composite configurations of transformers, taken apart into the modules of a job."""
