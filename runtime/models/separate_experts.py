"""Experts that checkpoints store one by one, where a layer here has all of them in one tensor."""

from dataclasses import dataclass

from runtime.models.mixture import EXPERTS

MIXTURE = "mlp"  # usual name of a layer's router and experts


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """Names in a checkpoint.

    Args:
        own: name of a layer's router and experts here.
        mixture: of these.
        gate, up, down: of the products of one expert.
        moved: (part of a name here, that in the checkpoint) of another tensor beside them.
    """

    own: str = MIXTURE
    mixture: str = MIXTURE
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    moved: tuple[str, str] = ("", "")

    def renamed(self, name: str) -> str:
        """Name in the checkpoint of a tensor that is not split."""
        here, there = self.moved
        moved = name.replace(here, there) if here else name
        return moved.replace(f".{self.own}.", f".{self.mixture}.")

    def pieces(self, name: str, num: int) -> tuple[tuple[str, ...], ...]:
        """[experts, parts] names of the tensors that make up a tensor of `num` experts; empty for others.

        Parts of an expert are stacked as rows.
        """
        start, _, product = name.partition(f".{self.own}.{EXPERTS}.")
        parts = {
            "gate_up_proj": (self.gate, self.up),
            "up_proj": (self.up,),
            "down_proj": (self.down,),
        }.get(product, ())
        if not parts:
            return ()
        prefix = f"{start}.{self.mixture}.{EXPERTS}"
        return tuple(tuple(f"{prefix}.{index}.{part}.weight" for part in parts) for index in range(num))
