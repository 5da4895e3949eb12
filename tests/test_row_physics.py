"""Predicted rows: physics, proofs and memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.fidelity.mutant_pool import pool
from experiments.public.published import Published, published
from sim.predict import iteration_s
from tests.test_fsdp_plan import of_layers
from tests.test_predict import row
from workbench.llm_table.columns import read_row
from workbench.llm_table.frameworks import filled
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.llm_table.row_model import model_of
from workbench.llm_table.row_plan import cluster_of
from workbench.plan.deadlock import _by_communicator, _followers, _queues_of_slots
from workbench.plan.folded import checked_part
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Program
from workbench.plan.row_proofs import goes_forward
from workbench.plan.task_graph import reducers_of
from workbench.schedule.action import FSDP, MOVES, Action, Pass, reduction_of
from workbench.schedule.precedence import find_cycle

PREDICTOR = RowPredictor(iteration_s)
DENSE = {"architecture": "llama", "hidden": 2048, "layers": 4, "heads": 16, "kv_heads": 4, "sequence": 2048}
EXPERTS = {"experts": 8, "topk": 2, "expert_ffn": 1024, "shared_expert_ffn": 1024, "first_dense_layers": 1}
LATENT = {"kv_lora": 256, "q_lora": 512, "nope_dim": 64, "rope_dim": 32, "v_dim": 64, "kv_heads": 16}
MODELS = st.sampled_from(
    [
        DENSE,
        DENSE | {"window": 512, "full_every": 2},
        DENSE | {"lora_rank": 8},
        DENSE | EXPERTS,
        DENSE | EXPERTS | LATENT,
        DENSE | {"architecture": "gpt", "kv_heads": 16},
        DENSE | {"architecture": "vit", "kv_heads": 16, "vocab": 1000},
        DENSE | {"architecture": "t5", "kv_heads": 16},
        DENSE | {"architecture": "dit", "kv_heads": 16, "patch": 2, "vocab": 1000},
    ]
)
LAYOUTS = st.sampled_from(
    [
        {"dp": 16},
        {"dp": 16, "zero_stage": 1, "shard_group": 8, "dp_overlap": "both"},
        {"dp": 2, "tp": 8, "sequence_parallel": "yes", "tp_overlap": "yes"},
        {"dp": 4, "tp": 2, "pp": 2, "virtual_stages": 2},
        {"dp": 8, "cp": 2, "zero_stage": 2},
        {"dp": 16, "zero_stage": 3, "shard_group": 8},
    ]
)
DEVICES = st.sampled_from(["A100-40GB", "H100", "B200", "GB300", "MI300X", "L40S"])


def predicted(*cells: dict[str, object]) -> Prediction:
    known = {name: str(value) for part in cells for name, value in part.items()}
    return PREDICTOR.predict(read_row({"global_batch": "32"} | known))


rows = given(model=MODELS, layout=LAYOUTS, gpu=DEVICES)
few = settings(max_examples=6, deadline=None)


@rows
@few
def test_nothing_is_refused_and_a_faster_network_is_never_slower(model, layout, gpu):
    slow, fast = (predicted(model, layout, {"gpu": gpu, "inter_gbytes_per_s": speed}) for speed in (50, 400))
    assert 0 < fast.iteration_s <= slow.iteration_s * (1 + 1e-9)
    assert fast.interval.low_s < fast.iteration_s < fast.interval.high_s
    assert 0 < fast.mfu < 1


@pytest.mark.parametrize("gpu", ["H100", "L4"])
@pytest.mark.parametrize("model", [DENSE, DENSE | EXPERTS, DENSE | {"hidden": 512, "heads": 8}])
def test_parts_add_up_to_the_iteration_that_throughputs_count(model, gpu):
    """Also where the host is what some kinds of operators wait for, and others not."""
    row = read_row(
        {name: str(value) for name, value in (model | {"global_batch": 32, "dp": 8, "gpu": gpu}).items()}
    )
    found = PREDICTOR.predict(row)
    parts = asdict(found.parts)
    assert min(parts.values()) >= -1e-9 * found.iteration_s
    assert sum(parts.values()) == pytest.approx(found.iteration_s)
    assert sum(found.parts.shares().values()) == pytest.approx(1)
    assert found.tokens_per_s_per_gpu * found.iteration_s * row.num_gpus == pytest.approx(row.tokens)


@pytest.mark.parametrize("sequence_parallel", ["yes", "no"])
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_collectives_inside_layers_take_their_time_on_the_links(hidden: int, sequence_parallel: str):
    """Small kernels, which alone wait for the host, take nothing from them.

    No less than half of each sum's bytes over twice the bandwidth of NVLink, 450 GB/s; in a step that waits
    for the host, more than faster links save. Without the ranks, there is nothing.
    """
    shape = {"hidden": hidden, "heads": 16, "sequence_parallel": sequence_parallel, "gpu": "H100"}
    found, alone = predicted(DENSE, shape | {"tp": 2}), predicted(DENSE, shape | {"sequence_parallel": "no"})
    at_once = predicted(DENSE, shape | {"tp": 2, "intra_gbytes_per_s": 1e6, "intra_latency_us": 0.001})
    sums = 32 * DENSE["layers"] * 4
    least_s = sums * DENSE["sequence"] * hidden * 2 / 900e9
    saved_s = found.iteration_s - at_once.iteration_s
    assert found.parts.in_layers > max(least_s, 0.98 * saved_s) > 0.0
    assert alone.parts.in_layers == 0.0 < at_once.parts.in_layers < 1e-4 * at_once.iteration_s
    assert found.parts.launches > (0.2 if hidden == 2048 else 0.0) * found.iteration_s


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "gpt"},
        {"architecture": "vit", "window": 512, "vocab": 1000},
        {"architecture": "t5"},
        {"architecture": "dit", "patch": 2, "vocab": 1000},
        {"architecture": "mmdit", "patch": 2, "vocab": 1000},
    ],
    ids=lambda shape: shape["architecture"],
)
def test_keys_of_other_context_parallel_ranks_travel_in_every_architecture(shape):
    """Forward and again in the backward: no less than their bytes over a link take."""
    found = predicted(DENSE, {"kv_heads": 16, "cp": 4, "intra_gbytes_per_s": 1, "global_batch": 1}, shape)
    of_keys = 2 * DENSE["sequence"] * DENSE["hidden"] * 2 * 3 / 4
    assert found.parts.in_layers >= DENSE["layers"] * 2 * of_keys / 1e9


@rows
@few
def test_recomputation_takes_time_and_saves_memory(model, layout, gpu):
    has_more = layout.get("virtual_stages", 1) == 1 and "lora_rank" not in model  # than one block a stage
    some = {"recompute": "full", "recompute_layers": int(has_more)}
    ways = ({"recompute": "none"}, some, {"recompute": "full"})
    kept, part, again = (predicted(model, layout, {"gpu": gpu}, how) for how in ways)
    assert kept.iteration_s <= part.iteration_s * (1 + 1e-9) <= again.iteration_s * (1 + 1e-9) ** 2
    assert again.peak_bytes <= part.peak_bytes <= kept.peak_bytes


@given(model=MODELS, layout=LAYOUTS)
@few
def test_narrow_products_are_never_slower(model, layout):
    wide, narrow = (predicted(model, layout, {"gpu": "B200", "precision": name}) for name in ("bf16", "fp8"))
    assert narrow.iteration_s <= wide.iteration_s * (1 + 1e-9)


@given(gpu=DEVICES, capacity=st.sampled_from([1.0, 1.25, 2.0, 4.0]), ep=st.sampled_from([1, 2, 8]))
@few
def test_rows_of_experts_are_not_free_and_take_at_most_in_proportion_to_their_capacity(gpu, capacity, ep):
    """Everything else is as it was, and larger products are no slower a row."""
    shape = DENSE | {"experts": 8, "topk": 2, "expert_ffn": 8192}
    layout = {"dp": 8, "ep": ep, "gpu": gpu}
    bare, one, more = (
        predicted(shape, layout, {"capacity": times * capacity}).iteration_s for times in (1, 2, 3)
    )
    assert bare < one < 2 * bare
    assert one < more < 1.5 * one


@pytest.mark.parametrize(("gpus", "size"), [(256, 64), (576, 72), (64, 72), (80, 40)])
def test_domains_of_a_run_are_filled_alike(gpus: int, size: int):
    cells = DENSE | {"global_batch": gpus, "gpus": gpus, "gpu": "GB200", "gpus_per_nvlink_domain": 72}
    row = read_row({name: str(value) for name, value in cells.items()})
    cluster = cluster_of(row, PREDICTOR.cost(row).profile)
    assert {node.num_ranks for node in cluster.nodes} == {size}


def test_a_partly_filled_server_slows_all_replicas():
    """One GPU of the second server has one of its eight cards for what eight have in a full one."""
    full, partly = (
        predicted(DENSE | {"zero_stage": 3, "dp": dp, "global_batch": dp, "gpu": "H100"}).iteration_s
        for dp in (16, 9)
    )
    assert partly > 1.5 * full


def test_a_rule_that_divides_fills_nothing_without_its_counts():
    known = {"framework": "Megatron-Core", "tp": "0", "gpus": "8"}
    assert not filled(known)["dp"]
    assert filled(known | {"tp": "2", "pp": "2"})["dp"] == "2"


SEED, SWAPS_PER_PLAN = 5, 12


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans whose weights are gathered, freed, or copied to the host."""
    moved = {*FSDP, *MOVES}
    return {
        name: plan
        for name, plan in pool(mixes=("all",))
        if any(action.kind in moved for action in plan.program_actions)
    }


def has_cycle(lowered: Lowered) -> bool:
    """Whether any task waits for itself, with rows of a communicator one after another."""
    queues = _queues_of_slots(lowered, _by_communicator(lowered).values())
    return bool(find_cycle(_followers(lowered, queues)))


def swapped(plan: Plan, random: Random) -> Plan:
    """The plan with two neighbours of one program swapped, one of which is no pass over a microbatch."""
    moved = {*FSDP, *MOVES}
    places = [
        (number, index)
        for number, program in enumerate(plan.programs)
        for index in range(len(program.actions) - 2)
        if moved & {action.kind for action in program.actions[index : index + 2]}
    ]
    number, index = random.choice(places)
    actions = list(plan.programs[number].actions)
    actions[index : index + 2] = reversed(actions[index : index + 2])
    programs = list(plan.programs)
    programs[number] = Program(ranks=programs[number].ranks, actions=tuple(actions))
    return replace(plan, programs=tuple(programs))


def test_plans_that_move_weights_are_proved(plans: Mapping[str, Plan]) -> None:
    """Not all: unequal replicas wait for each other's passes, which ticks do not know."""
    lowered = {name: lower(plan) for name, plan in plans.items()}
    assert not [name for name, each in lowered.items() if has_cycle(each)]
    proved = [plans[name] for name, each in lowered.items() if goes_forward(each)]
    assert {Pass.FREE, Pass.OFFLOAD} <= {action.kind for plan in proved for action in plan.program_actions}


@pytest.mark.parametrize("part_of", [lambda plan: plan, checked_part], ids=["all replicas", "folded"])
def test_equal_replicas_that_shard_weights_are_proved(part_of: Callable[[Plan], Plan]) -> None:
    plan = of_layers(4, replicas=3, num_samples=6)
    part = part_of(plan)
    assert (len(part.stages) < len(plan.stages)) == (part_of is checked_part)
    assert goes_forward(lower(part))


def mutants(plans: Mapping[str, Plan]) -> Iterator[Lowered]:
    random = Random(SEED)
    for plan in plans.values():
        for _ in range(SWAPS_PER_PLAN):
            yield lower(swapped(plan, random))


def test_no_plan_with_a_cycle_is_proved(plans: Mapping[str, Plan]) -> None:
    verdicts = [(goes_forward(lowered), has_cycle(lowered)) for lowered in mutants(plans)]
    assert (True, True) not in verdicts
    assert {(True, False), (False, True)} <= set(verdicts)


class Group:
    """A gradient group, as far as its order goes."""

    def __init__(self, index: int, ranks: tuple[int, ...]) -> None:
        self.index, self.ranks = index, ranks


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1).map(sorted).map(tuple), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), min_size=1),
)
def test_reducers_are_the_ranks_of_a_stage_by_their_groups(
    members: list[tuple[int, ...]], holders: set[int]
) -> None:
    """Whether or not the groups have ranks in common."""
    groups = [Group(index, ranks) for index, ranks in enumerate(members)]
    reduction: Action = reduction_of(0)
    reducers = reducers_of(lambda action: holders, groups, {reduction: tuple(range(len(groups)))})
    by_rank = {rank: each.groups for each in reducers[reduction] for rank in each.ranks}
    assert sum(len(each.ranks) for each in reducers[reduction]) == len(by_rank)
    assert len({each.groups for each in reducers[reduction]}) == len(reducers[reduction])
    assert by_rank == {
        rank: own
        for rank in holders
        if (own := tuple(group.index for group in groups if rank in group.ranks))
    }


TOKENS, WIDTH, LAYERS = 2 * 64, 256, 3
GPT = {"hidden": WIDTH, "layers": LAYERS, "heads": 4, "sequence": 64, "global_batch": 2, "micro_batch": 2}
MIXTURE = GPT | {"architecture": "llama", "experts": 8, "topk": 2, "expert_ffn": 64}


def peak_bytes(**cells: object) -> int:
    return PREDICTOR.predict(row(**GPT | {"gpu": "H100"} | cells)).peak_bytes


def test_masks_are_kept_with_dropout_alone():
    """Korthikanti et al. 2022, section 4.1: two masks of a byte an element a block."""
    masks = peak_bytes(dropout="yes") - peak_bytes(dropout="no")
    assert masks == 2 * TOKENS * WIDTH * LAYERS


@pytest.mark.parametrize(("precision", "element"), [("fp8", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5625)])
def test_inputs_of_narrow_products_are_kept_narrow(precision: str, element: float):
    """Of a GPT's products inputs are h, h, h and 4 h wide; what the attention makes is kept by it."""
    wide, narrow = (peak_bytes(precision=each, gpu="B200") for each in ("bf16", precision))
    spared = (2 - element) * (1 + 1 + 4) - element
    assert wide - narrow == pytest.approx(spared * WIDTH * TOKENS * LAYERS, rel=1e-3)


@pytest.mark.parametrize("degrees", [{"tp": 1}, {"tp": 2, "pp": 3}])
def test_one_replica_has_nobody_to_shard_with(degrees: dict[str, int]):
    """No weights come from others, so no unit of them is gathered beside one's own."""
    sizes = {peak_bytes(zero_stage=stage, **degrees) for stage in range(4)}
    assert len(sizes) == 1


def test_gradients_are_as_wide_as_they_are_added_up():
    wide, narrow = (peak_bytes(grad_precision=each) for each in ("fp32", "bf16"))
    layers = model_of(row(**GPT)).modules[0].layers
    tied = {parameter.name: parameter for layer in layers[:1] for parameter in layer.parameters()}
    own = [each for layer in layers[1:] for each in layer.parameters() if each.name not in tied]
    assert wide - narrow == 2 * sum(each.num_elements for each in (*tied.values(), *own))


def test_results_of_experts_are_kept_where_shares_multiply_them():
    """A row of the stream's width for each of a token's experts."""
    yes, no = (
        PREDICTOR.predict(row(**MIXTURE | {"gpu": "H100", "keeps_results": each})) for each in ("yes", "no")
    )
    assert yes.peak_bytes - no.peak_bytes == 2 * WIDTH * TOKENS * 2 * LAYERS
    assert yes.iteration_s == no.iteration_s


def _ran(data_set: str) -> list[Published]:
    return [each for each in published() if each.data_set == data_set and each.unscorable is None]


@pytest.mark.parametrize("data_set", ["megatron_bridge_ablations", "megatron_bridge", "fms_fsdp"])
def test_runs_that_were_published_fit(data_set: str):
    """Of a parameter all ranks together hold at least a weight and a gradient of two bytes and 12 of the
    optimizer, wherever these are sharded.
    """
    for each in {str(sorted(each.cells.items())): each for each in _ran(data_set)}.values():
        llm = read_row(each.cells)
        found, state = PREDICTOR.predict(llm), 16 * model_of(llm).num_parameters * (llm.lora_rank == 0)
        assert found.spare_bytes >= 0, each
        assert found.peak_bytes * llm.num_gpus >= state, each
