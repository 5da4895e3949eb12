"""What holds of every row, whoever measured it: priced without a refusal, and monotone where physics is."""

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predict import iteration_s
from workbench.llm_table.columns import read_row
from workbench.llm_table.frameworks import filled
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.llm_table.row_plan import cluster_of

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
