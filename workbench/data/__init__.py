"""Training data: samples described by their sizes."""
