"""What is said of stored rows: by the day's own figures, beside a profile that had not seen them."""

import json
import shutil

import pytest

from experiments.gpu_day.campaign import PARTS
from experiments.gpu_day.profile import LAYERS, OPERATORS, measured_profile, values_in
from experiments.gpu_day.profile import main as profile_main
from experiments.gpu_day.report import OURS, STORED, main, report
from experiments.gpu_day.summary import RATIOS, figures
from workbench.cost.profile import load_profile


@pytest.fixture(scope="module")
def stored() -> dict[str, object]:
    return report(STORED)


def test_every_part_has_rows_and_none_failed(stored):
    assert set(stored["parts"]) == {part.name for part in PARTS}
    assert all(counts["rows"] > 0 for counts in stored["parts"].values())
    assert stored["failures"] == []


def test_figures_are_those_of_the_campaign(stored):
    values = {part.name: values_in(STORED, part.name) for part in PARTS}
    expected = figures(values, {name: stored[name] for name in RATIOS})
    assert {name: stored[name] for name in expected} == expected
    assert None not in expected.values()


def test_ratios_are_of_rivals_over_ours(stored):
    ours = {
        (row["mask"], row["length"], row["direction"]): row for row in stored["kernels"] if row["who"] == OURS
    }
    assert len(ours) == 16
    for row in stored["kernels"]:
        mine = ours[row["mask"], row["length"], row["direction"]]
        assert row["ratio"] == pytest.approx(row["seconds"] / mine["seconds"])
    flex = [
        row["ratio"] for row in stored["kernels"] if (row["who"], row["direction"]) == ("FLEX", "forward")
    ]
    assert min(flex) <= stored["flex_forward_min"]  # which leaves the causal mask out


def test_plans_were_predicted_in_a_file_that_has_its_hash(tmp_path):
    shutil.copytree(STORED, tmp_path / "day")
    path = tmp_path / "day" / "predictions.json"
    content = json.loads(path.read_text())
    content["plans"][0]["predicted_s"] *= 0.9
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="changed after they were written"):
        report(tmp_path / "day")


def test_a_pass_lies_between_its_fastest_and_slowest(stored):
    assert len(stored["passes"]) > 20
    for one in stored["passes"]:
        assert 0 < one["fastest_s"] <= one["median_s"] <= one["slowest_s"]


def test_the_shipped_profile_is_held_against_products_and_sums(stored):
    assert {row["what"] for row in stored["unseen"]} == {
        "products in short calls",
        "products in long loops",
        "sums of two tensors",
    }
    assert all(0 < row["mean_error"] <= row["worst_error"] for row in stored["unseen"])


def test_layers_and_operators_make_one_profile(tmp_path):
    path = tmp_path / "h100.json"
    assert profile_main([str(STORED), "-o", str(path)]) == 0
    profile = load_profile(path)
    assert profile.device == "H100"
    assert profile.layers
    assert profile.matmul.points
    alone = measured_profile({LAYERS: values_in(STORED, LAYERS), OPERATORS: {}})
    assert alone.layers == profile.layers
    assert not alone.matmul.points


def test_it_prints_lines_and_one_json_object(capsys):
    assert main([str(STORED), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("flex_forward_min") for line in lines)
    assert json.loads(last)["device"] == "NVIDIA H100 80GB HBM3"


def test_a_folder_without_rows_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: want the folder of a GPU day, it has no rows\n"
