"""Long runs: whether memory, descriptors and threads of every process stay as they are."""
