"""What the attention experiments rest on: masks into ranks, policies, DCP's messages, printed tables."""

import numpy as np
import pytest

from experiments.cornstarch.attention_dcp import (
    DIVISIONS,
    NUM_GPUS,
    PATTERNS,
    DcpSetting,
    Masks,
    Visits,
    blocks_moved,
    both_s,
    cornstarch_s,
    dcp_s,
    divided_s,
    pattern_of,
    reads_of,
    settings_of,
)
from experiments.cornstarch.attention_layers import (
    BLOCK,
    FIXED,
    MASKS,
    STATIC,
    LayerSetting,
    Testbed,
    attention_of,
    tiles_of,
)
from experiments.cornstarch.attention_policies import (
    BASELINE,
    FOUR,
    MAIN,
    NAMES,
    POLICIES,
    PolicyTable,
    a40_testbed,
    llm_of,
    model_times,
    policy_evidence,
    rest_s,
    run_policy,
)
from experiments.cornstarch.block_placement import moved_bytes
from experiments.cornstarch_icml import figure6, figure9, table3
from experiments.cornstarch_icml.table5 import TRAINED, iteration_s, layer_times
from experiments.cornstarch_v1 import table4
from experiments.harness.printed import printed_rows
from sim.attention.pieces import Order, run_launch, whole_rows
from workbench.balance.tokens.policies import rank_loads
from workbench.masks.bitfield import dense
from workbench.masks.builders import causal
from workbench.masks.tiles import row_work

TOKENS = 16384
SHORT = 8192


@pytest.fixture(scope="module")
def bed() -> Testbed:
    return a40_testbed()


@pytest.mark.parametrize("policy", ["lpt", "random", "naive_ring", "zigzag"])
@pytest.mark.parametrize("kind", list(MASKS))
def test_a_rank_computes_the_tiles_it_owns(bed, kind, policy):
    """One key-value head, whole rows, one at a time: what the ranks are busy with is their share of tiles."""
    mask = tiles_of(MASKS[kind](TOKENS, seed=1))
    owners = mask.owners(policy, 8, 1)
    operator = attention_of(llm_of("LLM-M"))
    run = bed.run(mask, owners, operator, LayerSetting(num_ranks=8), STATIC)
    gpu = bed.gpu(operator)
    loads = rank_loads(row_work(mask.tiles), owners, 8)
    for rank, launches in enumerate(run.launches):
        blocks = int((owners == rank).sum())
        own_s = 4 * (loads[rank] * gpu.timing.tile_s + blocks * gpu.timing.block_s)
        assert len(launches) == 8
        assert launches[0].busy_s == pytest.approx(own_s)


def test_few_ranks_gather_inside_a_node(bed):
    """4 ranks fit a node of 4 GPUs, with tensor parallelism 2 they do not."""
    mask = tiles_of(causal(TOKENS))
    operator = attention_of(llm_of("LLM-M"))
    gathers = {
        setting: bed.run(mask, mask.owners("zigzag", 4, 0), operator, setting, STATIC).gathers_s[0]
        for setting in (LayerSetting(num_ranks=4), LayerSetting(num_ranks=4, tp=2))
    }
    profile = bed.cost.profile
    num_bytes = 2 * TOKENS * 128 * 2
    for (start, end), scope in zip(gathers.values(), ("intra", "inter"), strict=True):
        link = profile.machine_link(scope).link
        assert end - start == pytest.approx(3 * (num_bytes / 4 / link.bytes_per_s + link.latency_s))


def test_policies_differ_in_owners_and_kernel():
    assert POLICIES["causal_cp"][0] == POLICIES["intra_gpu_only"][0] == "zigzag"
    assert POLICIES["inter_gpu_only"][0] == POLICIES["cornstarch"][0] == "lpt"
    assert POLICIES["causal_cp"][1] == POLICIES["inter_gpu_only"][1] == STATIC
    assert POLICIES["intra_gpu_only"][1] == POLICIES["cornstarch"][1] == FIXED


def test_a_model_is_its_attentions_and_the_rest(bed):
    llm = llm_of("LLM-S")
    count, rest = rest_s(bed.cost, llm, TOKENS, MAIN)
    assert count == 16
    whole = model_times(bed.cost, llm, TOKENS, MAIN, {"a": 0.0, "b": 1.0})
    assert whole["a"] == rest
    assert whole["b"] == pytest.approx(rest + 16)


def test_both_balances_win_and_equal_totals_alone_do_not(bed):
    """The paper's finding, on a mask of 32k tokens that is in none of its tables."""
    seconds = {
        policy: run_policy(bed, llm_of("LLM-M"), 2 * TOKENS, MAIN, policy, seed=7).makespan_s
        for policy in FOUR
    }
    assert min(seconds, key=lambda policy: seconds[policy]) == "cornstarch"
    assert seconds["inter_gpu_only"] > 0.9 * seconds[BASELINE]
    assert seconds["cornstarch"] < 0.9 * seconds[BASELINE]


def test_dips_belong_to_whole_rows(bed):
    llm = llm_of("LLM-L")
    runs = {policy: run_policy(bed, llm, 2 * TOKENS, MAIN, policy) for policy in POLICIES}
    assert figure6.tail_share(runs["inter_gpu_only"]) > figure6.tail_share(runs["cornstarch"])
    assert figure6.work_spread(runs["causal_cp"]) > figure6.work_spread(runs["inter_gpu_only"])
    inside, end = figure9.dips(runs["inter_gpu_multistreams"])
    assert inside < figure9.dips(runs["inter_gpu_only"])[0]
    assert end > 0


def test_printed_gains_are_those_of_the_printed_times():
    rows = table3.itself_evidence()
    assert len(rows.paper) == 18
    assert all(number.near(rows.ours[number.key]) for number in rows.paper)


def test_every_printed_cell_of_table_3_is_compared(bed):
    table = PolicyTable(bed, TOKENS, FOUR)
    table._found = {
        (llm, scope): [dict.fromkeys(FOUR, 1.0)] * len(NAMES)
        for llm in table3.LLMS
        for scope in ("attn", "model")
    }
    found = policy_evidence("cornstarch_icml_table3", "Table 3", table)
    assert len(found.paper) == len(printed_rows("cornstarch_icml_table3")) == 24
    assert set(found.unstated) == {number.key for number in found.paper}


def test_random_tokens_cannot_come_as_close_as_printed(bed):
    """16 blocks a rank, drawn independently: the heaviest of 8 ranks has far more than 1 % above the mean."""
    runs = [
        table4.rank_times(bed, table4.masks_of(TOKENS, "EP", seed)[0], table4.MAIN, seed) for seed in range(6)
    ]
    times = table4.mean_times(runs, slowest=True)
    assert times["random"] > 1.1 * times["lpt"]
    assert table4.mean_times(runs, slowest=False)["random"] < 1.1 * times["lpt"]


@pytest.mark.parametrize("name", list(PATTERNS))
def test_messages_of_a_placement(name):
    """Received blocks add up to what the placement counts, and nobody receives what it holds."""
    pattern = pattern_of(name, SHORT, 1)
    owners = pattern.placement.owners
    field = PATTERNS[name](SHORT, 1)
    blocks = SHORT // BLOCK
    needed = [set() for _ in range(NUM_GPUS)]
    for row in range(blocks):
        seen = dense(field.take(np.arange(row * BLOCK, (row + 1) * BLOCK)), field)
        needed[owners[row]] |= set(
            np.flatnonzero(seen.reshape(BLOCK, blocks, BLOCK).any(axis=(0, 2))).tolist()
        )
    received = [{block for block in needed[rank] if owners[block] != rank} for rank in range(NUM_GPUS)]
    sent = [
        sum(block in other for other in received for block in np.flatnonzero(owners == rank))
        for rank in range(NUM_GPUS)
    ]
    assert blocks_moved(pattern.mask, owners) == [max(len(r), s) for r, s in zip(received, sent, strict=True)]
    moved = moved_bytes(reads_of(pattern.mask), owners, NUM_GPUS)
    assert moved == sum(len(blocks) for blocks in received) == pattern.placement.moved_bytes


def test_divisions_hide_all_but_one():
    assert divided_s(4.0, 4.0) == 5.0
    assert divided_s(0.0, 4.0) == 4.0
    assert divided_s(8.0, 0.0) == 8.0
    assert divided_s(2.0, 4.0) == 2.0 / DIVISIONS + 4.0


def test_dcp_is_never_faster_than_its_computing(bed):
    setting = DcpSetting()
    pattern = pattern_of("lambda", TOKENS, 1)
    operator = attention_of(llm_of("LLM-M"))
    gpu = bed.gpu(operator)
    loads = rank_loads(row_work(pattern.mask.tiles), pattern.placement.owners, NUM_GPUS)
    assert dcp_s(bed, pattern, setting) > loads.max() * 32 * gpu.timing.tile_s / gpu.num_units
    alone = run_launch(whole_rows(row_work(pattern.mask.tiles)), 32, gpu.num_units, gpu.timing, Order.STATIC)
    assert dcp_s(bed, pattern, setting) < alone.end_s


def test_a_shared_adaptor_slows_messages_not_gathers(bed):
    pattern = pattern_of("causal", TOKENS, 1)
    own, shared = DcpSetting(sharing=1), DcpSetting(sharing=4)
    assert dcp_s(bed, pattern, shared) > dcp_s(bed, pattern, own)
    assert cornstarch_s(bed, pattern, shared) == cornstarch_s(bed, pattern, own)


def test_a_blind_kernel_takes_as_long_for_every_mask(bed):
    blind = DcpSetting(visits=Visits.CAUSAL)
    causal = both_s(bed, "causal", TOKENS, DcpSetting())
    assert both_s(bed, "lambda", TOKENS, blind) == causal
    assert both_s(bed, "lambda", TOKENS, DcpSetting()) < causal


def test_masks_that_grow_keep_their_share_of_pairs():
    setting = DcpSetting(masks=Masks.GROWING)
    assert [setting.scale(tokens) for tokens in (16384, 32768, 131072)] == [1, 1, 4]
    assert list(settings_of("causal")) == [
        "the setting shown",
        "heads of the small LLM",
        "heads of the large LLM",
        "an adaptor for each GPU",
    ]
    assert len(settings_of("lambda")) == len({*settings_of("lambda").values()})


def test_an_iteration_is_layers_with_their_attention(bed):
    one, two = (layer_times(bed, TOKENS, seconds) for seconds in (1.0, 2.0))
    assert sum(b.forward_s - a.forward_s for a, b in zip(one, two, strict=True)) == pytest.approx(16.0)
    shown_s, _, most_s = iteration_s(bed, TOKENS, 1.0).values()
    assert shown_s == pytest.approx(sum(t.forward_s + t.backward_s(TRAINED) for t in one))
    assert most_s > 48 * shown_s
