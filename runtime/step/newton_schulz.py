"""The orthogonalisation of a matrix, by which Muon updates it."""

import torch
from torch import Tensor

from workbench.model.muon import COEFFICIENTS, NEWTON_SCHULZ_STEPS

LEAST_NORM = 1e-7


def ortho_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which an update of that type is orthogonalised."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def orthogonalised(update: Tensor) -> Tensor:
    """[..., m, n] nearly U V^T of every update U S V^T, by Newton-Schulz steps.

    Work of each: `newton_schulz_flop`. Updates of experts are a stack [E, m, n], others a matrix.
    """
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if update.ndim == 2 else torch.baddbmm
    is_tall = update.size(-2) > update.size(-1)
    x = update.to(ortho_dtype(update.dtype))
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        gram = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, gram, x, beta=a)
    return x.mT if is_tall else x
