"""Sequence parallelism, and products in pieces."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from experiments.fidelity.memory import measure
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.emulation.emulate import emulate
from runtime.parallel.context.group import Pending
from runtime.parallel.tensor.group import TensorGroup
from runtime.parallel.tensor.pieces import summed_in_pieces
from runtime.run_settings import RunSettings
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.pool import Pool
from tests.plans import LINK, disjoint_plan, finish
from tests.test_parity import assert_parity, assert_same, execute
from tests.test_tensor_parallel import (
    CONFIGS,
    ONE,
    encoders,
    laid_out,
    sequence_parallel,
    text_plan,
)
from tests.tiny_models import whole_batch
from workbench.cost.collectives import all_gather_s, all_reduce_s
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.cost.roofline import Grid, placed_messages
from workbench.data.sample import Sample, Segment
from workbench.memory.account import memory_table, moved_bytes
from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings, Sharding
from workbench.plan.runnable import check_whole_backwards
from workbench.plan.sequence import TokenBorders, token_borders
from workbench.plan.work import work_of
from workbench.schedule.action import parse_action
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.price import price


def test_parts_of_the_optimizer_have_whole_gradients_of_norms(pool: Pool) -> None:
    """Two replicas, each updating half of every layer, norms included."""
    layouts = {"image": ONE, "audio": ONE, "llm": (2, 1, 1, 2)}
    plan = sequence_parallel(laid_out(encoders(), layouts), sharding=Sharding.OPTIMIZER)
    result, reference = execute(plan, pool, clip_norm=0.01)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def test_fewer_tokens_than_ranks(pool: Pool) -> None:
    """Three tokens on four ranks: one holds nothing but padding."""
    batch = (Sample(0, (Segment(TEXT, 0, 3, 3),)),)
    plan = text_plan(CONFIGS["llama"] | {"num_key_value_heads": 4}, (0, 1, 2, 3))
    assert_same(sequence_parallel(finish(plan.model, batch, list(plan.stages))), pool)


def test_borders_stand_where_all_tokens_are_needed() -> None:
    model = encoders()  # images and sounds enter the LLM at its first layer
    plan = sequence_parallel(laid_out(model, {"image": (1, 1, 1, 2), "audio": ONE, "llm": (1, 2, 1, 2)}))
    image, _, first, last = plan.stages
    ends = len(model.module("image").layers) - 1
    blocks = tuple(range(1, ends))
    assert token_borders(plan, image) == TokenBorders(blocks, (1,), (ends - 1,))
    cut, end = first.layers[1], last.layers[1]
    assert token_borders(plan, first) == TokenBorders(tuple(range(1, cut)), (1,), (cut - 1,))
    joins = (end - 2,) if cut == end - 1 else ()
    assert token_borders(plan, last) == TokenBorders(tuple(range(cut, end)), (cut,), joins)
    deeper = replace(model, edges=tuple(replace(e, before_layer=2) for e in model.edges))
    assert token_borders(replace(plan, model=deeper), replace(first, layers=(0, 4))) == TokenBorders(
        (1, 2, 3), (1, 2), (1, 3)
    )
    assert token_borders(plan, plan.stages[1]) == TokenBorders()
    megatron = replace(plan, settings=Settings(kernels=Kernels.MEGATRON_SEQUENCE))
    assert token_borders(megatron, first) == TokenBorders(divided=tuple(range(cut)))
    assert token_borders(megatron, plan.stages[1]) == TokenBorders()


class Noting(TensorGroup):
    """One of two members, alone: what travels is noted, and everybody's is taken to be its own."""

    __slots__ = ("seen",)
    seen: list[tuple[str, int]]

    def gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Pending:
        self.seen.append(("gather", gathered.nbytes))
        gathered.copy_(torch.cat([own, own]))
        return Pending(self, None, "")

    def scatter(self, own: torch.Tensor, parts: torch.Tensor) -> Pending:
        self.seen.append(("scatter", parts.nbytes))
        own.copy_(parts.chunk(2)[0])
        return Pending(self, None, "")

    def _reduce(self, x: torch.Tensor, operation: object, what: str) -> None:
        del operation, what
        self.seen.append(("sum", x.nbytes))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "gemma2", "phi", "gpt2", "opt"])
def test_what_travels_is_a_gather_and_a_sum_where_whole_tensors_were_added_up(name: str) -> None:
    """Layer by layer and both ways, of as many bytes as the whole sum had, padding aside."""
    plan = sequence_parallel(text_plan(CONFIGS[name], (0, 1)))
    module = plan.model.module("llm")
    group = Noting((0, 1), 0, None)
    object.__setattr__(group, "seen", [])
    stage = build_stage_module(plan, plan.stages[0], seed=0, dtype=torch.float64, tensor=group)
    widths: list[int] = []
    block = stage.layers[1]
    block.register_forward_hook(lambda layer, args, output: widths.append(len(output)))
    microbatch = whole_batch(module, plan.batch)
    data = microbatch_data(plan, plan.stages[0], microbatch, SyntheticSource(0), dtype=torch.float64)
    work, grid = work_of(plan, microbatch), Grid(2, 1)
    messages = [placed_messages(layer, work, grid, 8) for layer in module.layers]
    loss = stage(StageInput(None, data))
    num_tokens = sum(data.tokens_in)
    padded = num_tokens + num_tokens % 2
    assert widths == [padded // 2]
    pairs = sum(len(each.forward) for each in messages[1:-1])
    travelled = padded * module.layers[1].out_width * 8
    entering = [("gather", travelled)] * (len(group.seen) - 3 - pairs)
    assert sorted(group.seen) == sorted(
        [*entering, *[("scatter", travelled)] * pairs, *group.seen[:1], *group.seen[-2:]]
    )
    assert {kind for kind, _ in (*group.seen[:1], *group.seen[-2:])} == {"sum"}  # table, loss
    backward = sum(len(each.backward) for each in messages)
    assert len(entering) == backward  # what is summed going back is gathered going there
    group.seen.clear()
    loss.backward()
    divided = [("gather", travelled)]  # the first block's input
    assert sorted(group.seen) == sorted(
        [*[("scatter", travelled)] * backward, *[("gather", travelled)] * pairs, *divided]
    )


def in_two_stages(plan: Plan) -> Plan:
    """The language model cut in its middle, each half on two ranks."""
    layers = len(plan.model.module("llm").layers)
    return disjoint_plan(plan.model, plan.batch, {"llm": (2, layers - 2)}, grids={"llm": (1, 2)})


def test_gathers_at_the_ends_of_a_stage_and_sums_of_norms_are_priced() -> None:
    """Where memory-bound kernels cost nothing, all else is what it was."""
    whole = in_two_stages(text_plan(CONFIGS["llama"], (0, 1)))
    cost = CostModel(ideal_profile())
    tokens, width, size = sum(s.num_tokens for s in whole.batch), 32, whole.settings.precision.num_bytes
    before, after = (price(lower(each), cost) for each in (whole, sequence_parallel(whole)))
    microbatch = whole.microbatches[0]
    tokens = sum(whole.sample[item.sample].num_tokens for item in microbatch.items)
    gather_s = all_gather_s(tokens * width * size, 2, LINK)
    added = {"0F0": gather_s, "0B0": gather_s, "1F0": 0.0, "1B0": gather_s}
    for text, seconds in added.items():
        action = parse_action(text)
        assert after.duration_s(action) - before.duration_s(action) == pytest.approx(seconds), text
    norms_s = all_reduce_s(2 * width * size, 2, LINK)  # of a block
    first = after.step_s(0) - before.step_s(0)
    assert first == pytest.approx(norms_s * (whole.stages[0].layers[1] - 1))
    blocks = len(whole.model.module("llm").layers) - 2 - (whole.stages[0].layers[1] - 1)
    head_s = all_reduce_s(width * size, 2, LINK)
    assert after.step_s(2) - before.step_s(2) == pytest.approx(blocks * norms_s + head_s)


def test_norms_take_their_part_of_the_time() -> None:
    whole = text_plan(CONFIGS["llama"], (0, 1))
    cost = CostModel(ideal_profile(bytes_per_s=1e9))
    before, after = (price(lower(each), cost) for each in (whole, sequence_parallel(whole)))
    assert after.duration_s(parse_action("0F0")) < before.duration_s(parse_action("0F0"))


@pytest.mark.parametrize("name", ["llama", "phi", "opt"])
def test_no_rank_holds_more_than_predicted(name: str, pool: Pool) -> None:
    wide = {"hidden_size": 128, "word_embed_proj_dim": 128, "vocab_size": 256}
    config = CONFIGS[name] | {key: value for key, value in wide.items() if key in CONFIGS[name]}
    batch = tuple(Sample(i, (Segment(TEXT, 0, 64, 64),)) for i in range(2))
    plan = text_plan(config, (0, 1))
    plan = finish(plan.model, batch, list(plan.stages))
    plan = replace(plan, settings=Settings(precision=Precision.FLOAT32, kernels=Kernels.EAGER))
    (before, _), (after, _) = (measure(name, each, pool) for each in (plan, sequence_parallel(plan)))
    assert 0.94 * after.predicted_bytes <= after.measured_bytes <= after.predicted_bytes
    if name != "phi":  # its MLP gathers the tokens of the attention's norm once more
        assert after.measured_bytes < before.measured_bytes


@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.MEGATRON])
def test_fused_kernels_keep_their_part(kernels: Kernels) -> None:
    whole = text_plan(CONFIGS["llama"], (0, 1))
    whole = replace(whole, settings=replace(whole.settings, kernels=kernels))
    action = parse_action("0F0")
    before, after = (
        moved_bytes(each, memory_table(lower(each)), 0, action)[0]
        for each in (whole, sequence_parallel(whole))
    )
    assert after < before


@dataclass(slots=True)
class Logged:
    """A member alone, that notes what it begins and waits for."""

    events: list[str] = field(default_factory=list)

    def cut(self, x_TD: Tensor, num_pieces: int) -> list[Tensor]:
        return list(x_TD.chunk(num_pieces))

    def start_sum(self, y_TD: Tensor) -> tuple[Tensor, "Wait"]:
        return self._start(y_TD, "sum")

    def start_spread(self, gradient_ND: Tensor) -> tuple[Tensor, "Wait"]:
        return self._start(gradient_ND, "spread")

    def _start(self, x: Tensor, what: str) -> tuple[Tensor, "Wait"]:
        self.events.append(f"start {what}")
        return x.detach().clone(), Wait(self, what)


@dataclass(slots=True)
class Wait:
    log: Logged
    what: str

    def wait(self) -> None:
        self.log.events.append(f"wait {self.what}")


def test_a_piece_is_added_up_beside_the_product_of_the_next() -> None:
    log, weight = Logged(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True)

    def product(piece: Tensor) -> Tensor:
        log.events.append("product")
        return piece @ weight.t()

    total = summed_in_pieces(product, x, log, 3)
    assert log.events == ["product", "start sum"] * 3 + ["wait sum"] * 3
    log.events.clear()
    upstream = torch.randn_like(total)
    total.backward(upstream)
    assert log.events == ["start spread"] * 3 + ["wait spread"] * 3
    torch.testing.assert_close(total, x @ weight.t(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(weight.grad, (upstream.flatten(0, 1).t() @ x.flatten(0, 1)).detach())


def in_pieces(plan: Plan, num_pieces: int, recompute: Recompute = Recompute.NONE) -> Plan:
    modules = tuple(
        replace(plan.settings.of(m.name), collective_pieces=num_pieces, recompute=recompute)
        for m in plan.model.modules
    )
    return replace(plan, settings=replace(plan.settings, modules=modules))


@pytest.mark.parametrize("pieces", [2, 5])
def test_tensor_parallel_ranks_in_pieces_train_as_one_process(pieces: int, pool: Pool) -> None:
    plan = text_plan(CONFIGS["llama"], (0, 1))
    assert_same(in_pieces(plan, pieces), pool, Precision.FLOAT64)


@pytest.mark.parametrize(("pieces", "recompute"), [(2, Recompute.NONE), (4, Recompute.FULL)])
def test_ranks_that_split_tokens_in_pieces_train_as_one_process(
    pieces: int, recompute: Recompute, pool: Pool
) -> None:
    plan = sequence_parallel(text_plan(CONFIGS["llama"], (0, 1)))
    assert_same(in_pieces(plan, pieces, recompute), pool, Precision.FLOAT64)


@pytest.mark.parametrize("cut", [lambda plan: plan, sequence_parallel])
def test_a_price_is_of_sums_beside_products(cut: Callable[[Plan], Plan]) -> None:
    """As a machine's whose row-cut products all run in pieces; nothing new is unmeasured."""
    plan, cost = cut(text_plan(CONFIGS["llama"], (0, 1))), CostModel(ideal_profile())
    whole, two = (price(lower(in_pieces(plan, pieces)), cost) for pieces in (1, 2))
    assert two.unmeasured == whole.unmeasured
    assert two.durations_s != whole.durations_s
    assert two.durations_s == price(lower(plan), cost.executed(Execution(sum_pieces=2))).durations_s


def test_threads_of_an_emulation_run_in_pieces_too() -> None:
    plan = in_pieces(text_plan(CONFIGS["llama"], (0, 1)), 3)
    whole, cut = (
        emulate(lower(each), RunSettings(precision=Precision.FLOAT64)).losses
        for each in (in_pieces(plan, 1), plan)
    )
    assert cut == pytest.approx(whole, rel=1e-12)


def test_biases_and_transposed_products_are_added_once(pool: Pool) -> None:
    assert_same(in_pieces(text_plan(CONFIGS["gpt2"], (0, 1)), 3), pool, Precision.FLOAT64)


def test_what_cannot_run_in_pieces_is_named() -> None:
    with pytest.raises(ValueError, match="want collective_pieces >= 1, got 0"):
        ModuleSettings(module="llm", collective_pieces=0)
    plan = in_pieces(text_plan(CONFIGS["llama"], (0, 1)), 2)
    split = with_programs(plan, Schedule(kind=ScheduleKind.ZB_H1))
    with pytest.raises(ValueError, match="want collective_pieces 1 or a schedule with whole ones"):
        check_whole_backwards(split, split.stages[0])
