"""A mixture of experts in place of a block's MLP."""

from dataclasses import dataclass, replace

from workbench.model.layer import Layer, Matmul, Operator, Parameter, Pointwise
from workbench.model.transformer import Mlp, mlp_operators

EXPERT = "mlp.expert."  # how operators of one of several experts are called
SHARED = "mlp.shared"
JOIN = "mlp.join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`num` MLPs of one shape, `num_chosen` of which a router picks for each token; `shared` runs for all.

    Each works on `capacity` times an equal share of rows: more where rows are padded.
    """

    num: int
    num_chosen: int
    mlp: Mlp
    shared: Mlp | None = None
    capacity: float = 1.0

    def __post_init__(self) -> None:
        if self.num_chosen > self.num:
            raise ValueError(f"a token's experts must be at most {self.num}, got {self.num_chosen}")


def num_experts(layer: Layer) -> int:
    """Experts that a router chooses from; 0 in a layer without."""
    return len({expert_index(each) for each in layer.operators if is_of_expert(each)})


def is_of_expert(part: Operator | Parameter) -> bool:
    """Whether it is of one of several experts: it works on rows that a router chose, on one of several ranks.

    Its name says so: a field would change the hashes of plans that exist.
    """
    return f".{EXPERT}" in f".{part.name}"


def expert_index(operator: Operator) -> int:
    """Which of a layer's experts an operator belongs to."""
    return int(operator.name.removeprefix(EXPERT).partition(".")[0])


def place_in_expert(operator: Operator) -> str:
    """What it is to its expert, equal in all of them: `gate_up`, `down`."""
    return operator.name.removeprefix(EXPERT).partition(".")[2]


def with_experts(block: Layer, experts: Experts) -> Layer:
    """The block with a router and experts where its MLP's operators were.

    Tokens are taken to spread evenly: each expert works on `num_chosen / num` of them. What a
    router does in truth is known only while it runs.
    """
    places = [index for index, each in enumerate(block.operators) if each.name.startswith("mlp.")]
    first, last = places[0], places[-1]
    enter = block.operators[first]
    assert isinstance(enter, Matmul), "an MLP begins with a matmul"
    operators = (
        *block.operators[:first],
        *_expert_operators(enter.in_features, experts),
        *block.operators[last + 1 :],
    )
    return replace(block, operators=operators)


def _expert_operators(width: int, experts: Experts) -> tuple[Operator, ...]:
    share = experts.capacity * experts.num_chosen / experts.num
    router = Matmul(name="mlp.router", in_features=width, out_features=experts.num)
    softmax = Pointwise(name="mlp.router_softmax", width=experts.num, num_passes=2)
    each = [
        replace(operator, tokens_scale=share)
        for index in range(experts.num)
        for operator in mlp_operators(f"{EXPERT}{index}", width, experts.mlp)
        if isinstance(operator, Matmul | Pointwise)
    ]
    joined = Pointwise(name=JOIN, width=width, num_passes=experts.num_chosen + 1)
    shared = () if experts.shared is None else mlp_operators(SHARED, width, experts.shared)
    return (router, softmax, *each, *shared, joined)
