"""Which tokens of a packed microbatch each member of a context-parallel group holds, and their mask."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.masks.bitfield import Bitfield, dense, padding

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
    _windowed: dict[int | None, Bitfield] = field(default_factory=dict, repr=False, compare=False)

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

    def visible(self, queries: Places, keys: Places, window: int | None = None) -> npt.NDArray[np.bool_]:
        """[queries, keys]: which see which, by their places.

        Args:
            queries: T stands for padding.
            keys: likewise.
            window: where given, a query sees only the last `window` positions up to its own.
        """
        mask = self._with_window(window)
        return dense(mask.take(queries), mask.take(keys))

    def _with_window(self, window: int | None) -> Bitfield:
        """The mask with a token of padding behind it."""
        if window not in self._windowed:
            arrays = dict(self.mask.arrays())
            if window is not None:
                lowest = self.mask.position - (window - 1)
                arrays["first"] = np.maximum(self.mask.first, lowest)
                arrays["always"] = np.zeros_like(self.mask.always)
            extra = dict(padding(1).arrays())
            joined = {name: np.concatenate([array, extra[name]]) for name, array in arrays.items()}
            self._windowed[window] = Bitfield(**joined)
        return self._windowed[window]
