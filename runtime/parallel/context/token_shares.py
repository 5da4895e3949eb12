"""The tokens of a packed microbatch on each member of a context-parallel group, and their mask."""

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

    A member without tokens has one token of padding, which sees nothing and is seen by nothing, so that every
    member runs the same layers and the same collectives.

    Args:
        mask: of the whole packed microbatch, T tokens.
        owned: per member, in the order of the process group: ascending positions in [0, T).
        member: this process's index in the group.

    Raises:
        ValueError: the members do not have every token exactly once, or `member` is out of range.
    """

    mask: Bitfield
    owned: tuple[Places, ...]
    member: int = 0

    def __post_init__(self) -> None:
        all_tokens = np.sort(np.concatenate(self.owned)) if self.owned else np.zeros(0, np.int64)
        if not np.array_equal(all_tokens, np.arange(len(self.mask))):
            raise ValueError(
                f"token shares must hold every one of the {len(self.mask)} tokens exactly once, "
                f"got {[len(places) for places in self.owned]} tokens, {len(np.unique(all_tokens))} different"
            )
        if not 0 <= self.member < len(self.owned):
            raise ValueError(f"member must be 0..{len(self.owned) - 1}, got {self.member}")

    @property
    def num_members(self) -> int:
        return len(self.owned)

    @cached_property
    def held(self) -> tuple[Places, ...]:
        """[members] positions of each one's tokens; T stands for padding."""
        nothing = np.array([len(self.mask)])
        return tuple(places if len(places) else nothing for places in self.owned)

    @cached_property
    def num_held(self) -> tuple[int, ...]:
        return tuple(len(places) for places in self.held)

    @property
    def most_held(self) -> int:
        return max(self.num_held)

    def own_of(self, whole_T: Tensor, pad: float) -> Tensor:
        """This member's part of a tensor over all tokens, with `pad` at padding."""
        filler = whole_T.new_full((1, *whole_T.shape[1:]), pad)
        index = torch.from_numpy(self.own).to(whole_T.device)
        return torch.cat([whole_T, filler]).index_select(0, index)

    @property
    def own(self) -> Places:
        """Positions of this member's tokens."""
        return self.held[self.member]

    def padded(self) -> Places:
        """Positions of all members' tokens, by member, each padded to the most."""
        padded = np.full((self.num_members, self.most_held), len(self.mask))
        for row, member_tokens in zip(padded, self.held, strict=True):
            row[: len(member_tokens)] = member_tokens
        return padded.reshape(-1)

    def fields(self, places: Places) -> Bitfield:
        """The mask's fields of the tokens at these positions; T stands for padding."""
        return self._with_padding.take(places)

    @cached_property
    def _with_padding(self) -> Bitfield:
        extra = dict(padding(1).arrays())
        arrays = {name: np.concatenate([array, extra[name]]) for name, array in self.mask.arrays()}
        return Bitfield(**arrays)


def rows_of(whole_TD: Tensor, index: Tensor) -> Tensor:
    """The rows at these indices; zeros where the index is -1."""
    rows = whole_TD.index_select(0, index.clamp(min=0))
    return rows.masked_fill((index < 0)[:, None], 0)
