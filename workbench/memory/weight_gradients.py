"""Gradients of a layer's weights while its backward is at each of its operators."""

from workbench.cost.expert_parallel import ROUTER
from workbench.memory.setting import Setting
from workbench.model.experts import SHARED, SHARED_GATE, SHARED_GATED, begins_with_shared, is_of_expert
from workbench.model.layer import Layer, Matmul, Operator, Shard

OPERATORS_OF_EXPERT = 3  # gate and up in one, the activation, down


def run_order(layer: Layer) -> list[int]:
    """Return operators' indices in run order: an expert for all tokens before the router, where it is."""
    indices = range(len(layer.operators))
    if not begins_with_shared(layer):
        return list(indices)
    gate = (SHARED_GATE, SHARED_GATED)
    names = [operator.name for operator in layer.operators]
    shared = [index for index in indices if names[index].startswith(SHARED) and names[index] not in gate]
    router = names.index(ROUTER)
    rest = [index for index in indices[router:] if index not in shared]
    return [*indices[:router], *shared, *rest]


class WeightGradients:
    """Bytes of weights' gradients while a backward is at each of the operators.

    Those of experts are parts of one tensor for all experts of the layer. Where a mixture slices its experts
    out of it one at a time (Mixtral and GLM), the gradient of each is a tensor for all of them, zeros
    but for its part: with the sum so far and the new sum there are three of the gates' and ups' and one of
    the downs'. Where it splits them at once (Llama 4, whose expert for all has no gate, and distributed
    experts) the parts wait until all exist, and are then joined, the downs first.
    """

    def __init__(self, layer: Layer, setting: Setting) -> None:
        self._own = [_gradient_bytes(operator, setting) for operator in layer.operators]
        self._order = run_order(layer)
        self._expert_indices = [i for i, op in enumerate(layer.operators) if is_of_expert(op)]
        names = [operator.name for operator in layer.operators]
        is_llama4 = begins_with_shared(layer) and SHARED_GATE not in names
        self._is_apart = setting.grid.ep > 1 or is_llama4
        matmuls = [self._own[i] for i in self._expert_indices if isinstance(layer.operators[i], Matmul)]
        self._ups, self._downs = sum(matmuls[::2]), sum(matmuls[1::2])
        experts = [names[i].rpartition(".")[0] for i in self._expert_indices]
        self._lasts = {
            i for i, name in zip(self._expert_indices, experts, strict=True) if name == experts[-1]
        }

    @property
    def total(self) -> float:
        """Bytes of the gradients of all weights."""
        return sum(self._own)

    def first(self) -> list[float]:
        """[operators] gradients where none exist before."""
        gradients, so_far, later = [0.0] * len(self._own), 0.0, 0.0
        for index in reversed(self._order):
            if [index] == self._expert_indices[-1:]:  # the first expert that the backward meets
                later = so_far
            so_far += self._own[index]
            gradients[index] = so_far
        for index in self._expert_indices:
            experts = self._of_experts(index, joined=self._ups, apart=gradients[index] - later)
            gradients[index] = later + experts
        return gradients

    def accumulating(self) -> list[float]:
        """[operators] gradients beside those of earlier microbatches, to which each is then added."""
        gradients = list(self._own)
        apart = 0.0
        for index in reversed(self._expert_indices):
            apart += self._own[index]
            joined = max(self._downs, self._ups - self._downs)
            gradients[index] = self._of_experts(index, joined=joined, apart=apart)
        return gradients

    def _of_experts(self, index: int, *, joined: float, apart: float) -> float:
        """Return the gradients of experts; `apart`: of those that the backward has passed."""
        if self._is_apart:
            return apart + (joined if index == self._expert_indices[0] else 0.0)
        is_first, of_expert = index in self._lasts, (index - self._expert_indices[0]) % OPERATORS_OF_EXPERT
        if is_first:  # of the backward
            return self._downs + (self._ups if of_expert == 0 else 0.0)
        ups, downs = {0: (3, 1), OPERATORS_OF_EXPERT - 1: (1, 3)}.get(of_expert, (1, 1))
        return ups * self._ups + downs * self._downs


def _gradient_bytes(operator: Operator, setting: Setting) -> float:
    """Return the bytes of the gradients of its weights on one rank."""
    elements = (
        parameter.num_elements / (1 if parameter.shard is Shard.REPLICATED else setting.grid.tp)
        for parameter in operator.parameters()
    )
    return sum(elements) * setting.element_bytes
