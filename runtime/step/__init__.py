"""One step of one rank: walk its program, pass tensors on, add gradients up, update weights."""
