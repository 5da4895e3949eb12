"""Long runs that check whether memory, descriptors and threads of every process stay constant."""
