"""Numbers that are none, in JSON, which does not know them."""

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """A value to be written as JSON: `nan`, `inf` and `-inf` in it, which are no numbers there, as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
