"""What is printed for machines is JSON, whatever a loss becomes."""

import json
import math
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cli.console import emit_json
from workbench.finite_json import finite


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_losses_that_are_no_numbers_are_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"losses": [1.5, math.nan, math.inf, -math.inf], "more": {"pair": (math.nan, None)}})
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"losses": [1.5, "nan", "inf", "-inf"], "more": {"pair": ["nan", None]}}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_everything_else_stays_as_it_is(value: object) -> None:
    assert finite(value) == value
