"""The orthogonalisation of a matrix, by which Muon updates it."""

import torch
from torch import Tensor

from workbench.model.muon import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of X <- a X + (b A + c A A) X with A = X X^T
LEAST_NORM = 1e-7


def ortho_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which an update of that type is orthogonalised."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def orthogonalised(update: Tensor) -> Tensor:
    """[m, n] nearly U V^T of the update U S V^T, by Newton-Schulz steps; its work: `newton_schulz_flop`."""
    a, b, c = COEFFICIENTS
    is_tall = update.size(0) > update.size(1)
    x = update.to(ortho_dtype(update.dtype))
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x
