"""The figures of a campaign out of rows: what counts, and what is null."""

import pytest

from experiments.gpu_day.campaign import Extent, Session
from experiments.gpu_day.kernels import ratios
from experiments.gpu_day.predictions import Foretold, Predictions, read_predictions, write_predictions
from experiments.gpu_day.store import PREDICTIONS
from experiments.gpu_day.summary import RATIOS, figures


def judged(plan: str, predicted_s: float, *executed_s: float) -> dict[str, object]:
    return {"kind": "judged", "plan": plan, "predicted_s": predicted_s, "executed_s": list(executed_s)}


def test_without_rows_nothing_was_measured():
    found = figures({}, {})
    assert set(found) == {*RATIOS, "plans_judged", "mean_error", "worst_error", "tau", "memory_error"}
    assert set(found.values()) == {None}


def test_plans_are_judged_by_all_their_runs():
    rows = {
        "1": judged("a", 1.0, 0.9, 1.1),
        "2": judged("b", 2.2, 2.0),
        "3": judged("c", 3.0, 3.9, 4.1),
        "4": judged("c", 3.0, 4.0),
        "5": {"kind": "rehearsal", "plan": "d", "predicted_s": 9.0, "executed_s": [1.0]},
        "6": {"kind": "predictions", "digest": "x"},
    }
    found = figures({"plans": rows}, {})
    assert found["plans_judged"] == 3
    assert found["mean_error"] == pytest.approx((0.0 + 0.1 + 0.25) / 3)
    assert found["worst_error"] == pytest.approx(0.25)
    assert found["tau"] == 1.0


def test_only_pairs_further_apart_than_their_spread_are_ranked():
    wrong = {"1": judged("a", 1.0, 2.0, 2.4), "2": judged("b", 2.0, 1.8, 2.1)}
    assert figures({"plans": wrong}, {})["tau"] is None  # their runs overlap
    apart = wrong | {"3": judged("c", 3.0, 1.0, 1.1)}
    assert figures({"plans": apart}, {})["tau"] == -1.0


def test_the_worst_plan_is_the_memory_error():
    rows = {"memory: a": {"error": 0.01}, "memory: b": {"error": -0.03}, "world: a step": {"spans": 4}}
    assert figures({"alone": rows}, {})["memory_error"] == 0.03


def kernel_rows(lengths: tuple[int, ...], **seconds: float) -> dict[str, dict[str, object]]:
    """Ours takes a second everywhere; rivals what is said."""
    rows = [
        {
            "kind": "full",
            "mask": mask,
            "length": length,
            "head_dim": 128,
            "dtype": "bfloat16",
            "seed": 0,
            "direction": direction,
            "who": who,
            "seconds": took_s,
        }
        for length in lengths
        for mask in ("causal", "EP", "EE", "MP")
        for direction in ("forward", "backward")
        for who, took_s in {"OURS": 1.0, **seconds}.items()
    ]
    return {"all": {"rows": rows}}


def test_ratios_are_the_smallest_and_null_unless_all_was_measured(tmp_path):
    gpu = Session("cuda", Extent.FULL, tmp_path)
    whole = kernel_rows((16384, 65536), FLEX=1.3, CUDNN=0.8)
    assert ratios(gpu, whole) == {
        "flex_forward_min": pytest.approx(1.3),
        "flex_backward_min": pytest.approx(1.3),
        "cudnn_causal_min": pytest.approx(0.8),
    }
    assert set(ratios(gpu, kernel_rows((16384,), FLEX=1.3, CUDNN=0.8)).values()) == {None}
    assert ratios(gpu, kernel_rows((16384, 65536), FLEX=1.3))["cudnn_causal_min"] is None


def test_what_an_interpreter_takes_is_no_ratio(tmp_path):
    cpu = Session("cpu", Extent.FULL, tmp_path)
    found = ratios(cpu, kernel_rows((16384, 65536), FLEX=1.3, CUDNN=0.8))
    assert found == dict.fromkeys(RATIOS)


# ---- predictions ----


def predictions(*hashes: str) -> Predictions:
    plans = tuple(
        Foretold(plan=f"plan {each}", plan_hash=each, predicted_s=1.5, kinds_s={"F": 1.0}) for each in hashes
    )
    return Predictions(profile_hash="p", device_name="a device", date="2026-11-22", plans=plans)


def test_predictions_come_back_as_they_were_written(tmp_path):
    made = predictions("a", "b")
    write_predictions(made, tmp_path)
    assert read_predictions(tmp_path, made.digest) == made
    assert made.of("b").plan == "plan b"
    with pytest.raises(ValueError, match="was not predicted"):
        made.of("c")


def test_predictions_that_are_missing_or_changed_are_refused(tmp_path):
    made = predictions("a", "b")
    with pytest.raises(ValueError, match="predictions are missing"):
        read_predictions(tmp_path, made.digest)
    write_predictions(made, tmp_path)
    with pytest.raises(ValueError, match="changed after they were written"):
        read_predictions(tmp_path, predictions("a").digest)
    path = tmp_path / PREDICTIONS
    path.write_text(path.read_text().replace('"predicted_s": 1.5', '"predicted_s": 1.4', 1))
    with pytest.raises(ValueError, match="changed after they were written"):
        read_predictions(tmp_path, made.digest)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a file of predictions"):
        read_predictions(tmp_path, made.digest)


def test_a_plan_is_predicted_once(tmp_path):
    with pytest.raises(ValueError, match="predicted twice"):
        write_predictions(predictions("a", "a"), tmp_path)
    with pytest.raises(ValueError, match="want at least one plan"):
        write_predictions(predictions(), tmp_path)
