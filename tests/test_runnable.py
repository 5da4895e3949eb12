"""`check` refuses what a run would, in the same words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.emulation.emulate import emulate
from runtime.run_settings import RunSettings
from runtime.world.failure import RankError
from tests.command_line import refuse
from tests.generator_models import generator
from workbench.data.sample import Segment
from workbench.job.job import job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.model.block_modules import BlockModule
from workbench.plan.codec import read_plan, write_plan
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable
from workbench.plan.runnable_items import check_segment
from workbench.strategies import cornstarch
from workbench.timing.accept import accept


def with_items(made: Plan, modality: str, tokens_in: int, tokens_out: int) -> Plan:
    """Every item of the modality of that size."""
    batch = tuple(
        replace(
            sample,
            segments=tuple(
                replace(each, tokens_in=tokens_in, tokens_out=tokens_out)
                if each.modality == modality
                else each
                for each in sample.segments
            ),
        )
        for sample in made.batch
    )
    return replace(made, batch=batch)


@pytest.mark.parametrize(("tokens_in", "tokens_out"), [(1, 50), (16, 5), (17, 16)])
def test_tokens_that_do_not_shrink_evenly_are_refused_by_check_and_run(plan, tokens_in, tokens_out):
    """On the commit before, `check` took them and a rank refused them."""
    write_plan(with_items(read_plan(plan), "vision", tokens_in, tokens_out), plan)
    words = f"{tokens_in} tokens do not shrink evenly to {tokens_out}"
    for command in (("check", plan), ("run", plan, "--local")):
        refuse(*command, words=words, folder=plan.parent)


def test_what_shrinks_evenly_is_runnable(plan):
    made = read_plan(plan)
    for tokens_in, tokens_out in ((16, 16), (16, 4), (16, 1)):
        check_runnable(with_items(made, "vision", tokens_in, tokens_out))


def test_recomputation_by_module_is_refused(plan):
    made = read_plan(plan)
    settings = made.settings.of("llm")
    again = replace(settings, computed_again=(BlockModule.CORE_ATTN,))
    others = tuple(each for each in made.settings.modules if each.module != "llm")
    with pytest.raises(ValueError, match=r"module 'llm': the runtime computes whole layers again or nothing"):
        check_runnable(replace(made, settings=replace(made.settings, modules=(*others, again))))


SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
}


def planned(
    tmp_path: Path, llm: dict[str, Any], encoder: dict[str, Any] | None = None, **changes: Any
) -> Plan:
    """Of a job with the two modules, one item to a sample.

    Args:
        llm, encoder: configurations.
        changes: `projector`, `tokens`, `mask`, `cp` and `tp` of the encoder's ranks, `llm_cp`, `text`.
    """
    modules: dict[str, Any] = {"llm": {"config": llm}}
    items: dict[str, Any] = {}
    layouts: dict[str, Any] = {"llm": {"pp": 1, "cp": changes.get("llm_cp", 1)}}
    if encoder is not None:
        modules = {"vision": {"config": encoder, "projector": changes.get("projector")}, **modules}
        items["audio" if "audio" in encoder["model_type"] else "vision"] = {
            "each": 1,
            "tokens": changes.get("tokens", [16, 16]),
        }
        layouts["vision"] = {"pp": 1, "cp": changes.get("cp", 1), "tp": changes.get("tp", 1)}
    spec = {
        "name": "small",
        "model": {"modules": modules},
        "cluster": {
            "local": {"ranks": 4, "cores": 2},
            "memory_gib": 4,
            "intra": {"gb_per_s": 1.0, "latency_us": 100.0},
        },
        "batch": {
            "samples": 2,
            "mask": changes.get("mask", "causal"),
            "fixed": {"text_tokens": changes.get("text", 8), "items": items},
        },
        "layouts": layouts,
        "precision": "float32",
        "profile": "H100",
    }
    job = job_from_spec(parse_spec(json.dumps(spec)), folder=tmp_path)
    made = cornstarch.plan(job, cost_of(job, None, None))
    accept(made)
    return made


LLAMA = GEMMA2 | {"model_type": "llama"}
CONFORMER = {
    "model_type": "phi4_multimodal_audio",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "input_size": 8,
    "time_reduction": 4,
    "nemo_conv_channels": 4,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "bias_max_distance": 8,
}
LLAMA4_VISION = SIGLIP | {"model_type": "llama4_vision_model"}
QWEN2_VISION = {
    "model_type": "qwen2_vl_vision",
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
}
OMNI_AUDIO = {
    "model_type": "qwen2_5_omni_audio_encoder",
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "n_window": 10,
}
OMNI_3_AUDIO = OMNI_AUDIO | {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "n_window": 50,
    "n_window_infer": 200,
    "downsample_hidden_size": 4,
}
MERGE = [{"merge": 4}, {"linear": "out"}]
UNFIT = {
    "heads-of-two-axes": (
        LLAMA,
        LLAMA4_VISION | {"hidden_size": 12},
        {"tokens": [17, 16]},
        "half by the column: want a multiple of 4, got 6 of a head; nearest: 8",
    ),
    "angles-of-one-size": (
        LLAMA,
        LLAMA4_VISION,
        {"tokens": [10, 9]},
        "want the 17 tokens of an image of its one size, got 10",
    ),
    "llama4-over-ranks": (
        LLAMA,
        LLAMA4_VISION,
        {"tokens": [17, 16], "cp": 2},
        "llama4_vision_model does not share tokens over ranks; want cp 1, got 2",
    ),
    "no-target": (LLAMA, None, {"text": 1}, "no text token to predict"),
    "soft-cap-under-a-mask": (
        GEMMA2,
        None,
        {"mask": "full"},
        "a mask has no soft cap; want causal, got full",
    ),
    "soft-cap-over-ranks": (GEMMA2, None, {"llm_cp": 2}, "several ranks has no soft cap; want cp 1, got 2"),
    "width-without-whole-heads": (
        GEMMA2 | {"hidden_size": 34},
        None,
        {},
        "hidden width 34 must divide by 4 heads to run",
    ),
    "odd-rotary-head": (LLAMA | {"head_dim": 9}, None, {}, "turn pairs of channels, got 9 of a head"),
    "attention-in-chunks": (
        LLAMA | {"model_type": "llama4_text", "num_local_experts": 2, "attention_chunk_size": 4},
        None,
        {},
        "takes up to 4 tokens, sample 0 has 8",
    ),
    "positions-by-batch": (
        LLAMA | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        None,
        {},
        "rope type 'dynamic' depends on the longest sequence of a batch",
    ),
    "clip-of-two-windows": (
        LLAMA,
        CONFORMER,
        {"tokens": [501, 501]},
        "takes up to 500 tokens, got 501",
    ),
    "conformer-over-ranks": (
        LLAMA,
        CONFORMER,
        {"tp": 2},
        "phi4_multimodal_audio has no tensor parallelism; want tp 1, got 2",
    ),
    "chunks-of-a-clip": (LLAMA, CONFORMER | {"chunk_size": 8}, {}, "chunk_size must be -1, got 8"),
    "clip-of-two-windows-of-omni": (LLAMA, OMNI_AUDIO, {"tokens": [12, 6]}, "takes up to 10 tokens, got 12"),
    "tokens-of-a-window": (
        LLAMA,
        OMNI_AUDIO,
        {"tokens": [7, 4]},
        "its projector makes 3 tokens of 7, got 4",
    ),
    "windows-that-cross": (
        LLAMA,
        OMNI_AUDIO | {"n_window": 9},
        {"tokens": [6, 3]},
        "a mean of two tokens would cross the border of two windows, got 9; nearest: 10",
    ),
    "window-beyond-positions": (
        LLAMA,
        OMNI_AUDIO | {"max_source_positions": 8},
        {"tokens": [6, 3]},
        "n_window must be <= max_source_positions 8, got 10; nearest: 8",
    ),
    "clip-of-two-windows-of-qwen3-omni": (
        LLAMA,
        OMNI_3_AUDIO,
        {"tokens": [27, 27]},
        "takes up to 26 tokens, got 27",
    ),
    "chunks-of-other-tokens": (
        LLAMA,
        OMNI_3_AUDIO | {"n_window": 60},
        {"tokens": [13, 13]},
        "n_window must be 49 to 52, of which 13 tokens are counted, got 60; nearest: 50",
    ),
    "windows-without-a-chunk": (
        LLAMA,
        OMNI_3_AUDIO | {"n_window_infer": 99},
        {"tokens": [13, 13]},
        "n_window_infer must hold a chunk of 100 frames, got 99; nearest: 100",
    ),
    "chunks-beyond-positions": (
        LLAMA,
        OMNI_3_AUDIO | {"max_source_positions": 12},
        {"tokens": [13, 13]},
        "max_source_positions must be >= 13, got 12; nearest: 13",
    ),
    "fewer-features-than-ranks": (
        LLAMA,
        SIGLIP | {"intermediate_size": 1},
        {"tp": 2},
        "the 1 features between the matmuls of block.0 are not cut over tp 2; nearest: tp 1",
    ),
    "merger-of-other-tokens": (
        LLAMA,
        QWEN2_VISION,
        {"tokens": [16, 2]},
        "its projector makes 4 tokens of 16, got 2",
    ),
    "pixtral-over-ranks": (
        LLAMA,
        SIGLIP | {"model_type": "pixtral", "hidden_act": "silu"},
        {"cp": 2},
        "pixtral does not share tokens over ranks; want cp 1, got 2",
    ),
    "norms-of-whole-queries": (
        LLAMA,
        SIGLIP | {"model_type": "internvl_vision", "use_qk_norm": True, "use_mean_pooling": True},
        {"tp": 2, "tokens": [17, 16]},
        "a norm over the queries of all heads is not cut by tensor parallelism; want tp 1, got 2",
    ),
    "merged-otherwise": (LLAMA, SIGLIP, {"projector": MERGE}, "makes 4 tokens of 16, got 16"),
    "merge-of-too-few": (
        LLAMA,
        SIGLIP,
        {"projector": MERGE, "tokens": [14, 4]},
        "14 tokens do not merge 2 x 2 to one",
    ),
    "class-token-alone": (
        LLAMA,
        SIGLIP | {"model_type": "clip_vision_model"},
        {"tokens": [1, 1]},
        "want more tokens than the class token",
    ),
    "one-size-of-image": (
        LLAMA,
        SIGLIP | {"model_type": "aimv2_vision_model"},
        {"tokens": [8, 8]},
        "want the 16 tokens of an image of its one size, got 8",
    ),
}


@pytest.mark.parametrize(("llm", "encoder", "changes", "words"), UNFIT.values(), ids=UNFIT)
def test_what_a_rank_would_refuse_is_refused_before(tmp_path, llm, encoder, changes, words):
    """On the commit before, all of them were taken; a rank refused them, or transformers did."""
    made = planned(tmp_path, llm, encoder, **changes)
    with pytest.raises(ValueError, match=words):
        check_runnable(made)
    with pytest.raises((ValueError, RankError)):
        emulate(lower(made), RunSettings(steps=1, warmup=0))


def test_tiles_end_in_a_projector_with_a_name(tmp_path):
    tiles = SIGLIP | {
        "model_type": "mllama_vision_model",
        "num_global_layers": 1,
        "attention_heads": 2,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
    }
    crossed = LLAMA | {"model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0}
    made = planned(tmp_path, crossed, tiles, projector=[{"linear": "out"}], tokens=[68, 68])
    with pytest.raises(ValueError, match="runs with a linear or mlp projector"):
        check_runnable(made)


def test_what_is_refused_runs_with_one_thing_changed(tmp_path):
    for llm, encoder, changes in (
        (GEMMA2, None, {}),
        (LLAMA, SIGLIP, {"projector": MERGE, "tokens": [16, 4]}),
        (LLAMA, SIGLIP | {"model_type": "clip_vision_model"}, {"tokens": [17, 16]}),
        (LLAMA, OMNI_AUDIO, {"tokens": [7, 3]}),
        (LLAMA, LLAMA4_VISION, {"tokens": [17, 16]}),
    ):
        made = planned(tmp_path, llm, encoder, **changes)
        check_runnable(made)
        assert emulate(lower(made), RunSettings(steps=1, warmup=0)).losses[0] > 0


def test_a_generator_is_no_encoder_whose_tokens_shrink():
    """On the commit before, its condition had to divide all of its tokens."""
    made = generator()
    for tokens_in, tokens_out in ((10, 3), (73, 8)):
        check_segment(made, Segment("generator", 0, tokens_in, tokens_out))
    with pytest.raises(ValueError, match="want at least 5 tokens inside, got 4"):
        check_segment(made, Segment("generator", 0, 4, 3))


def test_all_to_all_over_too_many_ranks_is_refused_before_it_is_priced(tmp_path):
    """On the commit before, pricing divided by no heads."""
    said = f"""
name: small
model: {{modules: {{llm: {{config: {json.dumps(LLAMA)}}}}}}}
cluster: {{local: {{ranks: 4, cores: 2}}, memory_gib: 1, intra: {{gb_per_s: 1.0, latency_us: 100.0}}}}
batch: {{samples: 2, fixed: {{text_tokens: 8}}}}
layouts: {{llm: {{pp: 1, cp: 3, key_exchange: all-to-all}}}}
profile: H100
"""
    with pytest.raises(ValueError, match=r"cp must divide the 2 key/value heads of .*, got cp = 3; want 2"):
        job_from_spec(parse_spec(said), folder=tmp_path)


def test_tokens_that_stages_hand_on_in_parts_are_priced_and_not_run(tmp_path):
    made = planned(tmp_path, LLAMA, SIGLIP, tp=2)
    check_runnable(made)
    parts = replace(made, settings=replace(made.settings, kernels=Kernels.MEGATRON_SEQUENCE))
    with pytest.raises(
        ValueError, match="'vision': kernels 'megatron-sequence' are priced, and not run over tp 2"
    ):
        check_runnable(parts)
