"""One line about a cell that is refused, with the nearest valid choice."""


def refuse(name: str, rule: str, value: object, nearest: object) -> None:
    """Raise ValueError: the column, the rule, the value and the nearest choice."""
    raise ValueError(f"{name}: {rule}, got {value}; nearest: {nearest}")


def check_divides(whole: str, total: int, part: str, divisor: int) -> None:
    """ValueError unless a part divides the whole; names the nearest divisor."""
    if total % divisor:
        fitting = [d for d in range(1, total + 1) if total % d == 0] if total <= 10**6 else [1]
        near = min(fitting, key=lambda d: (abs(d - divisor), d))
        raise ValueError(f"{part}: must divide {whole} = {total}, got {divisor}; nearest: {near}")
