"""The last layer of an encoder: final norm, token reduction and projection to the LLM's width."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime.models.adapter import Context, StageLayer
from runtime.models.cut_kind import CutKind

# Shape suffixes: T = packed tokens, D = hidden width.


class MLPProjector(nn.Module):
    """Linear, GELU, linear: LLaVA 1.5's projector, under its parameter names."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width_in, width_out)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(width_out, width_out)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.linear_2(self.act(self.linear_1(x_TD)))
        return y_TD


class LinearProjector(nn.Module):
    """One linear map."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.linear(x_TD)
        return y_TD


PROJECTORS: Mapping[str, type[nn.Module]] = {"linear": LinearProjector, "mlp": MLPProjector}


class ProjectorLayer(StageLayer):
    """Layer N+1 of an encoder.

    An item's tokens shrink from `tokens_in` to `tokens_out` before the projection: the class
    token, if the encoder has one, is dropped (it stands first); then, where tokens_out divides
    what is left, each run of consecutive tokens is averaged.

    Args:
        norm: the encoder's final norm, or None where its features are taken without one.
        norm_name: its name in a checkpoint.
        has_class_token: whether each item starts with one.
    """

    cuts = (("projector.linear_1", CutKind.COLUMN), ("projector.linear_2", CutKind.ROW))

    def __init__(
        self,
        kind: str | None,
        widths: tuple[int, int],
        std: float,
        norm: nn.Module | None = None,
        norm_name: str = "",
        *,
        has_class_token: bool = False,
    ) -> None:
        super().__init__({"norm": norm_name, "projector": "projector"}, std)
        if kind is None or kind not in PROJECTORS:
            raise ValueError(f"projector must be one of {', '.join(PROJECTORS)}, got {kind!r}")
        self.norm = norm
        self.projector = PROJECTORS[kind](*widths)
        self.has_class_token = has_class_token

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "a projector is given its input"
        if self.norm is not None:
            hidden_TD = self.norm(hidden_TD)
        y_TD: Tensor = self.projector(self._reduce_shared(hidden_TD, context))
        return y_TD

    def _reduce_shared(self, x_TD: Tensor, context: Context) -> Tensor:
        """Of the tokens that this rank holds."""
        pooling = context.data.pooling
        if pooling is None:
            return self._reduce(x_TD, context)
        return pooling.own(self._reduce(pooling.whole(x_TD), context))

    def _reduce(self, x_TD: Tensor, context: Context) -> Tensor:
        data = context.data
        if data.tokens_in == data.tokens_out:
            if self.has_class_token:
                raise ValueError(f"item {data.items[0]}: tokens_out must leave out the class token")
            return x_TD
        first = 1 if self.has_class_token else 0
        reduced = []
        sizes = zip(x_TD.split(list(data.tokens_in)), data.items, data.tokens_out, strict=True)
        for item_TD, item, tokens_out in sizes:
            kept_TD = item_TD[first:]
            if len(kept_TD) % tokens_out:
                raise ValueError(
                    f"item {tuple(item)}: {len(kept_TD)} tokens do not shrink evenly to {tokens_out}"
                )
            reduced.append(kept_TD if len(kept_TD) == tokens_out else _average(kept_TD, tokens_out))
        return torch.cat(reduced)


class PooledProjectorLayer(ProjectorLayer):
    """One where two tokens become one before the norm, as Qwen2-Audio's do."""

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "a projector is given its input"
        assert self.norm is not None, "it stands between the two"
        data = context.data
        for item, tokens_in, tokens_out in zip(data.items, data.tokens_in, data.tokens_out, strict=True):
            if tokens_in != 2 * tokens_out:
                raise ValueError(
                    f"item {tuple(item)}: two tokens become one, want {tokens_in / 2:g} behind the encoder, "
                    f"got {tokens_out}"
                )
        y_TD: Tensor = self.projector(self.norm(self._reduce_shared(hidden_TD, context)))
        return y_TD


def _average(x_TD: Tensor, num_tokens: int) -> Tensor:
    """[num_tokens, D]: means of equal runs of consecutive tokens."""
    return x_TD.unflatten(0, (num_tokens, -1)).mean(dim=1)
