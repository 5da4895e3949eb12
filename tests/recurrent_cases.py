"""Cases of models with recurrent blocks: they train as one process does, and a recurrence has its price."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.fidelity.family_memory import EXAMPLES
from runtime.step.stage_module import StageInput
from runtime.world.pool import Pool
from tests import tiny_models
from tests.language_models import model_of, refused
from tests.test_adapters import build, relative
from tests.test_adapters_decoders import loss_of, original
from tests.test_expert_plan import moe_plan
from tests.test_fsdp import sharded_parameters
from tests.test_parity import assert_parity, assert_same, execute
from workbench.cost.delta_rule import RulePasses
from workbench.cost.least_time import LeastTimes
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import RowWork, Work
from workbench.data.sample import Sample, Segment
from workbench.model.frozen import Needs
from workbench.model.layer import Layer, Recurrence
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.plan import ModuleSettings, Precision, Recompute
from workbench.plan.runnable import check_runnable
from workbench.schedule.choice import Schedule, ScheduleKind

Config = dict[str, Any]
F64 = torch.float64


def texts(*lengths: int) -> tuple[Sample, ...]:
    return tuple(Sample(k, (Segment(TEXT, 0, n, n),)) for k, n in enumerate(lengths))


def text_model(config: Config) -> ModelGraph:
    return ModelGraph(name="text", modules=(tiny_models.llm(config),), edges=())


def assert_packed(name: str, *lengths: int) -> None:
    """Loss and gradients of an example's samples, packed, are those of transformers on each alone."""
    family, example = EXAMPLES[name]
    ours, _, data = build(
        tiny_models.llm({"model_type": family.model_type, **example.config}), F64, *texts(*lengths)
    )
    theirs = original(name, ours)
    expected = loss_of(theirs, data.input_ids, data.tokens_in)
    expected.backward()
    loss = ours(StageInput(None, data))
    loss.backward()
    assert relative(loss, expected) <= 1e-10
    grads = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    scale = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for key, parameter in ours.named_weights():
        assert (parameter.grad - grads[key]).norm() <= 1e-10 * scale, key


def assert_untouched_in_float32(config: Config, num_tokens: int) -> None:
    ours, _, data = build(tiny_models.llm(config), torch.float32, *texts(num_tokens))
    theirs = model_of(config).eval()
    theirs.load_state_dict({key: value.detach() for key, value in ours.named_weights()})
    expected = loss_of(theirs, data.input_ids, data.tokens_in)
    assert relative(ours(StageInput(None, data)), expected) <= 1e-5


def assert_recomputed_split(config: Config, pool: Pool, *, ep: int = 1, dp: int = 2) -> None:
    """With tensor and sequence parallelism, two stages, and replicas."""
    settings = ModuleSettings(module="llm", recompute=Recompute.FULL, sequence_parallel=True)
    plan = moe_plan(tp=2, ep=ep, pp=2, dp=dp, config=config, modules=(settings,))
    split = with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1))
    result, reference = execute(split, pool, clip_norm=0.01)
    assert_parity(split, result, reference, Precision.FLOAT64)


def assert_two_lengths(config: Config, pool: Pool) -> None:
    """Five tokens and six are run apart, and eleven are divided."""
    settings = ModuleSettings(module="llm", sequence_parallel=True)
    one_each = moe_plan(tp=2, config=config, tokens=5, modules=(settings,))
    together = batched_microbatches(one_each, samples_per_microbatch=2, replicas=range(1))
    assert_same(with_programs(replace(one_each, microbatches=together, programs=())), pool)


def assert_sharded(config: Config, lengths: tuple[int, ...], pool: Pool) -> None:
    model = text_model(config)
    cuts = {"llm": ((0, len(model.modules[0].layers)),)}
    plan = sharded_parameters(model, texts(*lengths), replicas=2, cuts=cuts, modules=("llm",))
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def assert_refused_to_run(config: Config, odd_heads: Config, kind: str) -> None:
    """On context-parallel ranks, under a mask, and on two ranks with an odd number of heads of keys."""
    hands_on = f"module 'llm': {kind} hands a state from token to token, on one rank; want cp 1, got 2"
    refused(hands_on, lambda: check_runnable(moe_plan(cp=2, config=config)))
    plan = moe_plan(config=config)
    masked = replace(plan, batch=tuple(replace(sample, mask="full") for sample in plan.batch))
    refused(f"{kind} runs over whole .* under no mask; want causal, got full", lambda: check_runnable(masked))
    one_stage = replace(plan.stages[0], ranks=((0, 1),))
    odd = replace(moe_plan(config=config | odd_heads), stages=(one_stage,))
    num = min(odd_heads.values())
    refused(f"tp must divide the {num} key/value heads of llm.block.0, got tp = 2", lambda: check(odd))


def assert_priced_by_its_work(layer: Layer, moved_of: Callable[[Any, int, int], RulePasses]) -> None:
    """Not below its bytes or its bound; twice the tokens, or half the ranks, take about twice as long."""
    cost = CostModel(load_profile("A40"))
    rule = next(operator for operator in layer.operators if isinstance(operator, Recurrence))
    alone = replace(layer, operators=(rule,))
    times = []
    for tokens in (4096, 8192):
        work = Work((RowWork(tokens, tokens, tokens * (tokens + 1) // 2),))
        time = cost.layer_time(alone, work, tp=1, cp=1, precision="bfloat16")
        moved = moved_of(rule, tokens, 2)
        assert time.forward_s >= moved.forward / cost.profile.memory_bytes_per_s
        assert any(rule.title in doubt for doubt in time.unmeasured)
        least = LeastTimes(cost, "bfloat16", work, degrees=(1, 2), cuts_tokens=False)
        bound = least.of(alone, work, Needs(input_grad=True, weight_grad=True))
        assert 0 < bound.way_s <= time.forward_s + time.input_grad_s
        times.append(time.forward_s)
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)
    halves = cost.layer_time(alone, work, tp=2, cp=1, precision="bfloat16")
    assert halves.forward_s == pytest.approx(times[1] / 2, rel=0.1)
