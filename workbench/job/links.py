"""Links and network cards of a job file's nodes."""

from workbench.cost.hardware import Link
from workbench.cost.profile import Profile
from workbench.job.schema import LinkSpec
from workbench.units import GB, US_PER_S


def link_of(scope: str, spec: LinkSpec | None, profile: Profile | None) -> Link:
    """The "intra" or "inter" link of a job file, or else the profile's."""
    if spec is not None:
        if scope == "intra" and spec.cards is not None:
            raise ValueError(f"intra: cards stand between nodes, want them in 'inter', got {spec.cards} here")
        return Link(name=scope, bytes_per_s=spec.gb_per_s * GB, latency_s=spec.latency_us / US_PER_S)
    assert profile is not None
    return profile.machine_link(scope).link


def num_cards(spec: LinkSpec | None, profile: Profile | None, num_ranks: int) -> int:
    """Network cards of a node: the job file's, 1 where it gives the link alone, or else the profile's."""
    if spec is not None:
        return spec.cards or 1
    assert profile is not None
    per_node = profile.machine_link("inter").per_node
    return num_ranks if per_node is None else per_node
