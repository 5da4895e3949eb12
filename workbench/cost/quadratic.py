"""Seconds as a quadratic in tokens: what planners ask of thousands of samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.on_demand import OnDemand

optimize = OnDemand("scipy.optimize")
FIT_TOKENS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """a x^2 + b x + c seconds for x tokens."""

    square_s: float
    linear_s: float
    constant_s: float

    def seconds(self, tokens: float) -> float:
        """0 for no tokens: what is not there is not computed."""
        if tokens <= 0:
            return 0.0
        return (self.square_s * tokens + self.linear_s) * tokens + self.constant_s


def fit_quadratic(tokens: Sequence[float], seconds: Sequence[float]) -> Quadratic:
    """Least squares on relative errors, no coefficient below 0.

    Source: Entrain (dissertation, section 4.4.1), T(x) = a x^2 + b x + c by linear regression.
    Differs: relative errors, since times span orders of magnitude; and a cost that falls with
    tokens is never fitted.

    Raises:
        ValueError: fewer than three different token counts, or a count or time that is not > 0.
    """
    x, y = np.asarray(tokens, float), np.asarray(seconds, float)
    if len(x) != len(y) or len(set(x.tolist())) < 3:
        raise ValueError(
            f"a quadratic wants a time at >= 3 different token counts, got {len(x)} and {len(y)}"
        )
    if min(x.min(), y.min()) <= 0:
        raise ValueError(f"token counts and times must be > 0, got {x.min():g} tokens and {y.min():g} s")
    scale = x.max()
    terms = np.stack([(x / scale) ** 2, x / scale, np.ones_like(x)], axis=1) / y[:, None]
    (square, linear, constant), _ = optimize.nnls(terms, np.ones_like(y))
    return Quadratic(float(square / scale**2), float(linear / scale), float(constant))
