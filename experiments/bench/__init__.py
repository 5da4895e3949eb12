"""Speed of our own algorithms, as ratios measured in one run."""
