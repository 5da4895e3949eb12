"""Figures of a job's machines that the data sheet of their device does not reach: mostly another unit."""

from collections.abc import Iterator

from workbench.calibrate.device_sheet import DeviceSheet, shipped_sheet, shipped_sheets
from workbench.cost.device_names import shipped_device
from workbench.cost.hardware import Link, Node
from workbench.job.job import Job
from workbench.units import GB, GIB

MORE_MEMORY = 1.25  # of the sheet's: binary and decimal prefixes, and variants of a device, are within
MORE_PER_S = 2.0  # of the sheet's link or card: a generation of networks is twice as fast as the one before


def beyond_sheet(job: Job) -> Iterator[str]:
    """A line for every figure that is far beyond its device's data sheet; devices without one are left out.

    Complexity: O(nodes).
    """
    cluster, said = job.cluster, set[str]()
    for node in dict.fromkeys(cluster.nodes):
        sheet = _sheet_of(node)
        if sheet is None:
            continue
        for line in _lines(node, node.link or cluster.intra, node.card or cluster.inter, sheet):
            if line not in said:
                said.add(line)
                yield f"job {job.name!r}: {line}"


def _sheet_of(node: Node) -> DeviceSheet | None:
    try:
        return shipped_sheet(shipped_device(node.device, shipped_sheets()))
    except ValueError:
        return None


def _lines(node: Node, intra: Link, inter: Link, sheet: DeviceSheet) -> Iterator[str]:
    memory_bytes, of_sheet = node.memory_bytes, f"{sheet.device} has {{:.4g}} by its data sheet"
    if memory_bytes > MORE_MEMORY * sheet.memory_bytes:
        has = of_sheet.format(round(sheet.memory_bytes / GIB, 1))
        yield f"memory_gib is {memory_bytes / GIB:g}, but {has}"
    port_bytes_per_s = sheet.link_bytes_per_s or sheet.pcie_bytes_per_s
    ports = (("intra", intra, port_bytes_per_s), ("inter", inter, sheet.card_bytes_per_s))
    for name, link, most_bytes_per_s in ports if intra != inter else ports[:1]:
        if link.bytes_per_s > MORE_PER_S * most_bytes_per_s:
            has = of_sheet.format(most_bytes_per_s / GB)
            yield (
                f"{name}.gb_per_s is {link.bytes_per_s / GB:g}, but {has}; it counts bytes, not bits, of one "
                "port or card"
            )
