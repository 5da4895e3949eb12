"""Learned sparse attention: the narrow heads that choose, for every query, the keys it attends to."""

from dataclasses import dataclass, fields

INDEXER = ".indexer."  # in the names of its weights, here and in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Scores every key that a query may see; attention behind it reads the keys with the highest.

    A score is the sum over heads h of w_h relu(q_h k), with one key k for all heads. A choice has no
    gradient, so transformers trains none of its weights: they are frozen, in a trained block too.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1.
    Differs: no loss that draws its scores to those of attention, as transformers has none.

    Args:
        width: of the hidden state, which keys and the weights of heads come from.
        query_width: of what queries come from: their latent.
        num_heads: heads of its queries.
        head_dim: width of a head, and of the key.
        is_shared: whether layers behind it read the keys that it chooses, too.
    """

    width: int
    query_width: int
    num_heads: int
    head_dim: int
    is_shared: bool = False

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.type is int):
            if getattr(self, name) < 1:
                raise ValueError(f"indexer: {name} must be >= 1, got {getattr(self, name)}")

    @property
    def products(self) -> tuple[tuple[str, int, int], ...]:
        """Name, width of the input and of the output of its projections."""
        return (
            ("q_proj", self.query_width, self.num_heads * self.head_dim),
            ("k_proj", self.width, self.head_dim),
            ("heads_proj", self.width, self.num_heads),
        )

    def weights(self, attention: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of its weights, in an attention of that name: projections, and a norm of keys."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (leaving, entering) for name, entering, leaving in self.products
        }
        shapes |= {f"k_norm.{name}": (self.head_dim,) for name in ("weight", "bias")}
        return tuple((f"{attention}{INDEXER}{name}", shape) for name, shape in shapes.items())


def is_of_indexer(parameter: str) -> bool:
    """Whether a parameter of this name is an indexer's; by name, as adapters' are recognised."""
    return INDEXER in parameter
