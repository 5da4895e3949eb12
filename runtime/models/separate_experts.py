"""Experts one by one, as checkpoints hold them, where a layer here has all of them in one tensor."""

from dataclasses import dataclass

from runtime.models.mixture import EXPERTS

MIXTURE = "mlp"  # what a layer here calls its router and experts


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """What a checkpoint calls them.

    Args:
        mixture: a layer's router and experts.
        gate, up, down: the products of one expert.
    """

    mixture: str = MIXTURE
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def renamed(self, own: str) -> str:
        """What a tensor is called that is one there, too."""
        return own.replace(f".{MIXTURE}.", f".{self.mixture}.")

    def pieces(self, own: str, num: int) -> tuple[tuple[str, ...], ...]:
        """[experts, parts] what a tensor of so many experts is put together from; empty of any other.

        Parts of an expert stand one above the other.
        """
        start, _, product = own.partition(f".{MIXTURE}.{EXPERTS}.")
        parts = {"gate_up_proj": (self.gate, self.up), "down_proj": (self.down,)}.get(product, ())
        if not parts:
            return ()
        at = f"{start}.{self.mixture}.{EXPERTS}"
        return tuple(tuple(f"{at}.{index}.{part}.weight" for part in parts) for index in range(num))
