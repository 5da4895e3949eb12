"""NCCL's manners, given to gloo: what a distributed run has to bear on GPUs, tried without one."""
