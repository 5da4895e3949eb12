"""Low-rank adapters beside frozen matrix products: their size, and which products have them."""

from dataclasses import dataclass
from enum import StrEnum

DOWN, UP = "lora_A", "lora_B"  # the two products of an adapter, by PEFT's names of them
SUM = "lora_sum"  # of their scaled result and that of the product beside them

# Names of transformers' linear layers for the products of a block whose adapters the runtime trains.
ADAPTED_BY_NAME = {
    "q_proj": ("q_proj", "q"),
    "k_proj": ("k_proj", "k"),
    "v_proj": ("v_proj", "v"),
    "qkv_proj": ("qkv_proj", "qkv"),
    "o_proj": ("o_proj", "out_proj", "proj", "dense", "projection_layer"),
    "mlp.gate": ("gate_proj",),
    "mlp.up": ("up_proj", "fc1", "linear_fc1", "c_fc"),
    "mlp.gate_up": ("gate_up_proj",),
    "mlp.down": ("down_proj", "fc2", "linear_fc2", "c_proj"),
}


# Products of a block's attention, or of what mixes tokens in its place, by their names behind any prefix.
ENTERING = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "q", "k", "v", "linear1"),
        *("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"),  # of latents
        *("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    }
)
LEAVING = frozenset({"o_proj", "out_proj", "o"})
MLP = "mlp"  # begins the names of an MLP's
APART = ("conv", "deepstack", "mlp.router", "mlp.expert")  # begin those without adapters


class Adapted(StrEnum):
    """Products of a block that have adapters: ALL, those of ATTENTION or of the MLP, or QKV."""

    ALL = "all"
    ATTENTION = "attention"
    QKV = "qkv"
    MLP = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter of a product: y = x W^T + (alpha / rank) (x A^T) B^T, of A [rank, in] and B [out, rank].

    W is frozen; A and B are trained. Source: Hu et al. 2021, "LoRA", section 4.1.

    Args:
        rank: rows of A and columns of B.
        alpha: scale of what it adds, times the rank.
    """

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora: rank must be >= 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"lora: alpha must be > 0, got {self.alpha}")

    @property
    def scale(self) -> float:
        """The factor of what the adapter adds."""
        return self.alpha / self.rank


def is_adapted(product: str, modules: Adapted) -> bool:
    """Whether these modules of a block include the product of this name."""
    own = product.rpartition(".")[2]
    included = {
        Adapted.ALL: True,
        Adapted.ATTENTION: own in ENTERING | LEAVING,
        Adapted.QKV: own in ENTERING,
        Adapted.MLP: product.startswith(MLP),
    }[modules]
    return included and not product.startswith(APART)


def is_of_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is an adapter's; by name, as experts' parameters are recognised."""
    return f".{DOWN}." in parameter or f".{UP}." in parameter
