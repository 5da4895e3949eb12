"""JSON without duplicate keys or numbers that are not finite."""

import json
import math
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cli.console import emit_json
from workbench.finite_json import finite
from workbench.strict_json import depth_of, parse_strict

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def nested(value: object) -> int:
    """By walking the value."""
    if isinstance(value, dict):
        return 1 + max(map(nested, value.values()), default=0)
    return 1 + max(map(nested, value), default=0) if isinstance(value, list) else 0


@given(VALUES)
def test_what_json_writes_comes_back_and_its_depth_is_known_before(value):
    content = json.dumps(value).encode()
    assert depth_of(content) == nested(value)
    assert parse_strict(content, most_bytes=len(content)) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"[" * 100_000, "nested at most 32 deep", id="nested"),
        pytest.param(b'{"a":' * 40 + b"1" + b"}" * 40, "nested at most 32 deep", id="nested-objects"),
        pytest.param(b'{"a": 1, "a": 2}', "key 'a' stands twice", id="twice"),
        pytest.param(b"[NaN]", "want finite numbers, got NaN", id="nan"),
        pytest.param(b"[1e400]", "want finite numbers, got 1e400", id="overflow"),
        pytest.param(b" " * 2000, "want at most 1000 bytes of JSON, got 2000", id="long"),
        pytest.param(b"\xff", "can't decode", id="no-text"),
        pytest.param(b"[1", "delimiter", id="cut-off"),
    ],
)
def test_what_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_strict(content, most_bytes=1000 if content == b" " * 2000 else 10**6)


def test_brackets_in_strings_do_not_count():
    assert depth_of(json.dumps(["[[[{{{", '\\"[[']).encode()) == 1


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
