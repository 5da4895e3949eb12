"""Memory of ranks: closed forms of what layers hold, the walk over programs, the refusal."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny_models
from tests.cost_models import GPT, SMALL, block, causal, llama_8b_layers
from tests.plans import WIDTH, disjoint_plan, finish, sample, two_encoders
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.data.sample import Sample, Segment
from workbench.memory.account import check_memory, memory_table, moved_bytes, peak_bytes, static_holders
from workbench.memory.layer import layer_bytes, saved_bytes, state_bytes
from workbench.memory.setting import Setting
from workbench.model.experts import Experts, with_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Layer
from workbench.model.model_graph import ModelGraph, Module
from workbench.model.module_layers import lm_head, token_embedding
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.transformer import Mlp, Norm, Placement
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.lowered import Route
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings, Sharding
from workbench.plan.stage import Stage
from workbench.schedule.action import parse_action
from workbench.units import GIB

ONE = Grid(1, 1)
NOTHING, THROUGH, TRAINED = Needs(False, False), Needs(True, False), Needs(True, True)
CUTS = {"vision": (1, 2), "audio": (2,), "llm": (2, 2)}


@given(st.integers(1, 2048), st.integers(1, 4))
def test_trained_gpt_block_keeps_korthikanti_2022_less_scores_and_dropout(tokens: int, rows: int):
    """34 s b h + 5 a s^2 b of section 4.1, less two dropout masks and all scores, plus log-sum-exps."""
    expected = tokens * rows * (32 * 1024 + 4 * 16)
    assert saved_bytes(block(GPT), TRAINED, causal(tokens, rows), ONE, 2) == expected


def test_tensor_parallelism_cuts_all_but_the_residual_stream():
    """Two norm inputs, the inputs of attention and MLP stay whole: 8 of 32 h."""
    tokens = 128
    for tp in (1, 2, 4, 8):
        expected = tokens * (8 * 1024 + (24 * 1024 + 4 * 16) / tp)
        assert saved_bytes(block(GPT), TRAINED, causal(tokens), Grid(tp, 1), 2) == expected


def test_context_parallelism_cuts_everything():
    whole = saved_bytes(block(GPT), TRAINED, causal(128), ONE, 2)
    assert saved_bytes(block(GPT), TRAINED, causal(128), Grid(1, 4), 2) == whole / 4


def test_a_frozen_block_keeps_no_matmul_inputs():
    """Norm inputs 2 x 2h, query, key, value, output 8h, GELU input 8h; not the three inputs 2 + 2 + 8."""
    expected = 128 * (20 * 1024 + 4 * 16)
    assert saved_bytes(block(GPT), THROUGH, causal(128), ONE, 2) == expected
    assert saved_bytes(block(GPT), NOTHING, causal(128), ONE, 2) == 0


@pytest.mark.parametrize("grid", [ONE, Grid(2, 1), Grid(2, 1, 2)])
@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.MEGATRON, Kernels.MEGATRON_SEQUENCE])
def test_experts_as_wide_as_the_stream_keep_their_inputs(kernels: Kernels, grid: Grid):
    """Inner width enters by the two factors of the activation and the input of `down`: 3 elements a row and
    unit, whether or not it is the width of the stream, which every expert reads rows of."""

    def kept(inner: int) -> int:
        experts = Experts(num=4, num_chosen=2, mlp=Mlp(width=inner, gated=True, activation="silu"))
        return megatron_or_fused(with_experts(block(SMALL), experts), grid, kernels)

    narrow, even, wide = map(kept, (56, 64, 72))
    assert even - narrow == pytest.approx(wide - even, abs=1)
    if grid.ep == 1:
        assert even - narrow == 2 * 3 * (64 - 56) * TOKENS * 2 // grid.tp


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("divides_tokens", [False, True])
def test_latent_attention_keeps_what_its_products_and_norms_read(tp: int, divides_tokens: bool):
    """DeepSeek-V3 (2024), section 2.1.1: latents of 1,536 and 512 on every rank, before and behind norms; of
    each head 192 of query and key, 128 of value and result, a log-sum-exp."""
    llm = tiny_models.llm(LATENT_DECODER)
    assert llm.layers[1].num_parameters == 187_107_328 + 3 * 7168 * 18432 + 2 * 7168  # MLA, MLP, norms
    split = Setting(causal(TOKENS), Grid(tp), 2, is_gathered=False, divides_tokens=divides_tokens and tp > 1)
    norms = 2 * 7168 / (tp if split.divides_tokens else 1)
    latents, heads, mlp = 2 * (1536 + 512), 2 * 128 * (192 + 128), 3 * 18432
    expected = TOKENS * (2 * (norms + 2 * 7168 + latents + (heads + mlp) / tp) + 4 * 128 / tp)
    assert layer_bytes(llm.layers[1], TRAINED, split, Kernels.FUSED).kept.num_bytes == expected


LATENT_DECODER = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize("width", [1024, 1536])
def test_an_mlp_beside_the_attention_reads_its_norm(width: int):
    """Korthikanti et al. 2022, equation 1, less a norm's input and the MLP's own input: 34 - 2 - 2, with
    heads as wide as the stream or not."""
    heads = replace(GPT.heads, num=width // 64, num_kv=width // 64)
    beside = block(replace(GPT, heads=heads, placement=Placement.PARALLEL))
    stream, wide = 2 + 2 + 2 * 1 + 16, 6 + 2  # norm, qkv input, two masks, MLP; q, k, v, input of o_proj
    expected = TOKENS * (stream * 1024 + wide * width + 4 * heads.num)
    assert megatron_or_fused(beside, ONE, Kernels.MEGATRON) == expected


TOKENS = 128


def megatron_or_fused(layer: Layer, grid: Grid, kernels: Kernels) -> int:
    setting = Setting(causal(TOKENS), grid, 2, is_gathered=False, divides_tokens=kernels.cuts_sequence)
    return layer_bytes(layer, TRAINED, setting, kernels).kept.num_bytes


def test_embedding_head_and_projector():
    assert saved_bytes(token_embedding(1000, 16), TRAINED, causal(10), ONE, 2) == 10 * 8
    assert saved_bytes(token_embedding(1000, 16), THROUGH, causal(10), ONE, 2) == 0
    # Norm input, matmul input, logits in float32.
    assert saved_bytes(lm_head(1000, 16, Norm.RMS), TRAINED, causal(10), ONE, 2) == 10 * (32 + 32 + 4000)
    projection = Projection(kind=Projector.LINEAR, in_width=16, out_width=32, norm=None)
    work = Work((RowWork(40, 10, 1600),))
    assert saved_bytes(projector_layer(projection), TRAINED, work, ONE, 4) == 10 * 16 * 4


@pytest.mark.parametrize(("size", "expected"), [(2, (2, 2, 12)), (4, (4, 4, 8)), (8, (8, 8, 16))])
def test_state_bytes_per_parameter(size: int, expected: tuple[int, int, int]):
    assert state_bytes(size) == expected


def llama_plan(
    *, frozen: bool = False, memory_bytes: int = 80 * GIB, settings: Settings | None = None
) -> Plan:
    layers = tuple(replace(layer, trainable=not frozen) for layer in llama_8b_layers())
    model = ModelGraph(name="llama", modules=(Module(name="llm", modality="text", layers=layers),))
    batch = [Sample(0, (Segment("text", 0, 512, 512),))]
    plan = disjoint_plan(model, batch, {"llm": (17, 17)})
    node = replace(plan.cluster.nodes[0], memory_bytes=memory_bytes)
    return replace(
        plan,
        cluster=replace(plan.cluster, nodes=(node,)),
        settings=settings or Settings(precision=Precision.BFLOAT16),
    )


def test_llama_8b_holds_16_bytes_a_parameter():
    """8,030,261,248 parameters (Dubey et al. 2024): 14.96 GiB of weights, 119.7 GiB with AdamW.

    All but the gradients is there from the start.
    """
    plan = llama_plan()
    table = memory_table(lower(plan))
    assert sum(table.static_bytes.values()) == 14 * 8_030_261_248
    assert sum(sum(static_holders(plan, rank).values()) for rank in plan.ranks) == 16 * 8_030_261_248
    weights = sum(static_holders(plan, rank)["parameters of llm"] for rank in plan.ranks)
    assert weights == 2 * 8_030_261_248
    frozen = memory_table(lower(llama_plan(frozen=True)))
    assert sum(frozen.static_bytes.values()) == 2 * 8_030_261_248


def toy_plan(*, replicas: int = 1, samples: int = 3, settings: Settings | None = None, **frozen) -> Plan:
    plan = disjoint_plan(
        two_encoders(**frozen), [sample(i) for i in range(samples * replicas)], CUTS, replicas=replicas
    )
    return plan if settings is None else replace(plan, settings=settings)


def test_everything_taken_is_given_back():
    for frozen in ({}, {"llm": (True,) * 4}, {"vision": (False,) * 3}):
        for recompute in Recompute:
            modules = tuple(ModuleSettings(module=m, recompute=recompute) for m in ("vision", "audio", "llm"))
            plan = toy_plan(settings=Settings(precision=Precision.FLOAT32, modules=modules), **frozen)
            table = memory_table(lower(plan))
            for rank in plan.ranks:
                assert sum(table.acquired_bytes[rank]) == sum(table.released_bytes[rank]) > 0


def test_a_tensor_that_stays_on_its_rank_lives_until_its_consumer_ends():
    """Two encoders and the LLM on one rank: 4 image and 3 sound tokens wait for the LLM."""
    stages = [
        Stage(id=index, module=name, replica=0, layers=(0, layers), ranks=((0,),))
        for index, (name, layers) in enumerate((("vision", 3), ("audio", 2), ("llm", 4)))
    ]
    plan = finish(two_encoders(llm=(True,) * 4), [sample(0), sample(1)], stages)
    lowered = lower(plan)
    assert {transfer.route for transfer in lowered.transfers} == {Route.LOCAL}
    table = memory_table(lowered)
    for producer, tokens in (("0F0", 4), ("1F0", 3)):
        taken, given = moved_bytes(plan, table, 0, parse_action(producer))
        saved = taken - given
        assert saved == (8 if producer == "0F0" else 6) * WIDTH * 4 + tokens * WIDTH * 4
    assert sum(table.acquired_bytes[0]) == sum(table.released_bytes[0])


def test_every_action_of_a_program_has_its_bytes():
    plan = toy_plan(replicas=2)
    table = memory_table(lower(plan))
    for by_rank in (table.acquired_bytes, table.released_bytes):
        assert {rank: len(by_place) for rank, by_place in by_rank.items()} == {
            rank: len(program) for rank, program in plan.program.items()
        }


def test_peak_of_a_pipeline_is_its_microbatches_in_flight():
    """llm stage 3 runs two forwards before its first backward, stage 4 one; h is one hidden tensor."""
    plan = toy_plan(llm=(True,) * 4, samples=4)
    lowered = lower(plan)
    peaks, table = peak_bytes(lowered, memory_table(lowered)), memory_table(lowered)
    h = 14 * WIDTH * 4
    saved = 2 * h  # one matmul input a layer, of which the first is the stage's input
    transient = 2 * h  # one layer's input and output
    gradients = 2 * WIDTH * WIDTH * 4
    # Its own gradients, one microbatch, the buffer of the next one's input, and the gradient it
    # sent for the one before: stage 3 proves that it came with the forward after next.
    assert peaks[4] == table.static_bytes[4] + gradients + saved + transient + 2 * h
    # Stage 3 keeps outputs of two microbatches, has the gradient it received and the buffer of the
    # next one, and sent gradients of 4 image and 3 sound tokens that nobody will answer.
    sent = 7 * WIDTH * 4
    assert peaks[3] == table.static_bytes[3] + gradients + 2 * (saved + h) + transient + 2 * h + sent


def test_a_frozen_stage_with_nothing_upstream_keeps_nothing_but_its_output():
    """Nothing ever tells it that its output was received, so that it is counted to the end."""
    plan = toy_plan()
    lowered = lower(plan)
    table = memory_table(lowered)
    taken, given = moved_bytes(plan, table, 0, parse_action("0F0"))
    assert taken - given == 8 * WIDTH * 4
    assert table.released_bytes[0][-1] == 3 * (taken - given)


def test_recompute_keeps_inputs_of_layers_only():
    def kept(recompute: Recompute) -> int:
        settings = Settings(modules=(ModuleSettings(module="llm", recompute=recompute),))
        plan = llama_plan(settings=settings)
        taken, given = moved_bytes(plan, memory_table(lower(plan)), 0, parse_action("0F0"))
        output = 512 * 4096 * 2
        return taken - given - output

    # 16 blocks of the first stage; the embedding's input are indices.
    assert kept(Recompute.FULL) == 16 * 512 * 4096 * 2
    assert kept(Recompute.NONE) > 10 * kept(Recompute.FULL)


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (Sharding.NONE, 4 + 4 + 8),
        (Sharding.OPTIMIZER, 4 + 4 + 4),
        (Sharding.GRADIENTS, 4 + 2 + 4),
        (Sharding.PARAMETERS, 2 + 2 + 4),
    ],
)
def test_sharding_cuts_state_over_replicas(sharding: Sharding, expected: int):
    settings = Settings(
        precision=Precision.FLOAT32, modules=(ModuleSettings(module="audio", sharding=sharding),)
    )
    plan = toy_plan(replicas=2, settings=settings, audio=(True, True))
    assert sum(static_holders(plan, 2).values()) == 2 * WIDTH * WIDTH * expected
    copies = (ModuleSettings(module="audio", sharding=sharding, instances=2),)
    plan = replace(plan, settings=replace(settings, modules=copies))
    assert sum(static_holders(plan, 2).values()) == 2 * WIDTH * WIDTH * 16


def test_a_plan_that_fits_is_accepted():
    lowered = lower(llama_plan())
    check_memory(lowered, memory_table(lowered))


def test_a_plan_that_does_not_fit_is_refused_with_rank_action_and_parts():
    lowered = lower(llama_plan(memory_bytes=40 * GIB))
    with pytest.raises(ValueError) as refusal:
        check_memory(lowered, memory_table(lowered))
    message = str(refusal.value)
    assert message.startswith("rank 0 does not fit: ")
    assert "during 0F0" in message or "during 0B0" in message
    assert "but node 0 (toy) has 40 GiB" in message
    assert "in it: optimizer of llm 44.9 GiB, " in message
    wanted_gib, needed_text = re.search(r"want memory_gib >= (\S+) \((\S+) bytes\)", message).groups()
    needed = int(needed_text.replace(",", ""))
    assert needed <= float(wanted_gib) * GIB < needed + GIB / 1000
    enough = lower(llama_plan(memory_bytes=max(peak_bytes(lowered, memory_table(lowered)).values())))
    check_memory(enough, memory_table(enough))
    assert needed in peak_bytes(lowered, memory_table(lowered)).values()


def test_ranks_that_share_cores_share_memory():
    plan = toy_plan()
    lowered = lower(plan)
    peaks = peak_bytes(lowered, memory_table(lowered))
    node = replace(plan.cluster.nodes[0], num_cores=2, memory_bytes=sum(peaks.values()))
    fits = lower(replace(plan, cluster=replace(plan.cluster, nodes=(node,))))
    check_memory(fits, memory_table(fits))
    node = replace(node, memory_bytes=sum(peaks.values()) - 1)
    tight = lower(replace(plan, cluster=replace(plan.cluster, nodes=(node,))))
    with pytest.raises(ValueError, match=r"\(with the 4 others of its node\) does not fit"):
        check_memory(tight, memory_table(tight))


def test_stages_of_several_ranks_have_an_account_on_each():
    """Two ranks share every stage of the LLM by tensor parallelism: broadcasts, no rank left out."""
    cuts, batch = {"vision": (3,), "audio": (2,), "llm": (2, 2)}, [sample(i) for i in range(3)]
    plan = disjoint_plan(two_encoders(llm=(True,) * 4), batch, cuts, grids={"llm": (1, 2)})
    lowered = lower(plan)
    assert any(transfer.route is Route.BROADCAST for transfer in lowered.transfers)
    peaks = peak_bytes(lowered, memory_table(lowered))
    assert set(peaks) == set(plan.ranks)
    assert min(peaks.values()) > 0
    assert abs(peaks[2] - peaks[3]) < peaks[2] / 2
