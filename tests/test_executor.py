"""The executor's parts: slices in and out of packed tensors, order of receives, refusals, gradients."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runtime.run_settings import TORCH_TYPE
from runtime.step.executor import Executor
from runtime.step.gradients import Gradients
from runtime.step.optimizer import OptimizerSettings, build_adamw, clip_factor, squared_norm
from runtime.step.timing import Recorder
from runtime.step.transfers import Wires, accumulate, join, pack
from runtime.world.clock import Clock
from runtime.world.device import CPU
from runtime.world.failure import RankError, first_line
from runtime.world.mesh import Mesh
from runtime.world.pool import Place, Pool
from tests.plans import disjoint_plan, sample, two_encoders
from workbench.data.sample import Item
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, GradientGroup, Lowered, Route, Slice, Transfer, Weights
from workbench.plan.plan import Plan, Precision
from workbench.schedule.action import Action, Pass, parse_action

WIDTH = 3


def row_of(number: int, slices: list[Slice]) -> Transfer:
    num_tokens = sum(piece.num_tokens for piece in slices)
    return Transfer(
        row=number,
        edge="vision>llm",
        direction=Direction.FORWARD,
        route=Route.P2P,
        producer=parse_action("0F0"),
        consumer=parse_action("1F0"),
        source_rank=0,
        destination_ranks=(1,),
        slices=tuple(slices),
        num_tokens=num_tokens,
        width=WIDTH,
        num_bytes=num_tokens * WIDTH * 4,
    )


@st.composite
def routed(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[Transfer], list[tuple[int, int]]]:
    """Items scattered over producers; the consumer wants them in an order of its own.

    Returns the producers' packed tensors, one row per producer, and for every consumer item
    where it stands: (producer, start there).
    """
    tokens = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    owners = [draw(st.integers(0, 2)) for _ in tokens]
    order = draw(st.permutations(range(len(tokens))))
    starts, ends = {}, [0, 0, 0]
    for item, owner in enumerate(owners):
        starts[item] = ends[owner]
        ends[owner] += tokens[item]
    sources = [
        torch.arange(end * WIDTH, dtype=torch.float64).reshape(end, WIDTH) + 100 * i
        for i, end in enumerate(ends)
    ]
    slices: dict[int, list[Slice]] = {}
    wanted, index = [], 0
    for item in order:
        slices.setdefault(owners[item], []).append(Slice(Item(item, 0), starts[item], index, tokens[item]))
        wanted += [(owners[item], starts[item] + token) for token in range(tokens[item])]
        index += tokens[item]
    rows = [row_of(number, pieces) for number, pieces in sorted(slices.items())]
    return sources, rows, wanted


@given(routed())
def test_join_puts_every_token_where_the_consumer_wants_it(case) -> None:
    sources, rows, wanted = case
    packed = [(row, pack(sources[row.row], row.slices)) for row in rows]
    assert all(tensor.shape == (row.num_tokens, WIDTH) for row, tensor in packed)
    expected = torch.stack([sources[owner][token] for owner, token in wanted])
    assert torch.equal(join(packed), expected)


@given(routed())
def test_accumulate_is_the_transpose_of_join(case) -> None:
    """<join(x), g> = sum over producers of <x, accumulate(g)>."""
    sources, rows, _ = case
    packed = [(row, pack(sources[row.row], row.slices)) for row in rows]
    joined = join(packed)
    gradient = torch.linspace(-1, 1, joined.numel(), dtype=torch.float64).reshape(joined.shape)
    total = 0.0
    for row in rows:
        swapped = [Slice(s.item, s.destination_start, s.source_start, s.num_tokens) for s in row.slices]
        back = row._replace(slices=tuple(swapped), direction=Direction.BACKWARD)
        returned = accumulate([(back, pack(gradient, back.slices))], sources[row.row])
        total += float((sources[row.row] * returned).sum())
    assert total == pytest.approx(float((joined * gradient).sum()), rel=1e-12, abs=1e-9)


def test_gradients_of_two_consumers_are_summed_and_unread_tokens_get_zero() -> None:
    like = torch.zeros(4, WIDTH)
    one = row_of(0, [Slice(Item(0, 0), 0, 0, 2)])
    two = row_of(1, [Slice(Item(0, 0), 0, 1, 2)])
    total = accumulate([(one, torch.ones(2, WIDTH)), (two, torch.full((2, WIDTH), 2.0))], like)
    assert total[:, 0].tolist() == [1.0, 3.0, 2.0, 0.0]


def test_whole_rows_are_not_copied() -> None:
    tensor = torch.randn(4, WIDTH)
    row = row_of(0, [Slice(Item(0, 0), 0, 0, 3), Slice(Item(1, 0), 3, 3, 1)])
    packed = pack(tensor, row.slices)
    assert packed.data_ptr() == tensor.data_ptr()
    assert join([(row, packed)]) is packed
    assert accumulate([(row, packed)], tensor) is packed


def test_gloo_messages_keep_what_happened() -> None:
    error = RuntimeError(
        "[/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically x\n at f"
    )
    assert first_line(error) == "Connection closed by peer [127.0.0.1]:1"
    assert first_line(RuntimeError("")) == "RuntimeError"


class Held:
    """Weights of a stage, for gradients alone."""

    shared = None

    def __init__(self, weights: dict[Weights, list[nn.Parameter]]) -> None:
        self._weights = weights

    def weights(self) -> dict[Weights, list[nn.Parameter]]:
        return self._weights


def parameter(value: float, gradient: float | None, size: int = 2) -> nn.Parameter:
    made = nn.Parameter(torch.full((size,), value))
    if gradient is not None:
        made.grad = torch.full((size,), gradient)
    return made


def lowered_with(
    plan: Plan, groups: list[GradientGroup], reductions: dict[Action, tuple[int, ...]]
) -> Lowered:
    return replace(lower(plan), groups=tuple(groups), reductions=reductions)


def a_plan() -> Plan:
    return disjoint_plan(
        two_encoders(), [sample(0), sample(1)], {"vision": (3,), "audio": (2,), "llm": (2, 2)}
    )


OWN, TIED = Weights("llm", 0), Weights("llm", None, "embed_tokens.weight")


def test_copies_on_one_rank_share_one_gradient_and_missing_ones_are_zero() -> None:
    first, second, idle = parameter(1.0, 0.5), parameter(1.0, 0.25), parameter(3.0, None)
    stages = [Held({TIED: [first]}), Held({TIED: [second], OWN: [idle]})]
    mesh = Mesh(rank=0, ranks=(0,), device=torch.device("cpu"))
    gradients = Gradients(lowered_with(a_plan(), [], {}), mesh, stages, recorder=Recorder(0))
    gradients.finish()
    for copy in (first, second):
        assert copy.grad is not None
        assert copy.grad.tolist() == [0.75, 0.75]
    assert idle.grad is not None
    assert idle.grad.tolist() == [0.0, 0.0]
    assert len(list(gradients.parameters())) == 3


def reduce_on(place: Place) -> tuple[list[float], list[float]]:
    """Two ranks hold a tied weight, the second rank twice; each also has a weight of its own."""
    rank = place.process
    copies = [parameter(1.0, 1.0 + rank) for _ in range(1 + rank)]
    own = parameter(0.0, 3.0 + rank)
    stages = [Held({TIED: [copy]}) for copy in copies] + [Held({Weights("llm", 1 + rank): [own]})]
    groups = [
        GradientGroup(index=0, ranks=(0, 1), weights=(TIED,), num_elements=2),
        GradientGroup(index=1, ranks=(0,), weights=(Weights("llm", 1),), num_elements=2),
        GradientGroup(index=2, ranks=(1,), weights=(Weights("llm", 2),), num_elements=2),
    ]
    action = Action(0, Pass.REDUCE_GRAD)
    mesh = Mesh(
        rank=rank, ranks=(0, 1), device=torch.device("cpu"), reduction={(0, 1): dist.new_group([0, 1])}
    )
    recorder = Recorder(rank)
    gradients = Gradients(lowered_with(a_plan(), groups, {action: (0,)}), mesh, stages, recorder=recorder)
    gradients.reduce(action)
    gradients.finish()
    whole = [float(copy.grad[0]) for copy in copies if copy.grad is not None]
    gradients.clip(1.0)
    clipped = [float(held.grad[0]) for held in gradients.parameters() if held.grad is not None]
    return whole, clipped


def test_groups_sum_over_ranks_and_copies_and_count_once_in_the_norm(pool: Pool) -> None:
    # The tied gradient is 1 (rank 0) + 2 + 2 (two copies on rank 1) = 5; the others are 3 and 4.
    norm = (2 * (5.0**2 + 3.0**2 + 4.0**2)) ** 0.5
    for rank, (whole, clipped) in enumerate(pool.run(reduce_on, 2)):
        assert whole == [5.0] * (1 + rank)
        assert clipped == pytest.approx([*(5.0 / norm,) * (1 + rank), (3.0 + rank) / norm], rel=1e-5)


def executor_of(lowered: Lowered, rank: int) -> Executor:
    recorder = Recorder(rank)
    mesh = Mesh(rank=rank, ranks=lowered.plan.ranks, device=torch.device("cpu"))
    wires = Wires(lowered, mesh, dtype=torch.float32, recorder=recorder)
    wires.close()
    return Executor(
        lowered,
        rank,
        modules={},
        feed={},
        wires=wires,
        gradients=Gradients(lowered, mesh, [], recorder=recorder),
        recorder=recorder,
        optimizer=OptimizerSettings(),
        loss_scale=1.0,
    )


def test_what_no_rank_can_execute_is_refused() -> None:
    plan = a_plan()
    program = next(program for program in plan.programs if 3 in program.ranks)
    gathered = replace(program, actions=(Action(3, Pass.ONLOAD), *program.actions))
    programs = tuple(gathered if p is program else p for p in plan.programs)
    lowered = replace(lower(plan), plan=replace(plan, programs=programs))
    message = "rank 3: 3ONLOAD onloads a stage that is not offloaded"
    with pytest.raises(ValueError, match=message):
        executor_of(lowered, 3)


def receive_ahead(place: Place) -> list[int]:
    """Rank 1 asks for row 2 alone; rank 0 sends 0, 1, 2 in order."""
    rows = [row_of(number, [Slice(Item(0, 0), 0, 0, 2)])._replace(row=number) for number in range(4)]
    lowered = replace(lower(a_plan()), transfers=tuple(rows))
    mesh = Mesh(rank=place.process, ranks=(0, 1), device=torch.device("cpu"))
    wires = Wires(lowered, mesh, dtype=torch.float32, recorder=Recorder(place.process))
    wires.start_step()
    taken: list[int] = []
    if place.process == 0:
        for number in range(4):
            wires.give(number, torch.full((2, WIDTH), float(number)))
    else:
        wires.post([2], 0.0)
        posted = sorted(wires._posted)
        assert posted == [0, 1, 2]
        taken = [int(wires.take(number, parse_action("1F0"))[1][0, 0]) for number in (2, 0, 1)]
        wires.post([3], 0.0)
        taken.append(int(wires.take(3, parse_action("1F0"))[1][0, 0]))
    wires.finish_step()
    wires.close()
    return taken


def test_receives_are_posted_in_the_senders_order(pool: Pool) -> None:
    assert pool.run(receive_ahead, 2)[1] == [2, 0, 1, 3]


def wait_in_vain(place: Place) -> str:
    lowered = replace(lower(a_plan()), transfers=(row_of(0, [Slice(Item(0, 0), 0, 0, 2)]),))
    mesh = Mesh(rank=place.process, ranks=(0, 1), device=torch.device("cpu"), clock=Clock(0.5))
    wires = Wires(lowered, mesh, dtype=torch.float32, recorder=Recorder(place.process))
    wires.start_step()
    if place.process == 0:
        return ""
    wires.post([0], 0.0)
    try:
        wires.take(0, parse_action("1F0"))
    except RankError as error:
        return f"{error} {error.peers}"
    return "arrived"


def test_a_wait_ends_with_rank_action_row_and_peer(pool: Pool) -> None:
    message = pool.run(wait_in_vain, 2)[1]
    assert message.startswith("rank 1 before 1F0: row 0 (vision>llm, 0F0 to 1F0) from rank 0: ")
    assert message.endswith("(0,)")


def test_adamw_and_clipping_are_torchs() -> None:
    ours, theirs = parameter(1.0, 0.3, 4), parameter(1.0, 0.3, 4)
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.2)
    optimizer = build_adamw([ours], settings)
    assert optimizer is not None
    optimizer.step()
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.2).step()
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert build_adamw([], settings) is None
    held = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert float(squared_norm(held, CPU)) == 25.0
    weights = [nn.Parameter(torch.zeros(1)) for _ in held]
    for weight, gradient in zip(weights, held, strict=True):
        weight.grad = gradient.clone()
    nn.utils.clip_grad_norm_(weights, 1.0)
    assert weights[0].grad is not None
    assert float(weights[0].grad) == pytest.approx(3.0 * clip_factor(squared_norm(held, CPU), 1.0), rel=1e-6)
    assert clip_factor(torch.tensor(0.25), 1.0) == 1.0


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="clipping norm must be > 0 and finite, or None, got 0"):
        OptimizerSettings(clip_norm=0.0)
    with pytest.raises(ValueError, match="learning rate must be > 0"):
        OptimizerSettings(learning_rate=0.0)
    assert {TORCH_TYPE[precision].itemsize for precision in Precision} == {8, 4, 2}
