"""The data: samples described by their sizes."""
