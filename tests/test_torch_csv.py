"""Linear schedules are torch's own, and torch loads our files."""

import csv
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from tests.test_schedule import chain
from workbench.schedule.action import STEP, Pass, parse_action
from workbench.schedule.graph_aware import graph_aware_1f1b
from workbench.schedule.one_f_one_b import gpipe, one_f_one_b
from workbench.schedule.torch_csv import to_torch_csv
from workbench.schedule.zero_bubble import zb_h1_interleaved, zb_h2


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


def text_of(programs):
    """The file of programs whose stages have their positions in the chain as numbers."""
    stages = {action.stage for actions in programs for action in actions if action.stage is not None}
    return to_torch_csv(programs, {stage: stage for stage in stages})


def loaded(path, num_stages, num_ranks, num_microbatches):
    """Passes of each rank as torch's runtime has them: parsed, validated, lowered to communication."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime.pp_group_size = {}, num_ranks
    runtime._num_stages, runtime._n_microbatches, runtime._stages = num_stages, num_microbatches, []
    runtime.stage_index_to_group_rank, runtime._defer_pp_recv = {}, False
    runtime._load_csv(str(path), format="compute_only")
    return [
        [str(a) for a in actions if a.is_compute_op] for actions in runtime.pipeline_order_with_comms.values()
    ]


@given(st.integers(1, 6), st.integers(1, 9))
def test_torch_reads_and_validates_our_file(num_stages, num_microbatches):
    text = text_of(list(programs_1f1b(num_stages, num_microbatches).values()))
    read = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    stage_to_rank = torch_schedules._validate_schedule(read, num_stages, num_stages, num_microbatches)
    assert stage_to_rank == {stage: stage for stage in range(num_stages)}


def zb_h1(stages, num_microbatches):
    return zb_h1_interleaved(stages, len(stages), num_microbatches)


@pytest.mark.parametrize("chain_of", [one_f_one_b, gpipe, zb_h1, zb_h2])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8), (3, 2)])
def test_torchs_runtime_loads_our_file(tmp_path, chain_of, num_stages, num_microbatches):
    path = tmp_path / "schedule.csv"
    programs = chain_of(range(num_stages), num_microbatches)
    path.write_text(text_of(programs))
    ours = [[str(action) for action in actions] for actions in programs]
    assert loaded(path, num_stages, num_stages, num_microbatches) == ours


def two_blocks():
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(2)]
    return [torch.nn.Sequential(*each).double() for each in layers]


def squares(out, target):
    return ((out - target) ** 2).sum()


def train_a_stage(place, path):
    """One rank of two, by torch's runtime; its gradients against those of both blocks in one process."""
    rank = place.process
    generator = torch.Generator().manual_seed(1)
    x_BD, target_BD = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    block, whole = two_blocks()[rank], two_blocks()
    stage = PipelineStage(block, rank, 2, torch.device("cpu"))
    schedule = torch_schedules._PipelineScheduleRuntime([stage], 4, loss_fn=squares, scale_grads=False)
    schedule._load_csv(path)
    _ = schedule.step(x_BD) if rank == 0 else schedule.step(target=target_BD)
    squares(whole[1](whole[0](x_BD)), target_BD).backward()
    for ours, theirs in zip(block.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_torchs_runtime_trains_by_our_file(pool, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(text_of(zb_h1(range(2), 4)))
    pool.run(train_a_stage, 2, str(path))


def test_only_passes_of_the_chain_are_written_by_position():
    actions = (*map(parse_action, ["4ALL_GATHER0", "4F0", "9F0", "4I0", "4W0", "4REDUCE_GRAD"]), STEP)
    assert to_torch_csv([actions], {4: 0}) == "0F0,0I0,0W0\n"
