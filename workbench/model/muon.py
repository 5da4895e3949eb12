"""Muon: which weights it updates, and the work of its orthogonalisation.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; `torch.optim.Muon`.
"""

from workbench.model.layer import Layer, LayerKind, Matmul, Parameter
from workbench.model.trained import trained_parameters

NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of X <- a X + (b A + c A A) X with A = X X^T
MOMENTUM = 0.95
RMS = 0.2  # of an update, as AdamW's are: the same learning rate and decay serve both


def muon_matrices(layer: Layer) -> tuple[Parameter, ...]:
    """Trained weights of a layer that Muon updates: matrices of products of a block, unless tied.

    All others are AdamW's: embeddings, projectors, heads, tied weights, norms, biases, convolutions.
    """
    if layer.kind is not LayerKind.BLOCK:
        return ()
    tied = {shared for _, shared in layer.tied}
    products = {
        f"{layer.name}.{parameter.name}"
        for operator in layer.operators
        if isinstance(operator, Matmul)
        for parameter in operator.parameters()
        if len(parameter.shape) == 2
    }
    return tuple(p for p in trained_parameters(layer) if p.name in products - tied)


def newton_schulz_products(shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(rows, columns, inner size) of the three products of one step on a matrix [m, n], with m <= n.

    A = X X^T, B = b A + c A A, X <- a X + B X; a tall matrix is transposed first.
    """
    m, n = sorted(shape)
    return (m, m, n), (m, m, m), (m, n, m)


def newton_schulz_flop(shape: tuple[int, ...]) -> int:
    """FLOP of all steps on a matrix [m, n], with m <= n: 5 (4 m^2 n + 2 m^3). O(1)."""
    return NEWTON_SCHULZ_STEPS * sum(2 * m * n * k for m, n, k in newton_schulz_products(shape))


def newton_schulz_bytes(shape: tuple[int, ...], element_bytes: int, ortho_bytes: int) -> int:
    """Most bytes of temporaries while one matrix [m, n], with m <= n, is orthogonalised.

    The update in the optimizer's type, X before and after a step, and both Gram matrices.

    Args:
        element_bytes: of the optimizer's elements.
        ortho_bytes: of X's.
    """
    m, n = sorted(shape)
    return m * n * element_bytes + 2 * (m * n + m * m) * ortho_bytes
