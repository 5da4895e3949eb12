"""Memory: what layers, stages and ranks hold, byte by byte, over a step."""
