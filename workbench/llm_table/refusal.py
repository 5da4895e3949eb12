"""One line about a cell that is refused, with the nearest valid choice."""

from collections.abc import Iterable


def refuse(name: str, rule: str, value: object, nearest: object) -> None:
    """Raise ValueError: the column, the rule, the value and the nearest choice."""
    raise ValueError(f"{name}: {rule}, got {value}; nearest: {nearest}")


def want_zero(row: object, names: Iterable[str], when: str) -> None:
    """ValueError for the first of these cells that is not 0."""
    for name in names:
        if value := getattr(row, name):
            refuse(name, f"want 0 {when}", value, 0)


def want_together(row: object, names: Iterable[str], rule: str, *, has: bool) -> None:
    """ValueError for the first of these cells that is 0 although the row `has` what it belongs to, or not."""
    for name in names:
        if bool(value := getattr(row, name)) != has:
            refuse(name, rule, value, 1 if has else 0)


def check_divides(whole: str, total: int, part: str, divisor: int) -> None:
    """ValueError unless a part divides the whole; names the nearest divisor."""
    if total % divisor:
        fitting = [d for d in range(1, total + 1) if total % d == 0] if total <= 10**6 else [1]
        near = min(fitting, key=lambda d: (abs(d - divisor), d))
        raise ValueError(f"{part}: must divide {whole} = {total}, got {divisor}; nearest: {near}")
