"""Recomputation of some layers as users and searches choose it, and as other systems take it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sim.predict import IterationJudge
from tests.command_line import refuse
from tests.job_files import put, write
from tests.test_export_folders import JOBS, plan_of, prices_of
from tests.vlm_job import H100, most_bytes, planned, vlm_job
from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.export.export import export
from workbench.export.folder import MARK
from workbench.export.registry import BY_NAME
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.recomputed_layers import recomputed_of
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_search import fastest_layout
from workbench.planner.stage_counts import silent
from workbench.report.joint_tables import described_moves
from workbench.search.joint.choice import choice_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.move import Space
from workbench.search.joint.move_json import move_from_json, move_to_json
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep, keep_of
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS

BLOCKS, FULL, NONE = Recompute.BLOCKS, Recompute.FULL, Recompute.NONE
LAYERS = ("layouts", "llm", "recompute_layers")


def with_llm(job: Job, recompute: Recompute, count: int | None = None, **others: object) -> Job:
    """The job whose LLM recomputes this many layers, None: all."""
    changed = replace(job.settings.of("llm"), **others)  # type: ignore[arg-type]
    return replace(job, settings=job.settings.with_module(changed.recomputing(recompute, count)))


def test_a_job_file_says_how_many(tmp_path: Path) -> None:
    """The LLM has an embedding, two blocks and a head."""
    job = load_job(write(tmp_path, put(*LAYERS, value=2)))
    assert job.settings.of("llm").recompute_layers == 2
    assert recomputed_of(PLANNERS["cornstarch"](job, H100, silent), "llm") == (False, True, False, True)


def test_a_job_file_says_blocks(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, put("layouts", "llm", "recompute", value="blocks")))
    assert job.settings.of("llm") == ModuleSettings(module="llm", recompute=BLOCKS)
    assert recomputed_of(PLANNERS["cornstarch"](job, H100, silent), "llm") == (False, True, True, False)


@pytest.mark.parametrize(
    ("value", "change", "words"),
    [
        (0, "full", "layouts.llm.recompute_layers: input should be greater than or equal to 1, got 0"),
        (
            2,
            "none",
            "'llm': recompute_layers 2 wants recompute 'blocks' or 'full', got 'none'; nearest: recompute",
        ),
        (2, "blocks", "'llm': recompute_layers must be fewer than its 2 blocks, got 2; nearest: leave it"),
        (4, "full", "'llm': recompute_layers must be fewer than its 4 layers, got 4; nearest: leave it out"),
        (9, "full", "job 'small': module 'llm'|got 9; nearest: leave it out"),
    ],
)
def test_a_mistake_is_one_line(value: int, change: str, words: str, tmp_path: Path) -> None:
    def edit(data: dict[str, object]) -> None:
        put(*LAYERS, value=value)(data)
        put("layouts", "llm", "recompute", value=change)(data)

    path = write(tmp_path, edit)
    refuse("plan", path, "-o", tmp_path / "plan.json", words=words, folder=tmp_path)


def test_what_is_near_is_a_quarter_a_half_and_three() -> None:
    """Only of modules through which gradients run; near a number, an eighth more or fewer of ten layers, of
    which eight are blocks.
    """
    job = vlm_job()

    def near(job: Job) -> list[str]:
        texts = [change.about for change in neighbours(job) if change.kind is ChangeKind.ACTIVATIONS]
        return [text.split(" recompute ")[1] for text in texts if text.startswith("llm recompute")]

    quarters = ["2 blocks", "4 blocks", "6 blocks"]
    assert near(job) == [f"none -> {each}" for each in ("blocks", "full", *quarters)]
    assert near(with_llm(job, FULL)) == [f"full -> {each}" for each in ("none", "blocks", *quarters)]
    assert near(with_llm(job, BLOCKS)) == [f"blocks -> {each}" for each in ("none", "full", *quarters)]
    assert near(with_llm(job, BLOCKS, 7)) == [f"7 blocks -> {each}" for each in (*Recompute, "6 blocks")]
    assert near(with_llm(job, FULL, 5)) == [
        f"5 layers -> {each}" for each in (*Recompute, "4 layers", "6 layers")
    ]
    assert near(with_llm(job, FULL, 1)) == [f"1 layer -> {each}" for each in (*Recompute, "2 layers")]
    model = replace(
        job.model,
        modules=tuple(
            replace(module, layers=tuple(replace(layer, trainable=False) for layer in module.layers))
            for module in job.model.modules
        ),
    )
    assert near(replace(job, model=model)) == ["none -> blocks", "none -> full"]


def test_edits_leave_no_number_behind_and_searches_keep_it() -> None:
    job = with_llm(vlm_job(), FULL, 5)
    by_name = {change.about: change for change in neighbours(job)}
    assert by_name["llm recompute 5 layers -> none"].edit(job).settings.of("llm") == ModuleSettings(
        module="llm"
    )
    assert by_name["llm recompute 5 layers -> full"].edit(job).settings == with_llm(job, FULL).settings
    found = fastest_layout(job, H100, Mode.HOMOGENEOUS, num_ranks=8)
    assert job_with(job, found.choice, found.step).settings.of("llm").recompute_layers == 5


def test_a_move_keeps_and_tells_the_number() -> None:
    job = with_llm(vlm_job(), FULL, 5)
    space, choice = Space(job, H100, {}), choice_of(job, planned(job), H100)
    move = keep_of(job.settings.of("llm"))
    assert move.apply(space, choice) == choice
    assert move_from_json(move_to_json(move)) == move
    (told,) = described_moves([{"question": "memory", **move_to_json(move)}])
    assert told == ("memory", "llm: recompute 5 layers, sharding none")
    none = replace(move, recompute=NONE, recompute_layers=None)
    assert none.apply(space, choice).settings.of("llm") == ModuleSettings(module="llm")
    old = {key: value for key, value in move_to_json(none).items() if key != "recompute_layers"}
    assert move_from_json(old) == none
    assert isinstance(move, Keep)


def test_a_search_recomputes_as_many_layers_as_memory_demands() -> None:
    """Nothing recomputed does not fit, everything does, and only memory is searched."""

    def sharded(recompute: Recompute) -> Job:
        job = vlm_job()
        settings = job.settings
        for module in job.model.modules:
            own = settings.of(module.name).sharded(Sharding.OPTIMIZER)
            settings = settings.with_module(own.recomputing(recompute))
        return replace(job, settings=settings)

    least, most = (most_bytes(planned(sharded(recompute))) for recompute in (FULL, NONE))
    assert least < most
    job = sharded(FULL)
    nodes = tuple(replace(node, memory_bytes=(least + most) // 2) for node in job.cluster.nodes)
    others = (question for question in Question if question is not Question.MEMORY)
    result = joint_search(
        replace(job, cluster=replace(job.cluster, nodes=nodes)),
        H100,
        IterationJudge(H100),
        stop=Stop(candidates=40),
        scope=Scope(
            planners={"cornstarch": PLANNERS["cornstarch"]}, fixed=dict.fromkeys(others, "cornstarch")
        ),
    )
    assert result.plan.settings.of("llm").recompute_layers is not None
    assert result.value < result.best_start.value
    assert most_bytes(result.plan) <= (least + most) // 2


@pytest.mark.parametrize(
    ("target", "recompute", "count", "words", "differences"),
    [
        ("megatron", FULL, 5, "--recompute-method block\n  --recompute-num-layers 2\n", ["alone", "moved"]),
        ("megatron", BLOCKS, 4, "--recompute-method block\n  --recompute-num-layers 2\n", ["moved"]),
        ("megatron", BLOCKS, 1, "--recompute-method block\n  --recompute-num-layers 1\n", ["moved", "more"]),
        ("megatron-bridge", BLOCKS, 5, "'recompute_num_layers': 3,", ["moved", "more"]),
        ("megatron-bridge", BLOCKS, None, "'recompute_method': 'uniform',", []),
        ("megatron-bridge", FULL, None, "'recompute_method': 'uniform',", ["alone"]),
        ("torchtitan", BLOCKS, 5, "RECOMPUTE = 'full'", ["all"]),
        ("torchtitan", BLOCKS, None, "RECOMPUTE = 'full'", []),
        ("torchtitan", FULL, None, "RECOMPUTE = 'full'", ["alone"]),
    ],
)
def test_systems_recompute_no_fewer_blocks(
    target: str, recompute: Recompute, count: int | None, words: str, differences: list[str]
) -> None:
    """Two stages of eight blocks, between an embedding and a head."""
    job = with_llm(JOBS["llama"], recompute, count, sharding=Sharding.OPTIMIZER)
    files = export(plan_of(job, "megatron-heterogeneous"), BY_NAME[target], prices_of(job))
    assert any(words in content for content in files.values())
    said = [each for each in json.loads(files[MARK])["differences"] if "recomputed" in each["has"]]
    assert [each["has"] for each in said] == [TOLD[difference] for difference in differences]
    assert [each["seconds"] is None for each in said] == [difference == "moved" for difference in differences]
    for name, each in zip(differences, said, strict=True):
        assert each["seconds"] is None or (each["seconds"] < 0) == (name == "alone")


TOLD = {
    "alone": "embedding, projector or head of 'llm' recomputed with the blocks",
    "moved": "recomputed blocks spread evenly over 'llm'",
    "more": "different numbers of recomputed blocks in stages of 'llm'",
    "all": "some layers of 'llm' recomputed",
}


def test_a_tower_of_megatron_recomputes_its_first_blocks() -> None:
    """Its blocks are on one rank, so any number of them is exact."""
    job = JOBS["llava"]
    plan = plan_of(job, "megatron-islands")
    own = plan.settings.of("vision").recomputing(BLOCKS, 2)
    plan = replace(plan, settings=plan.settings.with_module(own))
    files = export(plan, BY_NAME["megatron"], prices_of(job))
    config = json.loads(files["tables.json"])["encoders"]["vision"]["config"]
    assert (config["recompute_method"], config["recompute_num_layers"]) == ("block", 2)
    said = [each["has"] for each in json.loads(files[MARK])["differences"]]
    assert [each for each in said if "recomputed" in each] == [TOLD["moved"].replace("llm", "vision")]


def test_plain_torch_recomputes_the_same_layers() -> None:
    job = replace(with_llm(JOBS["llama"], FULL, 5), layouts=(), replicas=1, microbatch_samples=1)
    _, plan = fsdp.fastest_of_size(job, cost_of(job, None, None))
    plan = replace(plan, settings=plan.settings.with_module(plan.settings.of("llm").recomputing(FULL, 5)))
    files = export(plan, BY_NAME["fsdp2"], prices_of(job))
    assert json.loads(files["fsdp2.json"])["recompute"] == {"llm": [3, 7, 10, 14, 17]}
    assert not re.search("recomput", " ".join(each["has"] for each in json.loads(files[MARK])["differences"]))
