"""What a profile says of its device, for people and for machines."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from workbench.cost.profile import Profile
from workbench.report.tables import titled
from workbench.units import GB

_TERA = 1e12


def facts_table(profile: Profile) -> Table:
    """Peaks, memory, links and tables of a device, each with whether it was measured."""
    table = titled(f"profile {profile.name}", ("fact", "value"))
    table.add_row("device", profile.device + (f", after {profile.like}" if profile.like else ""))
    table.add_row("memory", f"{profile.memory_bytes / GB:.4g} GB")
    if profile.peak_bytes_per_s is not None:
        table.add_row("memory bandwidth", f"{profile.peak_bytes_per_s / GB:.4g} GB/s")
    for precision, rate in profile.peak_flop_per_s:
        table.add_row(f"peak {precision}", f"{rate / _TERA:.4g} TFLOP/s")
    for link in profile.links:
        known = "measured" if link.measured else "not measured"
        table.add_row(f"{link.scope} link", f"{link.name}, {link.bytes_per_s / GB:.4g} GB/s, {known}")
    if profile.node_ranks is not None:
        table.add_row("devices joined", str(profile.node_ranks))
    tables = (("matmul", profile.matmul), ("attention", profile.attention), ("pointwise", profile.pointwise))
    for name, found in tables:
        known = "measured" if found.measured else "scaled"
        table.add_row(name, f"{len(found.points)} points, {known}" if found.points else "peak assumed")
    return table


def profile_record(profile: Profile) -> dict[str, Any]:
    """The same as data, SI units."""
    return {
        "profile": profile.name,
        "device": profile.device,
        "like": profile.like,
        "memory_bytes": profile.memory_bytes,
        "memory_bytes_per_s": profile.peak_bytes_per_s,
        "peak_flop_per_s": dict(profile.peak_flop_per_s),
        "links": {link.scope: link.bytes_per_s for link in profile.links},
        "node_ranks": profile.node_ranks,
        "presumed": list(profile.presumed),
        "unmeasured": list(profile.unmeasured),
        "fits": [asdict(fit) for fit in profile.fits],
    }
