"""The kinds of devices that users name. Imports nothing else: microbenchmarks run with torch alone."""

from enum import StrEnum


class Device(StrEnum):
    """The kind of device that a rank runs on."""

    CPU = "cpu"
    CUDA = "cuda"
