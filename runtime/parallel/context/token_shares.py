"""Which tokens of a packed microbatch each member of a context-parallel group holds, and their mask."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.masks.bitfield import Bitfield, padding

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenShares:
    """The tokens of every member, and the mask of all of them.

    A member without tokens holds one token of padding, which sees nothing and is seen by nothing,
    so that every member runs the same layers and the same collectives.

    Args:
        mask: of the whole packed microbatch, T tokens.
        owned: by member, in the order of the process group: ascending places in [0, T).
        member: this process's place in the group.

    Raises:
        ValueError: the members do not hold every token exactly once, or `member` is none of them.
    """

    mask: Bitfield
    owned: tuple[Places, ...]
    member: int = 0

    def __post_init__(self) -> None:
        held = np.sort(np.concatenate(self.owned)) if self.owned else np.zeros(0, np.int64)
        if not np.array_equal(held, np.arange(len(self.mask))):
            raise ValueError(
                f"token shares must hold every one of the {len(self.mask)} tokens exactly once, "
                f"got {[len(places) for places in self.owned]} tokens, {len(np.unique(held))} different"
            )
        if not 0 <= self.member < len(self.owned):
            raise ValueError(f"member must be 0..{len(self.owned) - 1}, got {self.member}")

    @property
    def num_members(self) -> int:
        return len(self.owned)

    @cached_property
    def held(self) -> tuple[Places, ...]:
        """By member, the places of its tokens; T stands for padding."""
        nothing = np.array([len(self.mask)])
        return tuple(places if len(places) else nothing for places in self.owned)

    @cached_property
    def num_held(self) -> tuple[int, ...]:
        return tuple(len(places) for places in self.held)

    @property
    def most_held(self) -> int:
        return max(self.num_held)

    def own_of(self, whole_T: Tensor, pad: float) -> Tensor:
        """This member's part of a tensor over all tokens, `pad` in the place of padding."""
        filler = whole_T.new_full((1, *whole_T.shape[1:]), pad)
        index = torch.from_numpy(self.own).to(whole_T.device)
        return torch.cat([whole_T, filler]).index_select(0, index)

    @property
    def own(self) -> Places:
        """This member's places."""
        return self.held[self.member]

    def padded(self) -> Places:
        """Everybody's places, member after member, each padded to the most."""
        places = np.full((self.num_members, self.most_held), len(self.mask))
        for row, held in zip(places, self.held, strict=True):
            row[: len(held)] = held
        return places.reshape(-1)

    def fields(self, places: Places) -> Bitfield:
        """The mask's fields of the tokens at these places; T stands for padding."""
        return self._with_padding.take(places)

    @cached_property
    def _with_padding(self) -> Bitfield:
        extra = dict(padding(1).arrays())
        arrays = {name: np.concatenate([array, extra[name]]) for name, array in self.mask.arrays()}
        return Bitfield(**arrays)


def rows_of(whole_TD: Tensor, index: Tensor) -> Tensor:
    """The rows at these places; zeros where the place is -1."""
    found = whole_TD.index_select(0, index.clamp(min=0))
    return found.masked_fill((index < 0)[:, None], 0)
