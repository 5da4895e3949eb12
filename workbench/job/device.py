"""What ranks work on, by the names that users type. Loads nothing: microbenchmarks run beside torch alone."""

from enum import StrEnum


class Device(StrEnum):
    """What a rank works on."""

    CPU = "cpu"
    CUDA = "cuda"
