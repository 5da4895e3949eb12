"""Linear schedules are torch's own, and torch loads our files."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from tests.test_schedule import chain
from workbench.schedule.action import STEP, Pass, parse_action
from workbench.schedule.graph_aware import graph_aware_1f1b
from workbench.schedule.one_f_one_b import gpipe, one_f_one_b
from workbench.schedule.torch_csv import Letters, from_torch_csv, to_torch_csv


def linear(num_stages):
    return {stage: [stage + 1] if stage + 1 < num_stages else [] for stage in range(num_stages)}


def programs_1f1b(num_stages, num_microbatches):
    nodes = chain(num_stages, num_microbatches)
    return graph_aware_1f1b(nodes, [(stage,) for stage in range(num_stages)])


def torch_order(kind, num_stages, num_microbatches):
    """The order of one of torch's own schedules; its constructor wants process groups, its order does not."""
    schedule = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_microbatches
    order = schedule._get_pipeline_order()
    return [[str(a) for a in order[rank] if a is not None] for rank in range(num_stages)]


def torch_1f1b_rank(num_stages, num_microbatches, rank):
    """torch's generator for one stage per rank, which all its interleaved schedules use."""
    warmup = min(num_stages - 1 - rank, num_microbatches)
    actions = torch_schedules._get_1f1b_rank_ops(
        1, num_stages, warmup, num_microbatches - warmup, warmup, rank, lambda _: rank, lambda _: rank
    )
    return [str(a) for a in actions if a is not None]


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 13])
def test_generated_1f1b_is_torchs(num_stages, num_microbatches):
    programs = programs_1f1b(num_stages, num_microbatches)
    for rank, actions in enumerate(programs.values()):
        assert [str(a) for a in actions] == torch_1f1b_rank(num_stages, num_microbatches, rank)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (3, 5), (4, 8), (6, 13)])
def test_closed_forms_are_torchs_schedules(num_stages, num_microbatches):
    reduces = [f"{stage}REDUCE_GRAD" for stage in range(num_stages)]
    theirs = torch_order(torch_schedules.ScheduleGPipe, num_stages, num_microbatches)
    ours = gpipe(range(num_stages), num_microbatches)
    assert [[*map(str, actions), last] for actions, last in zip(ours, reduces, strict=True)] == theirs

    theirs = torch_order(torch_schedules.Schedule1F1B, num_stages, num_microbatches)
    ours = one_f_one_b(range(num_stages), num_microbatches)
    assert [[*map(str, a), last] for a, last in zip(ours, reduces, strict=True)][:-1] == theirs[:-1]
    # torch 2.13 counts the last stage's forwards from 1 (its warm-up is empty there); it runs m of them
    shifted = [f"{a.stage}F{a.microbatch + 1}" if a.kind is Pass.F else str(a) for a in ours[-1]]
    assert theirs[-1] in ([*shifted, reduces[-1]], [*map(str, ours[-1]), reduces[-1]])


@given(st.integers(1, 6), st.integers(1, 9))
def test_torch_reads_and_validates_our_file(num_stages, num_microbatches):
    text = to_torch_csv(programs_1f1b(num_stages, num_microbatches), linear(num_stages))
    read = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    stage_to_rank = torch_schedules._validate_schedule(read, num_stages, num_stages, num_microbatches)
    assert stage_to_rank == {stage: stage for stage in range(num_stages)}


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8), (3, 2)])
def test_torchs_runtime_loads_our_file(tmp_path, num_stages, num_microbatches):
    """`_PipelineScheduleRuntime._load_csv` parses, validates and lowers it to communication."""
    path = tmp_path / "schedule.csv"
    path.write_text(to_torch_csv(programs_1f1b(num_stages, num_microbatches), linear(num_stages)))
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime.pp_group_size = {}, num_stages
    runtime._num_stages, runtime._n_microbatches, runtime._stages = num_stages, num_microbatches, []
    runtime.stage_index_to_group_rank, runtime._defer_pp_recv = {}, False
    runtime._load_csv(str(path), format="compute_only")
    computed = {
        rank: [str(a) for a in actions if a.is_compute_op]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    ours = programs_1f1b(num_stages, num_microbatches)
    assert list(computed.values()) == [[str(a) for a in actions] for actions in ours.values()]


@given(st.integers(1, 5), st.integers(1, 8))
def test_files_round_trip(num_stages, num_microbatches):
    programs = programs_1f1b(num_stages, num_microbatches)
    assert from_torch_csv(to_torch_csv(programs, linear(num_stages))) == programs


def test_only_passes_are_written():
    programs = {(0, 1): (*map(parse_action, ["0ALL_GATHER0", "0F0", "0I0", "0W0", "0REDUCE_GRAD"]), STEP)}
    assert to_torch_csv(programs, {0: []}) == "0F0,0I0,0W0\n"


def test_idle_cells_are_passed_over():
    assert from_torch_csv("0F0,,0B0\n,1F0,1B0\n") == {
        (0,): (parse_action("0F0"), parse_action("0B0")),
        (1,): (parse_action("1F0"), parse_action("1B0")),
    }


def test_zero_bubble_letters():
    """Their B is the input gradient, their BW the full backward."""
    read = from_torch_csv("0F0,0B0,0W0,0F1,0BW1", Letters.ZERO_BUBBLE)
    assert [str(a) for a in read[(0,)]] == ["0F0", "0I0", "0W0", "0F1", "0B1"]
    read = from_torch_csv("0F0,0I0,0W0,0F1,0B1", Letters.TORCH)
    assert [str(a) for a in read[(0,)]] == ["0F0", "0I0", "0W0", "0F1", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0BW0", "line 1, cell 2: bad action '0BW0'"),
        ("0F0\n0SEND_F0", "line 2, cell 1: '0SEND_F0' is communication; want torch's format compute_only"),
    ],
)
def test_bad_files_name_the_cell(text, message):
    with pytest.raises(ValueError, match=message):
        from_torch_csv(text)


@pytest.mark.parametrize(
    ("programs", "consumers", "message"),
    [
        (
            programs_1f1b(3, 2),
            {0: [2], 1: [2], 2: []},
            r"linear plans, where stage 0 feeds \[1\]; here it feeds \[2\]",
        ),
        ({}, {0: [2], 2: []}, r"number stages 0..1, got \[0, 2\]"),
        (
            {(0,): one_f_one_b([0], 3)[0], (1,): one_f_one_b([1], 2)[0]},
            linear(2),
            "equal microbatches: stage 0 has 3, stage 1 has 2",
        ),
        (
            {(0,): (parse_action("0F0"),), (1,): one_f_one_b([1], 1)[0]},
            linear(2),
            "every microbatch a backward: stage 0 has 1 forwards and 0 backwards",
        ),
        (
            {(0,): one_f_one_b([0], 1)[0], (1,): one_f_one_b([0], 1)[0]},
            linear(1),
            r"stage 0 to one pipeline rank, here it is also on \(1,\)",
        ),
    ],
)
def test_what_torch_cannot_say_is_refused_with_the_reason(programs, consumers, message):
    with pytest.raises(ValueError, match=message):
        to_torch_csv(programs, consumers)
