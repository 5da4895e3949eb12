"""What holds of a release and not of every commit, because every change of a module makes some results stale.

python -m pytest tests/release.py
"""

from experiments.harness.reads import changed_since
from experiments.harness.record import stored_records
from experiments.harness.tally import counts


def test_stored_results_are_current() -> None:
    """Says which are stale, and through what."""
    changed = {each["script"]: changed_since(each) for each in stored_records()}
    assert {script: what for script, what in changed.items() if what} == {}


def test_stored_results_come_from_commits() -> None:
    assert [each["script"] for each in stored_records() if str(each["commit"]).endswith("-dirty")] == []


def test_what_is_off_or_fails_has_a_cause() -> None:
    found = counts(stored_records())
    assert found["off_without_cause"] == []
    assert found["claims_without_cause"] == []
