"""Who carries tensors between modules."""

from enum import StrEnum


class Boundaries(StrEnum):
    """Who carries tensors between modules on ranks of their own."""

    DIRECT = "direct"  # the producer's ranks send to the consumer's
    BROKERS = "brokers"  # one rank of gcd(replicas, replicas) many of the downstream module hands them on
