"""Causes of claims that fail, in the words of the numbers behind them."""

from collections.abc import Callable, Mapping


def open_cause(values: Mapping[str, float], holds: Callable[[float], bool], what: str) -> str:
    """The cause of a claim that fails at the likeliest of the settings that a paper leaves open.

    Args:
        values: ours by setting name, the likeliest first.
        holds: whether the claim does at a value.
        what: the quantity left open.
    """
    fitting = {name: value for name, value in values.items() if holds(value)}
    if not fitting:
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        return (
            f"at none of {len(values)} settings of {what}, which the paper does not state: "
            f"{values[low]:.3g} ({low}) .. {values[high]:.3g} ({high})"
        )
    name, value = next(iter(fitting.items()))
    return (
        f"open: it holds at {len(fitting)} of {len(values)} settings of {what}, which the paper does not "
        f"state, such as {name} ({value:.3g})"
    )
