"""A mixture of experts in place of a block's MLP."""

from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.model.layer import Layer, Matmul, Operator, Parameter, Pointwise
from workbench.model.transformer import Mlp, mlp_operators

EXPERT = "mlp.expert."  # prefix of the operators of experts
SHARED = "mlp.shared"
SHARED_GATE, SHARED_GATED = f"{SHARED}_gate", f"{SHARED}_gated"
JOIN = "mlp.join"
ROUTER = "mlp.router"
SOFTMAX, SIGMOID = "mlp.router_softmax", "mlp.router_sigmoid"  # of a router's scores
WIDE_SOFTMAX = "mlp.router_wide_softmax"  # of the scores of a router whose product is in float32, too
CLAMPED = (
    "clamped_swiglu"  # activation of gpt-oss: (up + 1) x gate x sigmoid(alpha x gate), both clamped first
)
ROUTER_NORM, ROUTER_SCALE, EXPERT_SCALE = "mlp.router_norm", "mlp.router_scale", "mlp.router_expert_scale"
EXPERTS_NORM = "experts_norm"  # of what experts beside an MLP read: the stream, as the norm of the MLP does
LATENT_DOWN, LATENT_UP = "mlp.latent_down", "mlp.latent_up"  # before and behind experts on narrow vectors
CHOSEN_SOFTMAX = "mlp.router_chosen_softmax"  # of the scores of a token's experts alone
SCORES = (SOFTMAX, WIDE_SOFTMAX, SIGMOID, CHOSEN_SOFTMAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`num` MLPs of one shape, of which a router picks `num_chosen` per token; `shared` runs for all tokens.

    Each works on `capacity` times an equal share of rows: above 1 where rows are padded. `scores` names the
    operator that makes shares of the router's scores. Where `gates_shared`, the sigmoid of a number of each
    token multiplies the result of `shared`. `router_bias`: whether the router's matmul has a bias. `latent`:
    width of what the routed experts read and give, between two products; None: that of the stream. `load_cv`:
    see `workbench.model.expert_load`.
    """

    num: int
    num_chosen: int
    mlp: Mlp
    shared: Mlp | None = None
    capacity: float = 1.0
    gates_shared: bool = False
    scores: str = SOFTMAX
    router_bias: bool = False
    latent: int | None = None
    load_cv: float = 0.0

    def __post_init__(self) -> None:
        if self.num_chosen > self.num:
            raise ValueError(f"a token's experts must be at most {self.num}, got {self.num_chosen}")


def num_experts(layer: Layer) -> int:
    """The number of experts that a router chooses from; 0 in a layer without experts.

    Complexity: O(operators) without experts, else O(1) but for operators behind those of the last expert:
    experts are numbered from 0 and come in order.
    """
    last = next((each for each in reversed(layer.operators) if is_of_expert(each)), None)
    return 0 if last is None else expert_index(last) + 1


def is_of_expert(part: Operator | Parameter) -> bool:
    """Whether an operator or parameter belongs to a routed expert.

    Recognised by name, since a field would change the hashes of existing plans.
    """
    return f".{EXPERT}" in f".{part.name}"


def expert_index(operator: Operator) -> int:
    """The index of the expert that an operator belongs to."""
    return int(operator.name.removeprefix(EXPERT).partition(".")[0])


def num_chosen(layer: Layer) -> int:
    """The number of experts that a token chooses: the join reads a row of each, and the token itself."""
    joins = (each for each in layer.operators if isinstance(each, Pointwise) and each.name == JOIN)
    return next(joins).num_passes - 1


def role_in_expert(operator: Operator) -> str:
    """The operator's role in its expert, equal in all experts: `gate_up`, `down`."""
    return operator.name.removeprefix(EXPERT).partition(".")[2]


def with_experts(block: Layer, experts: Experts) -> Layer:
    """The block with a router and experts in place of its MLP's operators.

    In the mean over experts each works on `num_chosen / num` of the tokens. Real routing is known only at run
    time; how unequal its shares are can be stated (`workbench.model.expert_load`).
    """
    indices = [index for index, each in enumerate(block.operators) if each.name.startswith("mlp.")]
    first, last = indices[0], indices[-1]
    enter = block.operators[first]
    assert isinstance(enter, Matmul), "an MLP begins with a matmul"
    operators = (
        *block.operators[:first],
        *expert_operators(enter.in_features, experts),
        *block.operators[last + 1 :],
    )
    return replace(block, operators=operators)


@lru_cache(maxsize=64)
def expert_operators(width: int, experts: Experts) -> tuple[Operator, ...]:
    """The router, what its scores become, the experts and the sum of their results, over [T, width]."""
    inner = width if experts.latent is None else experts.latent
    share = experts.capacity * experts.num_chosen / experts.num
    router = Matmul(
        name=ROUTER,
        in_features=width,
        out_features=experts.num,
        bias=experts.router_bias,
        load_cv=experts.load_cv,
    )
    num_scores = experts.num_chosen if experts.scores == CHOSEN_SOFTMAX else experts.num
    scores = Pointwise(name=experts.scores, width=num_scores, num_passes=2)
    expert_operators = [
        replace(operator, tokens_scale=share)
        for index in range(experts.num)
        for operator in mlp_operators(f"{EXPERT}{index}", inner, experts.mlp)
        if isinstance(operator, Matmul | Pointwise)
    ]
    joined = Pointwise(name=JOIN, width=inner, num_passes=experts.num_chosen + 1)
    shared = () if experts.shared is None else mlp_operators(SHARED, width, experts.shared)
    if experts.gates_shared:
        number = Matmul(name=SHARED_GATE, in_features=width, out_features=1)
        shared += (number, Pointwise(name=SHARED_GATED, width=width, num_passes=2))
    if experts.latent is None:
        return (router, scores, *expert_operators, *shared, joined)
    down = Matmul(name=LATENT_DOWN, in_features=width, out_features=inner, enters=True)
    up = Matmul(name=LATENT_UP, in_features=inner, out_features=width)
    return (router, scores, down, *expert_operators, *shared, joined, up)
