"""Jobs planned with layouts out of a file in another system's words."""

import json
from pathlib import Path

import pytest
import yaml

from tests.command_line import accept, workbench
from workbench.job.job import load_job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.job.notations.layout_file import content_of
from workbench.plan.codec import read_plan
from workbench.strategies.encoder_placement import PLACINGS, with_layout_file
from workbench.strategies.registry import BY_NAME

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"
BRIDGE = {
    "module_parallelisms": {
        "vision": {"pipeline_model_parallel_size": 1, "data_parallel_size": 1},
        "audio": {"data_parallel_size": 1, "rank_offset": 1},
        "language": {"pipeline_model_parallel_size": 2, "data_parallel_size": 1, "rank_offset": 2},
    }
}
CORNSTARCH = {
    "encoder_specs": {"vision": {"tp_size": 1}, "audio": {"tp_size": 1}},
    "language_model_spec": {"pp_size": 2},
}
FILES = {
    "bridge": (BRIDGE, "megatron-heterogeneous"),
    "cornstarch": (CORNSTARCH, "cornstarch"),
    "colocated": (CORNSTARCH | {"modality_parallelism": "colocated"}, "encoders-colocated-frozen-aware"),
    "megatron": ("Ett|ttL", "cornstarch"),
    "torchtitan": (
        {
            "module_fqns_per_model_part": [
                ["tok_embeddings", "layers.0", "layers.1"],
                ["layers.2", "layers.3", "norm", "output"],
            ]
        },
        "cornstarch",
    ),
}


def planned(tmp_path, content, *more):
    file, out = tmp_path / "layout.yaml", tmp_path / "plan.json"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    command = ["plan", str(EXAMPLE), "--layout", str(file), "-o", str(out), "--profile", "A40", *more]
    return workbench(*command), out


@pytest.mark.parametrize("name", FILES)
def test_a_plan_has_the_layouts_of_the_file(tmp_path, name):
    content, strategy = FILES[name]
    result, out = planned(tmp_path, content, "--strategy", strategy, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["strategy"] == strategy
    plan = read_plan(out)
    llm = [stage for stage in plan.stages if stage.module == "llm"]
    assert [stage.layers for stage in llm] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(
    ("content", "strategy", "what"),
    [
        pytest.param("Ett|ttX", "cornstarch", "X", id="a-letter"),
        pytest.param({"module_paralelisms": {}}, "cornstarch", "module_parallelisms", id="a-key"),
        pytest.param(
            {"module_parallelisms": {"visoin": {}}}, "cornstarch", "did you mean 'vision'", id="a-module"
        ),
        pytest.param(BRIDGE, "cornstarch", "strategy megatron-heterogeneous takes it", id="a-place"),
        pytest.param(
            CORNSTARCH | {"modality_parallelism": "replicated"},
            "cornstarch",
            "nearest: --strategy encoders-replicated",
            id="a-placing",
        ),
        pytest.param(
            "[1, 2]", "cornstarch", "want keys and values, or a layout string, got list", id="a-list"
        ),
        pytest.param("{", "cornstarch", "not YAML", id="no-yaml"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_choice(tmp_path, content, strategy, what):
    result, out = planned(tmp_path, content, "--strategy", strategy)
    assert result.exit_code == 2
    assert what in result.output.replace("\n", " ")
    assert not out.exists()


def test_a_search_takes_the_file_too(tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text(yaml.safe_dump(CORNSTARCH))
    result = accept("search", str(EXAMPLE), "--layout", str(file), "--profile", "A40", "--json")
    found = {c["strategy"]: c for c in json.loads(result.stdout.splitlines()[-1])["candidates"]}
    assert found["cornstarch"]["ranks"] == 4


def test_every_strategy_stands_in_a_placing():
    known = {strategy for strategies in PLACINGS.values() for strategy in strategies}
    shared = {"dip", "megatron-colocated", "megatron-homogeneous", "fsdp", "hsdp"}
    assert set(BY_NAME) - known == shared  # their encoders are nowhere a specification says


def test_every_placing_means_one_strategy_that_puts_encoders_there():
    meant = [spec for spec in BY_NAME.values() if spec.stands_for_placing]
    assert sorted(spec.placing for spec in meant) == sorted(EncoderPlacing)
    assert {placing: PLACINGS[placing][0] for placing in PLACINGS} == {s.placing: s.name for s in meant}


def test_an_error_names_the_file_once(tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text("- 1")
    with pytest.raises(ValueError, match="want keys") as error:
        with_layout_file(load_job(EXAMPLE), file)
    assert str(error.value).count(str(file)) == 1
    with pytest.raises(ValueError, match="want keys"):
        content_of(file)
