"""Non-finite numbers in JSON, which has no notation for them."""

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The value with every `nan`, `inf` and `-inf` as text, to be written as JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [finite(member) for member in value]
    return value
