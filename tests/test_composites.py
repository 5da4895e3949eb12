"""Composite configurations: taken apart into modules that have every weight of transformers' own model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import AutoConfig

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, original, owner_of
from experiments.doors.whole_sizes import TEXT
from tests.command_line import accept, workbench
from tests.published_composites import CONFIGS as PUBLISHED
from tests.published_composites import DEFAULTS, default
from workbench.job.draft import Train, draft, machines_of
from workbench.job.drafted_batch import WantedBatch
from workbench.job.job import load_job
from workbench.job.step_batches import step_batches
from workbench.model.composites.registry import COMPOSITES, take_apart
from workbench.model.hf_config import modality_of
from workbench.plan.runnable import check_family


def config_of(name: str) -> dict[str, Any]:
    return PUBLISHED[name] if name in PUBLISHED else CONFIGS[name]


@cache
def weights_of(name: str) -> Mapping[str, int]:
    """Elements of every weight of transformers' own model."""
    return {weight: held.numel() for weight, held in original(config_of(name)).named_parameters()}


def test_every_composite_is_held_against_transformers() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(COMPOSITES)


@pytest.mark.parametrize("name", [*CONFIGS, *PUBLISHED])
def test_modules_have_every_weight_of_the_whole(name: str) -> None:
    """Module by module, with those that are named as left out; of small ones and at full size."""
    parts = take_apart(config_of(name))
    modules = modules_of(dict(parts.modules))
    dropped = tuple(each.weights for each in parts.dropped)
    sizes = dict.fromkeys(modules, 0)
    for weight, elements in weights_of(name).items():
        if not weight.startswith(dropped):
            sizes[owner_of(parts, weight)] += elements
    assert sizes == {called: module.num_parameters for called, module in modules.items()}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_parts_that_a_configuration_lacks_are_transformers_own(kind: str) -> None:
    absent, given = (
        modules_of(dict(take_apart(config).modules)) for config in ({"model_type": kind}, default(kind))
    )
    assert [module.layers for module in absent.values()] == [module.layers for module in given.values()]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_name_that_is_dropped_is_one(name: str) -> None:
    """A pooling head, or what only whole checkpoints hold, may be absent; everything else is there."""
    for dropped in take_apart(CONFIGS[name]).dropped:
        optional = "pooling head" in dropped.what or dropped.weights.startswith(
            ("talker.", "token2wav.", "code2wav.", "mtp.", "model.visual.vision_model.embeddings.packing")
        )
        assert optional or any(weight.startswith(dropped.weights) for weight in weights_of(name)), dropped


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_configuration_says_the_same(name: str, tmp_path: Any) -> None:
    """transformers leaves out of a config.json what its classes have as defaults."""
    config = CONFIGS[name]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    AutoConfig.for_model(config["model_type"], **rest).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    ours, read = take_apart(config), take_apart(saved)
    assert read.token_ids
    counts = [{n: m.num_parameters for n, m in modules_of(dict(p.modules)).items()} for p in (ours, read)]
    assert counts[0] == counts[1]
    assert ours.dropped == read.dropped


@pytest.mark.parametrize("name", CONFIGS)
def test_init_writes_a_job_that_is_read(name: str, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    target = tmp_path / "job.yaml"
    arguments = ["init", str(tmp_path), "--gpus", "4xA100-80GB", "-o", str(target), "--json"]
    accept(*arguments, "--text-tokens", "32")
    of_any_size = "images:" in target.read_text()
    done = accept(*arguments, "--text-tokens", "32", *(["--image", "32x32"] if of_any_size else []))
    record = json.loads(done.stdout.splitlines()[-1])
    job = load_job(target)
    assert {m.name: m.num_parameters for m in job.model.modules} == {
        called: said["weights"] for called, said in record["modules"].items()
    }
    assert {m.name: (m.modality, m.num_trained) for m in job.model.modules} == {
        called: (said["modality"], said["trainable"]) for called, said in record["modules"].items()
    }
    assert len(job.batch) >= job.replicas


@pytest.mark.parametrize("kind", ["qwen2_vl", "paddleocr_vl"])
def test_flat_configurations_are_read_as_nested_ones(kind: str) -> None:
    nested = CONFIGS[kind]
    flat = {"model_type": kind, **TEXT, "vision_config": nested["vision_config"]}
    counts = [
        {name: module.num_parameters for name, module in modules_of(dict(take_apart(c).modules)).items()}
        for c in (nested, flat)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_feature_layer": [-2, "x"]}, "vision_feature_layer must be a whole number, or a list"),
        ({"vision_feature_layer": [-2, 3]}, r"must name each hidden state once, .* got \[-2, 3\]"),
        ({"vision_config": 3}, "vision_config must be an object"),
        ({"vision_feature_layer": -9}, "feature_layer must be from -5 to 4, got -9"),
        ({"text_config": {"model_type": "lama"}}, "nearest: llama"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        modules_of(dict(take_apart({**CONFIGS["llava"], **change}).modules))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "llama4",
            "llama4: vision_config.vision_output_dim must be 4096, got 7680( by default)?; nearest: 4096",
        ),
        ("qwen3_vl_moe", "vision_config.out_hidden_size must be the LLM's hidden_size 2048, got 3584"),
    ],
)
def test_defaults_that_do_not_fit_each_other_are_refused(kind: str, words: str) -> None:
    """Absent or written out; transformers builds them and fails at the first image."""
    for config in ({"model_type": kind}, default(kind)):
        with pytest.raises(ValueError, match=words):
            take_apart(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenize_function": "st_argmax"}, "tokenize_function must be softmax, got 'st_argmax'"),
        ({"hidden_stride": 3}, "hidden_stride must divide the 4 patches of a row, got 3; nearest: 1"),
        (
            {"num_visual_indicator_tokens": 30},
            "num_visual_indicator_tokens must be below vocab_size 30, got 30",
        ),
    ],
)
def test_heads_of_ovis_2_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    config = CONFIGS["ovis2"]
    with pytest.raises(ValueError, match=words):
        take_apart({**config, "vision_config": {**config["vision_config"], **change}})


def test_the_table_of_ovis_2_is_as_wide_as_its_language_model() -> None:
    """And as long as its head, where that is not the table of its tokens."""
    for change, words in (
        ({"hidden_size": 40}, "ovis2: hidden_size must be the LLM's 48, got 40; nearest: 48"),
        ({"tie_word_embeddings": False}, "ovis2: vocab_size must be the LLM's 96, got 151643; nearest: 96"),
    ):
        with pytest.raises(ValueError, match=words):
            take_apart({**CONFIGS["ovis2"], **change})


def test_a_softmax_has_room_for_every_share() -> None:
    parts = take_apart(CONFIGS["ovis2"])
    vision = parts.modules["vision"]
    assert isinstance(vision.projector, tuple)
    narrow = tuple(replace(step, softmax=24) if step.softmax else step for step in vision.projector)
    with pytest.raises(ValueError, match="a projector's softmax must be as wide as its tokens, 25, got 24"):
        modules_of({**parts.modules, "vision": replace(vision, projector=narrow)})


def test_exaone_4_5_reads_exaone_4_alone() -> None:
    config = CONFIGS["exaone4_5"]
    first_release = {**config["text_config"], "model_type": "exaone4_5_text"}
    assert take_apart({**config, "text_config": first_release}) == take_apart(config)
    with pytest.raises(ValueError, match=r"text_config\.model_type must be exaone4, got 'llama'"):
        take_apart({**config, "text_config": {"model_type": "llama", **TEXT}})


def test_paligemma_runs_as_transformers_saves_it() -> None:
    """It adds that attention is bidirectional, which a sample's mask says of the prompt alone."""
    config = default("paligemma")
    assert config["text_config"]["use_bidirectional_attention"]
    for module in modules_of(dict(take_apart(config).modules)).values():
        check_family(module)


def test_a_composite_is_no_module() -> None:
    for config in (CONFIGS["mllama"], CONFIGS["qwen2_vl"], CONFIGS["qwen2_audio"]):
        with pytest.raises(ValueError, match="workbench init"):
            modality_of(config)


def test_an_unknown_composite_names_the_nearest(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava_nxt", "vision_config": {}}))
    with pytest.raises(ValueError, match=r"'llava_nxt' is not supported \(nearest: llava_next; if"):
        draft(str(tmp_path), machines_of("8xH100", None), train=Train.LLM, wanted=WantedBatch(text_tokens=8))


def test_a_composite_with_parts_of_its_own_is_called_one(tmp_path: Any) -> None:
    """No rule reads its keys, so that no other model_type is said to join them; unknown parts are named."""
    config = AutoConfig.for_model("bark").to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(config)
    want = r"^composite model_type 'bark' is not supported, and neither are these .* codec_config \(encodec\)"
    with pytest.raises(ValueError, match=want):
        draft(str(tmp_path), machines_of("8xH100", None), train=Train.LLM, wanted=WantedBatch(text_tokens=8))


@pytest.mark.parametrize(
    ("gpus", "nodes", "words"),
    [
        ("H100", None, "want a number, 'x' and a device"),
        ("0xH100", None, "want a number, 'x' and a device, got '0xH100'; nearest: 8xH100"),
        ("128*H200", None, "want a number, 'x' and a device, got '128.H200'; nearest: 128xH200"),
        ("h200x128", None, "want a number, 'x' and a device, got 'h200x128'; nearest: 128xH200"),
        ("32", None, "got '32'; nearest: 32xH100"),
        ("30xH100", None, "30 GPUs make no whole nodes of 8; want --nodes, or 32 GPUs"),
        ("8xH1000", None, "nearest: H100"),
        ("8xA100", None, "nearest: A100-40GB"),
        ("16xH100", 3, "must divide 16 GPUs, got 3; nearest: 2"),
    ],
)
def test_machines_that_cannot_be_are_refused(gpus: str, nodes: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        machines_of(gpus, nodes)


def test_trainable_is_what_was_asked_for(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llava"]))
    machines = machines_of("8xH100", None)
    trained = {}
    for train in Train:
        made = draft(str(tmp_path), machines, train=train, wanted=WantedBatch(text_tokens=8))
        trained[train] = {
            module.name: sum(layer.trainable for layer in module.layers) for module in made.model.modules
        }
    assert trained[Train.PROJECTORS] == {"vision": 1, "llm": 0}
    assert trained[Train.LLM] == {"vision": 1, "llm": 5}
    assert trained[Train.ALL] == {"vision": 5, "llm": 5}
    assert trained[Train.LORA] == {"vision": 1, "llm": 0}


def test_a_half_downloaded_checkpoint_is_planned_and_says_so(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llava"]))
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / weights["a"]).write_text("")
    target = tmp_path / "job.yaml"
    done = accept("init", str(tmp_path), "--gpus", "4xH100", "-o", str(target))
    assert "1 weight files are missing (model-00002-of-00002.safetensors" in done.output
    assert "# not downloaded yet: model-00002-of-00002.safetensors" in target.read_text()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ValueError, match="is it half downloaded"):
        draft(str(tmp_path), machines_of("4xH100", None), train=Train.ALL, wanted=WantedBatch(text_tokens=8))


def test_a_tower_of_any_size_gets_images_of_a_page(tmp_path: Any) -> None:
    """Where the composite's usual tower has a size of its own."""
    seen = {"model_type": "pixtral", **CONFIGS["llava"]["vision_config"]}
    config = {**CONFIGS["llava"], "vision_config": seen, "vision_feature_select_strategy": "full"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = draft(
        str(tmp_path), machines_of("4xH100", None), train=Train.LLM, wanted=WantedBatch(text_tokens=8)
    )
    (tmp_path / "job.yaml").write_text(made.text)
    assert load_job(tmp_path / "job.yaml").batch


def test_an_unknown_family_says_what_would_be_needed(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama", "hidden_size": 64}))
    with pytest.raises(
        ValueError, match=r"model_type 'lama' is not supported; nearest: llama\. If its arith"
    ):
        draft(str(tmp_path), machines_of("4xH100", None), train=Train.ALL, wanted=WantedBatch(text_tokens=8))
    inner = {**CONFIGS["internvl"], "text_config": {"model_type": "zyx"}}
    for unlike in ({"model_type": "dia"}, inner):  # a generator's name, dit, is not that of a language model
        (tmp_path / "config.json").write_text(json.dumps(unlike))
        with pytest.raises(
            ValueError, match=r"model_type '...' is not supported: to plan it, add its layers"
        ):
            draft(
                str(tmp_path), machines_of("4xH100", None), train=Train.ALL, wanted=WantedBatch(text_tokens=8)
            )


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_omni_thinker", "llava", "paddleocr_vl", "video_llama_3"]
)
def test_a_batch_is_like_the_users_data(name: str, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    rows = [
        {"text_tokens": 40, "image_width": [64, 32], "image_height": [48, 32]},
        {"text_tokens": 12, "image_width": 64, "image_height": 48},
        {"text_tokens": 25, "image_width": None, "image_height": None},
    ]
    data, target = tmp_path / "sizes.jsonl", tmp_path / "job.yaml"
    data.write_text("\n".join(map(json.dumps, rows * 8)))
    words = ["init", str(tmp_path), "--gpus", "4xH100", "--data", str(data), "-o", str(target)]
    accept(*words)
    job = load_job(target)
    sizes = [
        (sum(part.tokens_in for part in sample.of("text")), len(sample.of("vision"))) for sample in job.batch
    ]
    assert sizes == [((40, 2), (12, 1), (25, 0))[row % 3] for row in range(len(job.batch))]
    (batch,) = step_batches(target, job, 1)
    assert len(batch) == len(job.batch)
    assert batch != job.batch


def test_init_tells_a_batch_of_sorted_data(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llava"]))
    lengths = [tokens for tokens in range(1, 161) for _ in range(40)]
    for rows, num_told, batch in ((lengths, 1, 1024), ([64] * 6400, 0, 1024)):
        (tmp_path / "sizes.jsonl").write_text("".join(f'{{"text_tokens": {row}}}\n' for row in rows))
        words = ["--data", tmp_path / "sizes.jsonl", "-o", tmp_path / "job.yaml"]
        told = accept("init", tmp_path, "--gpus", "4xH100", *words).stderr
        assert len(load_job(tmp_path / "job.yaml").batch) == batch
        assert told.count(f"the batch is the first {batch} rows of") == num_told


def test_data_that_no_encoder_takes_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llava"]))
    (tmp_path / "sizes.jsonl").write_text("\n".join(['{"text_tokens": 4, "audio_seconds": 2.0}'] * 99))
    words = ["init", str(tmp_path), "--gpus", "4xH100", "--data", str(tmp_path / "sizes.jsonl")]
    done = workbench(*words, "-o", str(tmp_path / "job.yaml"))
    assert done.exit_code == 2
    assert "rows have clips; want one encoder of them in model" in done.output
    (tmp_path / "sizes.jsonl").write_text('{"text_tokens": 4}')
    few = workbench(*words, "-o", str(tmp_path / "job.yaml"))
    assert few.exit_code == 2
    assert "has 1 rows, the job wants 16 samples; repeat the rows" in few.output
    both = workbench(*words, "--text-tokens", "9", "-o", str(tmp_path / "job.yaml"))
    assert both.exit_code == 2
    assert "--text-tokens: sizes of texts are those of --data; want one of the two" in both.output
    assert not (tmp_path / "job.yaml").exists()
