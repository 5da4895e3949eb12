"""Seconds in which a rank updates matrices by Muon, as the runtime does: one after the other, each whole."""

from workbench.cost.model import CostModel
from workbench.cost.roofline import Gemm
from workbench.cost.traffic import WIDE_BYTES
from workbench.model.layer import Parameter
from workbench.model.muon import NEWTON_SCHULZ_STEPS, newton_schulz_products
from workbench.plan.contents import layer_numbers
from workbench.plan.lowered import Weights
from workbench.plan.muon import matrices_of, ortho_precision
from workbench.plan.plan import Plan, Settings


class MuonPrices:
    """Prices of the matrices that Muon updates; layers alike are priced once per machine.

    Args:
        plan: whose optimizer may be Muon; else there are no matrices.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[tuple[str, int, int], float] = {}

    def elements(self, weights: Weights) -> int:
        """Return the elements of matrices among weights of one gradient group."""
        return sum(matrix.num_elements for matrix in self._matrices(weights))

    def update_s(self, weights: Weights, cost: CostModel) -> float:
        """Return the seconds of the update of these matrices on one rank."""
        assert weights.layer is not None
        number = layer_numbers(self._plan, weights.module)[weights.layer]
        key = weights.module, number, id(cost)
        if key not in self._known:
            matrices = self._matrices(weights)
            self._known[key] = sum(matrix_s(m.shape, self._plan.settings, cost) for m in matrices)
        return self._known[key]

    def _matrices(self, weights: Weights) -> tuple[Parameter, ...]:
        if weights.layer is None:  # a tied weight
            return ()
        layer = self._plan.model.module(weights.module).layers[weights.layer]
        return matrices_of(self._plan.settings, layer)


def matrix_s(shape: tuple[int, ...], settings: Settings, cost: CostModel) -> float:
    """Return the seconds to update one matrix [m, n]: its products in short loops, then its bytes.

    Complexity: O(1).
    """
    precision = ortho_precision(settings)
    gemms = (Gemm(*product) for product in newton_schulz_products(shape))
    products_s = sum(cost.matmul_s(gemm, precision.value)[0] for gemm in gemms)
    moved = shape[0] * shape[1] * matrix_bytes(settings)
    return NEWTON_SCHULZ_STEPS * products_s + cost.update_s(moved)


def matrix_bytes(settings: Settings) -> int:
    """Return the bytes that kernels beside the products move per element of a matrix.

    In the optimizer's type: momentum (2 reads, 1 write), Nesterov's mean (2, 1), decay of the weight (1, 1)
    and its update (1, 1). In that of the products: norm (1 read), division (1, 1), the update's read; a cast
    where the types differ, and a write of narrower weights. PyTorch's kernels, one tensor at a time.
    """
    wide, narrow = settings.optimizer_precision, settings.precision.num_bytes
    element = max(WIDE_BYTES, narrow) if wide is None else wide.num_bytes
    ortho = ortho_precision(settings).num_bytes
    cast = element + ortho if element != ortho else 0
    return 10 * element + 4 * ortho + cast + (narrow if narrow < element else 0)
