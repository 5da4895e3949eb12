"""The rows of the busiest of the ranks that distribute experts, by how unequal the experts' shares are."""

from functools import cache
from math import exp, pi, pow, sqrt
from statistics import NormalDist

from workbench.float_sum import float_sum

NORMAL = NormalDist()
_STEPS = 64  # of the trapezoid rule on either side of 0, over `_REACH` standard deviations
_REACH = 8.0


def busiest_share(num_rows: float, num_ranks: int, *, num_experts: int = 2, load_cv: float = 0.0) -> float:
    """The largest share of routed rows that any rank gets, as a multiple of the mean; at most all rows.

    With equal shares of the experts, counts of multinomial draws are nearly normal; the largest of n
    independent standard ones lies at the quantile (n - 3/8) / (n + 1/4) in the mean (Blom 1958, "Statistical
    Estimates and Transformed Beta-Variables"), and since counts add up to all rows each has sqrt(n / rows) of
    it. Unequal shares add their variance, and the skewness of shares that cannot be negative: those of a
    symmetric Dirichlet distribution, whose experts come to ranks at random. A rank with k of N experts then
    has a squared CV of cv^2 / k (N - k) / (N - 1). As shares add up to one, the largest of them is that of
    independent ones with s^2 = n cv^2 / (N - 1), by the same 1 - 1/n = (N - k) / N as for counts. The second
    term of Cornish and Fisher for a gamma distribution is s^2 (E[largest^2] - 1) / 3.

    Error: against draws of 8 to 256 experts with cv up to 1, the excess over the mean is within 10 % for
    Dirichlet and within 30 %, mostly below, for lognormal shares (tests/test_expert_load.py).

    Args:
        num_rows: rows of all ranks together; several rows of one token count as independent draws.
        num_ranks: ranks over which experts are evenly distributed.
        num_experts: experts of all ranks together; decides nothing where `load_cv` is 0.
        load_cv: coefficient of variation of their shares, see `workbench.model.expert_load`.
    """
    if num_ranks == 1 or num_rows <= 0:
        return 1.0
    unequal = num_ranks * load_cv**2 / (num_experts - 1)
    excess = (
        _largest(num_ranks) * sqrt(num_ranks / num_rows + unequal) + unequal * _largest_square(num_ranks) / 3
    )
    return min(float(num_ranks), 1.0 + excess)


def load_cv_of(max_violation: float, num_experts: int) -> float:
    """The CV of shares whose largest is `max_violation` above the mean: `busiest_share` of one expert a rank.

    For MaxVio = (largest load - mean) / mean over many tokens. Source: Wang et al. 2024, "Auxiliary-Loss-Free
    Load Balancing Strategy for Mixture-of-Experts", equation 4.

    Raises:
        ValueError: fewer than two experts, or a largest load below the mean.
    """
    if num_experts < 2 or not max_violation >= 0:
        raise ValueError(
            f"want two experts or more and a max_violation from 0, got {num_experts} and {max_violation:g}"
        )
    linear, square = _largest(num_experts), _largest_square(num_experts) / 3
    deviation = 2 * max_violation / (linear + sqrt(linear**2 + 4 * square * max_violation))
    return deviation * sqrt((num_experts - 1) / num_experts)


@cache
def _largest(count: int) -> float:
    """The mean of the largest of so many standard normal numbers, by Blom's position."""
    return NORMAL.inv_cdf((count - 0.375) / (count + 0.25))


@cache
def _largest_square(count: int) -> float:
    """The mean of the largest one's square, less 1: n (n-1) (n-2) / 2 times the integral of pdf^3 cdf^(n-3).

    From that of (z^2 - 1) n pdf cdf^(n-1) by parts, twice.
    """
    if count == 2:
        return 0.0
    step = _REACH / _STEPS
    points = [step * index for index in range(-_STEPS, _STEPS + 1)]
    cubes = [exp(-1.5 * z * z) * pow(NORMAL.cdf(z), count - 3) for z in points]
    return count * (count - 1) * (count - 2) / 2 * step * float_sum(cubes) / pow(2 * pi, 1.5)
