"""Loops in the assembly of a compiled kernel: the instructions that a warp repeats.

The input is the output of `nvdisasm -c`: labels on lines of their own, one instruction a line.
"""

import re
from dataclasses import dataclass

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")
MATRIX = re.compile(r"\b[HQI]G?MMA\b")
COPIES_LEFT = re.compile(r"(?<!WARPGROUP\.)\bDEPBAR\.LE SB\d+, 0x([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions of one pass through a loop, with no branch inside taken."""

    body: tuple[str, ...]

    @property
    def multiplies(self) -> bool:
        """Whether the loop contains a matrix product."""
        return any(MATRIX.search(line) for line in self.body)

    @property
    def leaves(self) -> bool:
        """Whether the kernel exits inside: then the branch returns from a rare path placed behind the end."""
        return "EXIT" in self.body

    @property
    def groups_in_flight(self) -> int | None:
        """Groups of asynchronous copies that every wait of the loop leaves in flight; None without a wait."""
        left = [int(match[1], 16) for line in self.body if (match := COPIES_LEFT.search(line))]
        return min(left, default=None)

    @property
    def engine_copies(self) -> int:
        """Number of tile copies by the copy engine (TMA)."""
        return sum("UTMALDG" in line for line in self.body)


def loops(text: str) -> list[Loop]:
    """Find every loop, from the target of a backward branch to the branch, ordered by end."""
    lines: list[str] = []
    start: dict[str, int] = {}
    complete: list[Loop] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            start[label[1]] = len(lines)
        if instruction := INSTRUCTION.match(line):
            lines.append(instruction[1])
            branch = BRANCH.search(instruction[1])
            if branch and branch[1] in start:
                loop = Loop(tuple(lines[start[branch[1]] :]))
                complete += [] if loop.leaves else [loop]
    return complete


def tile_loops(text: str) -> tuple[Loop, Loop] | None:
    """The loops over FULL and PARTIAL tiles, or None for a kernel that multiplies no tiles.

    Raises:
        ValueError: another number of loops with products than two.
    """
    with_products = [loop for loop in loops(text) if loop.multiplies]
    if not with_products:
        return None
    if len(with_products) != 2:
        raise ValueError(f"loops with products: want 2 (full and partial tiles), got {len(with_products)}")
    full, partial = sorted(with_products, key=lambda loop: len(loop.body))
    return full, partial
