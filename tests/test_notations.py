"""Other systems' layout notations say what a job's layouts say, or refuse to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cli.app import app
from workbench.cost.hardware import Link, Node, uniform
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.job.notations import layout_string, torchtitan
from workbench.job.notations.bridge import read_parallelisms, write_parallelisms
from workbench.job.notations.cornstarch import (
    MultimodalSpec,
    ParallelSpec,
    layouts_of,
    read_spec,
    spec_of,
    write_spec,
)
from workbench.job.notations.job_layouts import Notation, notation_of, read_layouts, write_layouts

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"
SIZES = st.integers(1, 8)
STAGES = st.lists(st.integers(1, 9), min_size=1, max_size=40).filter(lambda counts: sum(counts) > 1)


def tiny_job(**changes: Any) -> Job:
    link = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
    node = Node(device="toy", num_ranks=64, memory_bytes=2**34)
    cluster = uniform("toy", node, num_nodes=1, intra=link, inter=link)
    return Job(**{"name": "tiny", "model": tiny_valm(), "cluster": cluster, "batch": tiny_batch(), **changes})


@st.composite
def module_layouts(draw: st.DrawFn) -> tuple[ModuleLayout, ...]:
    """Of the tiny model, all degrees given, one module after the other or all on the same ranks."""
    found = []
    for name in ("vision", "audio", "llm"):
        sizes = {key: draw(SIZES) for key in ("pp", "tp", "cp", "dp")}
        found.append(ModuleLayout(module=name, rank_offset=draw(st.integers(0, 99)), **sizes))
    return tuple(found)


@given(module_layouts())
def test_bridge_round_trip(layouts: tuple[ModuleLayout, ...]) -> None:
    names = [layout.module for layout in layouts]
    assert read_parallelisms(write_parallelisms(layouts), modules=names, llm="llm") == layouts


def test_bridge_writes_open_offsets_and_reads_its_own_words() -> None:
    layouts = (ModuleLayout(module="vision", pp=1, tp=2), ModuleLayout(module="llm", pp=2, cp=2))
    written = write_parallelisms(layouts, dp=2)["module_parallelisms"]
    assert [written[name]["rank_offset"] for name in written] == [0, 4]
    held = {
        "module_parallelisms": {"language": {"tensor_model_parallel_size": 4, "data_parallel_size": None}}
    }
    assert read_parallelisms(held, modules=["vision", "llm"], llm="llm") == (
        ModuleLayout(module="llm", pp=1, tp=4, rank_offset=0),
    )


@given(STAGES)
def test_layout_string_round_trip(stages: list[int]) -> None:
    text = layout_string.layout_string(stages)
    assert layout_string.stage_layers_of(text, num_blocks=sum(stages) - 2) == tuple(stages)


@given(STAGES)
def test_torchtitan_round_trip(stages: list[int]) -> None:
    parts = torchtitan.parts_of(stages)
    assert torchtitan.stage_layers_of(parts, num_blocks=sum(stages) - 2) == tuple(stages)
    assert len({name for part in parts for name in part}) == sum(stages) + 1


@given(
    st.dictionaries(st.sampled_from(["vision", "audio"]), st.tuples(SIZES, SIZES, SIZES)),
    st.tuples(SIZES, SIZES, SIZES),
)
def test_cornstarch_round_trips(encoders: dict[str, tuple[int, int, int]], llm: tuple[int, int, int]) -> None:
    def one(sizes: tuple[int, int, int]) -> ParallelSpec:
        return ParallelSpec(tp_size=sizes[0], cp_size=sizes[1], pp_size=sizes[2])

    spec = MultimodalSpec(
        encoder_specs={name: one(sizes) for name, sizes in encoders.items()}, language_model_spec=one(llm)
    )
    assert read_spec(write_spec(spec)) == spec
    layouts = layouts_of(spec, encoders=list(encoders), llm="llm")
    assert spec_of(layouts, llm="llm") == spec
    nested = MultimodalSpec(encoder_specs={"senses": replace(spec, language_model_spec=None)}, dp_size=3)
    assert read_spec(write_spec(nested)) == nested


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        pytest.param("Et*3|(tt|)*29L", (4, *[2] * 29, 1), id="megatron's-example-without-m"),
        pytest.param("EtttL", (5,), id="one-stage"),
        pytest.param("Ett,|,(t*2,|)*2,tL", (3, 2, 2, 2), id="commas-and-factors-in-groups"),
        pytest.param("E(t|t)*3|L", (2, 2, 2, 1, 1), id="a-group-across-stages"),
        pytest.param("E|t|L", (1, 1, 1), id="ends-alone"),
    ],
)
def test_layout_strings_as_megatron_reads_them(text: str, stages: tuple[int, ...]) -> None:
    assert layout_string.stage_layers_of(text) == stages


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Et*3|(tt|)*29,m|L", "at 15: no model here has multi-token-prediction"),
        ("Etx|tL", "at 3: no layer is called 'x'; there are"),
        ("eT|tL", "at 1: no layer is called 'e'; did you mean 'E'"),
        ("Et|T L", "at 4: no layer is called 'T'; did you mean 't'"),
        ("E(tt|L", "at 2: this group is not closed"),
        ("E((t)*2|)*2L", "at 3: groups do not nest"),
        ("E(t|)tL", "at 5: a group wants a factor; nearest: '\\)\\*1'"),
        ("E()*2L", "at 2: this group is empty"),
        ("Et*|L", "at 3: '\\*' wants a factor of 1 to 100000; nearest: '\\*1'"),
        ("Et*0L", "at 3: '\\*' wants a factor"),
        ("Et*99999999999999L", "nearest: '\\*100000'"),
        ("E(t*100000|)*2L", "at 12: want at most 100000"),
        ("Et*2*2L", "at 5: no layer is called '\\*'"),
        ("Et||tL", "at 4: a stage wants at least one layer"),
        ("|EtL", "at 1: a stage wants at least one layer"),
        ("EtL|", "at 4: the last stage has no layer"),
        ("tEL", "at 1: the first layer must be 'E'"),
        ("EtE|tL", "at 3: 'E' must stand once"),
        ("Et|tLt", "at 6: the last layer must be 'L'"),
        ("", "there is no layer"),
    ],
)
def test_layout_strings_with_an_error_name_the_place(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        layout_string.stage_layers_of(text)


@given(st.text("Etm L|*()0123,x", max_size=24))
def test_any_string_is_read_or_refused(text: str) -> None:
    try:
        stages = layout_string.stage_layers_of(text)
    except ValueError:
        return
    assert layout_string.stage_layers_of(layout_string.layout_string(stages)) == stages


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (["tok_embeddings"], "part 0: want a list"),
        ([["tok_embeddings", "layers.1"]], "part 0, name 1: want 'layers.0' next, got 'layers.1'"),
        ([["tok_embedings"]], "did you mean 'tok_embeddings'"),
        (
            [["tok_embeddings", "layers.0", "layers.1", "norm"], ["output"]],
            "are one layer; put both in one part",
        ),
        ([["tok_embeddings", "layers.0"], []], "part 1: want a list of at least one"),
        ([["tok_embeddings", "layers.0"]], "ends before 'layers.1'"),
        (
            [["tok_embeddings", "layers.0", "layers.1", "norm", "lm_head", "norm"]],
            "stands behind the last one",
        ),
        ("norm", "want a list of lists"),
    ],
)
def test_torchtitan_parts_with_an_error(parts: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        torchtitan.stage_layers_of(parts, num_blocks=2)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"module_paralelisms": {}}, "did you mean 'module_parallelisms'"),
        ({"module_parallelisms": {"visoin": {}}}, "did you mean 'vision'"),
        ({"module_parallelisms": {"llm": {}, "language": {}}}, "both stand for module 'llm'"),
        ({"module_parallelisms": {"llm": {"tensor_parallel_size": 2}}}, "tensor_model_parallel_size"),
        (
            {"module_parallelisms": {"llm": {"rank_offset": -1}}},
            "llm.rank_offset: want a whole number from 0",
        ),
        ({"module_parallelisms": {"llm": {"expert_tensor_parallel_size": 2}}}, "distributed expert is whole"),
        ({"module_parallelisms": [1]}, "want keys and values"),
        ({"encoder_specs": {"vison": {}}}, "did you mean 'vision'"),
        ({"encoder_specs": {"vision": {"tp_size": "2"}}}, "encoder_specs.vision.tp_size: want a whole"),
        ({"encoder_specs": {}, "dp_size": 2}, "dp_size is 2, the job's batch makes it 1"),
        ({"encoder_specs": {}, "modality_parallelism": "paralel"}, "did you mean 'parallel'"),
        (
            {"encoder_specs": {"vision": {"encoder_specs": {}, "language_model_spec": {}}}},
            "a group has no language model",
        ),
        (
            {"pipeline_model_parallel_layout": "Et|tL"},
            "2 transformer layers, the model 4: nearest is 2 't' more",
        ),
        (
            {"pipeline_model_parallel_layout": "Et|tt|tL", "pipeline_model_parallel_size": 2},
            "3 stages do not lie evenly on pp = 2",
        ),
        ({"pipeline_model_parallel_layout": ["E"]}, "want a layout string"),
        ({"layouts": {"lm": {}}}, "did you mean 'llm'"),
        ({"layouts": {"llm": {"tp": 0}}}, "layouts.llm.tp"),
        ({"layouts": {"llm": {"ttp": 1}}}, "did you mean 'tp'"),
        ({"layouts": {}, "encoder_specs": {}}, "want the keys of one notation"),
        ({}, "got nothing"),
    ],
)
def test_bad_content_is_named(content: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_layouts(content, tiny_job())


LAYOUTS = (
    ModuleLayout(module="vision", pp=2, tp=2),
    ModuleLayout(module="audio", pp=1),
    ModuleLayout(module="llm", pp=2, tp=2),
)


@pytest.mark.parametrize("notation", Notation)
def test_a_job_says_its_layouts_in_every_notation(notation: Notation) -> None:
    """What is written is read back as the same layouts of the same job."""
    is_cut = notation in (Notation.MEGATRON, Notation.TORCHTITAN)
    llm = replace(LAYOUTS[-1], stage_layers=(2, 4)) if is_cut else LAYOUTS[-1]
    job = tiny_job(layouts=(*LAYOUTS[:-1], llm))
    content = yaml.safe_load(yaml.safe_dump(write_layouts(job, notation)))
    assert notation_of(content) is notation
    read = read_layouts(content, job)
    if notation is not Notation.BRIDGE:
        assert read == job.layouts
    else:
        assert [each.rank_offset for each in read] == [0, 4, 5]
        assert tuple(replace(each, rank_offset=None, dp=None) for each in read) == job.layouts


@pytest.mark.parametrize(
    ("notation", "llm", "what"),
    [
        (Notation.BRIDGE, {"stage_layers": (3, 3)}, "cannot express stage_layers of 'llm'"),
        (Notation.BRIDGE, {"pp": None}, "leaves it open"),
        (Notation.MEGATRON, {}, r"has no stage_layers; nearest: stage_layers: \[3, 3\]"),
        (Notation.TORCHTITAN, {"pp": 4}, r"nearest: stage_layers: \[2, 2, 1, 1\]"),
        (Notation.MEGATRON, {"pp": None}, r"nearest: stage_layers: \[6\]"),
        (Notation.MEGATRON, {"stage_layers": (3, 3), "dp": 2}, "cannot express dp of 'llm', got 2"),
        (Notation.TORCHTITAN, {"stage_layers": (3, 3), "rank_offset": 8}, "cannot express rank_offset"),
        (Notation.CORNSTARCH, {"dp": 2}, "cannot express dp"),
        (Notation.CORNSTARCH, {"pp": None}, "leaves pp open"),
    ],
)
def test_what_a_notation_cannot_say_is_refused(notation: Notation, llm: dict[str, Any], what: str) -> None:
    job = tiny_job(layouts=(*LAYOUTS[:-1], replace(LAYOUTS[-1], **llm)))
    with pytest.raises(ValueError, match=what):
        write_layouts(job, notation)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("notation", [Notation.MEGATRON, Notation.TORCHTITAN])
def test_the_nearest_cut_can_be_written(notation: Notation, pp: int) -> None:
    job = tiny_job(layouts=(*LAYOUTS[:-1], replace(LAYOUTS[-1], pp=pp)))
    with pytest.raises(ValueError, match="nearest") as refused:
        write_layouts(job, notation)
    cuts = tuple(json.loads(str(refused.value).rsplit(": ", 1)[1]))
    job = tiny_job(layouts=(*LAYOUTS[:-1], replace(LAYOUTS[-1], pp=pp, stage_layers=cuts)))
    assert read_layouts(write_layouts(job, notation), job)[-1].stage_layers == cuts


def test_the_command_takes_and_gives_notations(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(EXAMPLE.read_text(), encoding="utf-8")
    (tmp_path / "layout.txt").write_text("Et*3|tL", encoding="utf-8")
    run = CliRunner().invoke
    cut = tmp_path / "cut.yaml"
    done = run(app, ["layout", str(job), "--from", str(tmp_path / "layout.txt"), "-o", str(cut)])
    assert done.exit_code == 0, done.output
    assert load_job(cut).layouts[-1] == ModuleLayout(module="llm", pp=2, stage_layers=(4, 2))
    shown = run(app, ["layout", str(cut), "--to", "megatron"])
    assert yaml.safe_load(shown.output)["pipeline_model_parallel_layout"] == "Et*3|tL"
    told = run(app, ["layout", str(job), "--to", "bridge", "--json"])
    assert '"rank_offset": 2' in told.output.splitlines()[-1]
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        yaml.safe_dump({"encoder_specs": {}, "modality_parallelism": "colocated"}), encoding="utf-8"
    )
    said = run(app, ["layout", str(job), "--from", str(spec)])
    assert said.output.splitlines()[-1].endswith("use --strategy encoders-colocated-frozen-aware")
    (tmp_path / "layout.txt").write_text("Et*3|tx", encoding="utf-8")
    refused = run(app, ["layout", str(job), "--from", str(tmp_path / "layout.txt")])
    assert refused.exit_code == 2
    assert "at 7: no layer is called 'x'" in refused.stderr
    refused = run(app, ["layout", str(job), "-o", str(tmp_path / "x" / "y.yaml")])
    assert refused.exit_code == 2
    assert "a job's paths are relative to it" in refused.stderr


def test_a_job_s_own_notation_shows_settings_beside_degrees() -> None:
    """An export from a job with sharded optimizer state is not shown without it."""
    shown = CliRunner().invoke(app, ["layout", str(EXAMPLE.parent / "moe-vlm-64-h100" / "job.yaml")])
    llm = yaml.safe_load(shown.stdout)["layouts"]["llm"]
    assert llm == {"sharding": "optimizer", "pp": 4, "ep": 8}
