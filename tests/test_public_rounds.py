"""Rounds of multimodal runs: every run was predicted before its figure was opened."""

import hashlib
from pathlib import Path

import pytest

from experiments.public import unseen_multimodal_fourth, unseen_multimodal_third
from experiments.public.blind import rows_of
from experiments.public.multimodal_round import MultimodalRound

RECORD = Path(__file__).parents[1] / "experiments" / "public" / "record" / "unseen.md"
ROUNDS = pytest.mark.parametrize(
    "sealed",
    [
        pytest.param(unseen_multimodal_third.ROUND, id="third"),
        pytest.param(unseen_multimodal_fourth.ROUND, id="fourth"),
    ],
)


@ROUNDS
def test_every_judged_run_has_a_prediction_or_a_reason(sealed: MultimodalRound) -> None:
    runs, before = sealed.runs(), rows_of(sealed.predictions)
    assert [row["id"] for row in before] == list(runs)
    for row in before:
        asked = ["predicted_s", "low_s", "system_high_s"]
        asked += ["peak_gib"] * (runs[row["id"]]["memory"] == "yes")
        assert row["refused"] or all(float(row[name]) > 0 for name in asked)


@ROUNDS
def test_the_opened_figures_are_the_sealed_ones(sealed: MultimodalRound) -> None:
    record = RECORD.read_text(encoding="utf-8")
    assert hashlib.sha256(sealed.measured.read_bytes()).hexdigest() in record
    assert {row["id"] for row in rows_of(sealed.measured)} == {row["id"] for row in rows_of(sealed.inputs)}


@ROUNDS
def test_predictions_are_not_written_beside_the_figures(sealed: MultimodalRound) -> None:
    before = sealed.predictions.read_bytes()
    with pytest.raises(ValueError, match="predictions are written before it"):
        sealed.seal()
    assert sealed.predictions.read_bytes() == before
