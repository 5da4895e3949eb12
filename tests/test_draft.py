"""The job that `workbench init` drafts: replicas and samples that fill the ranks, and flags that count."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.predict import predict
from tests.command_line import accept, workbench
from tests.job_files import write
from tests.test_composites import CONFIGS
from workbench.cost.products import ProductFormat
from workbench.job.draft import Train, draft, machines_of
from workbench.job.drafted_batch import WantedBatch
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.stage_counts import silent
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept as accept_plan

ROOT = Path(__file__).parents[1]
LLAMA_7B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA_70B = {**LLAMA_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
SMALL_TIED = {**LLAMA_7B, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}


def config_in(folder: Path, config: Mapping[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drafted(
    folder: Path,
    config: Mapping[str, Any],
    gpus: str,
    nodes: int | None = None,
    products: ProductFormat = ProductFormat.SAME,
    text_tokens: int = 64,
) -> tuple[Job, str]:
    made = draft(
        config_in(folder, config),
        machines_of(gpus, nodes, products),
        train=Train.LLM,
        wanted=WantedBatch(text_tokens=text_tokens),
    )
    return job_from_spec(parse_spec(made.text, where="draft"), folder=folder), made.text


@pytest.mark.parametrize(
    ("gpus", "replicas", "samples"),
    [
        pytest.param(1, 1, 8, id="one"),
        pytest.param(8, 2, 32, id="a-node"),
        pytest.param(16, 4, 64, id="five-have-room-but-leave-one-over"),
        pytest.param(64, 16, 256, id="twenty-one-leave-one-over"),
        pytest.param(1024, 256, 4096, id="three-hundred-have-room"),
    ],
)
def test_replicas_leave_no_gpu_over_and_samples_go_to_all(
    tmp_path: Path, gpus: int, replicas: int, samples: int
) -> None:
    """6.74 billion weights of 18 bytes are 121 GB: three stages of 60 % of 80 GB.

    Of gpus / 3 replicas down to half of that the largest number that divides all GPUs is taken: of 16 GPUs
    four, of four ranks each. Four microbatches for each of four stages are 16 samples of a replica.
    """
    job, _ = drafted(tmp_path, LLAMA_7B, f"{gpus}xH100")
    assert (job.replicas, len(job.batch)) == (replicas, samples)
    assert gpus % job.replicas == 0
    assert len(job.batch) % gpus == 0


def test_a_prime_number_of_gpus_leaves_the_fewest_over(tmp_path: Path) -> None:
    """61 GPUs, three a replica: 20, 15 and 12 replicas leave one over, and 20 are the most.

    Each has 4 x 3 microbatches, for three stages.
    """
    job, _ = drafted(tmp_path, LLAMA_7B, "61xH100", nodes=1)
    assert (job.replicas, len(job.batch)) == (20, 20 * 4 * 3)


@pytest.mark.parametrize(("tokens", "stages"), [(64, 3), (9000, 4), (12_000, 5), (18_000, 3)])
def test_there_are_stages_for_one_sample_beside_the_state(tmp_path: Path, tokens: int, stages: int) -> None:
    """State is 121.3 GB. A token keeps 8 x 4,096 + 3 x 11,008 numbers of two bytes and 128 bytes in each of
    32 blocks, whole on a rank, which keeps as many microbatches as there are stages; in the head two vectors
    and logits in float32, and two logits are in work: 4.5 MB. So 9,000 are 40.7 GB beside 30.3 of four
    stages, and 12,000 are 54.3 beside 24.3 of five; 18,000 are more than a GPU has, which `plan` says."""
    num_bytes = tokens * (32 * (2 * (8 * 4096 + 3 * 11008) + 128) + 2 * 2 * 4096 + 4 * 32000 + 2 * 2 * 32000)
    state = 18 * 6_738_415_616
    fitting = next(n for n in range(3, 60) if state / n + num_bytes < 80e9) if num_bytes < 80e9 else 3
    assert fitting == stages
    job, _ = drafted(tmp_path, LLAMA_7B, "60xH100", nodes=10, text_tokens=tokens)
    assert job.replicas == 60 // stages


def test_what_does_not_fit_on_all_gpus_is_recomputed(tmp_path: Path) -> None:
    """Of 7,000 tokens 31.6 GB are kept (see above) beside 15.2 GB of state on eight of eight GPUs of 40 GB.

    A recomputed block keeps its input alone, a sixteenth of that.
    """
    job, _ = drafted(tmp_path, LLAMA_7B, "8xA100-40GB", text_tokens=7000)
    assert job.settings.of("llm").recompute is Recompute.BLOCKS
    assert job.layouts == ()
    assert job.replicas == 1
    fits, _ = drafted(tmp_path, LLAMA_7B, "8xA100-40GB", text_tokens=1000)
    assert fits.settings.of("llm").recompute is Recompute.NONE


def test_a_layout_that_cuts_layers_says_whom_it_keeps_out(tmp_path: Path) -> None:
    job, text = drafted(tmp_path, LLAMA_70B, "64xH100")
    (layout,) = job.layouts
    assert layout.tp > 1
    assert f"# llm: its layout has tp {layout.tp}; fsdp and hsdp plan it with tp 1 or no layout" in text
    assert "fsdp" not in drafted(tmp_path, LLAMA_7B, "64xH100")[1]


def test_experts_are_on_more_stages_before_they_are_cut() -> None:
    """30.5 billion weights of 18 bytes are 550 GB: twelve stages of 48 GB, and one for the tower, of 64 GPUs.

    The layouts are left to searches, which choose how experts are distributed.
    """
    config = str(ROOT / "examples" / "moe-vlm-64-h100" / "config.json")
    made = draft(config, machines_of("64xH100", None), train=Train.LLM)
    job = job_from_spec(parse_spec(made.text, where="draft"), folder=ROOT)
    assert (job.layouts, job.replicas) == ((), 4)
    assert len(job.batch) == 4 * 4 * 16


@pytest.mark.parametrize(
    ("model", "gpus", "replicas", "ep", "recompute"),
    [
        pytest.param(DEEPSEEK_V3, 128, 1, 1, Recompute.NONE, id="no-degree-fits"),
        pytest.param(DEEPSEEK_V3, 256, 16, 16, Recompute.BLOCKS, id="more-state-beside-less"),
        pytest.param(DEEPSEEK_V3, 512, 32, 32, Recompute.NONE, id="room"),
        pytest.param(DEEPSEEK_V3, 1024, 64, 32, Recompute.NONE, id="more-replicas"),
        pytest.param(QWEN3_235B, 64, 1, 1, Recompute.NONE, id="too-few-gpus"),
        pytest.param(QWEN3_235B, 128, 8, 8, Recompute.NONE, id="shallower"),
    ],
)
def test_experts_that_fill_many_stages_are_distributed(
    model: Mapping[str, Any], gpus: int, replicas: int, ep: int, recompute: Recompute, tmp_path: Path
) -> None:
    """654 of DeepSeek-V3's 671 billion weights are of experts. A weight takes 6 bytes, its optimizer 12.

    With ep 32 and as many shares of the optimizer, 654 x 18 / 32 + 17 x (6 + 12 / 32) GB are 477: ten stages
    of 48 GB, to which activations add some; with ep 16 they are 850, 18 stages. Beside recomputed blocks 64
    GB are for state, and 850 GB fit on 14 stages.
    """
    job, text = drafted(tmp_path, model, f"{gpus}xH100", text_tokens=1024)
    spec = yaml.safe_load(text)
    degree = spec.get("layouts", {}).get("llm", {}).get("ep", 1)
    found = (spec["batch"]["replicas"], degree, job.settings.of("llm").recompute)
    assert found == (replicas, ep, recompute)
    assert (f"# llm: its layout has ep {ep}, as whole experts take more than 32 stages" in text) == (ep > 1)
    if ep > 1:
        assert job.settings.of("llm").sharding is Sharding.OPTIMIZER
        assert all(layout.tp == 1 and layout.pp is None for layout in job.layouts)


def test_distributed_experts_are_planned_in_memory_and_faster_than_whole_ones(tmp_path: Path) -> None:
    """Samples a second of the default strategy, three times as many and more."""
    job, text = drafted(tmp_path, QWEN3_235B, "128xH100", text_tokens=1024)
    spec = yaml.safe_load(text)
    del spec["layouts"]
    spec["batch"]["replicas"] = 1
    whole = job_from_spec(parse_spec(yaml.safe_dump(spec), where="whole"), folder=tmp_path)
    cost = cost_of(job, None, None)
    draft_s, whole_s = (
        predict(*accept_plan(PLANNERS["cornstarch"](each, cost, silent)), cost).iteration_s
        for each in (job, whole)
    )
    assert 3 * draft_s < whole_s


def test_a_draft_fixes_no_degree_that_it_does_not_need(tmp_path: Path) -> None:
    """Searches keep the tp, cp and ep of a layout, so one that says tp 1 would keep experts whole."""
    job, text = drafted(tmp_path, LLAMA_7B, "64xH100")
    assert job.layouts == ()
    assert "layouts" not in text


def test_a_format_of_products_fixes_no_degree_either(tmp_path: Path) -> None:
    """A job file has it in the LLM's entry, which then states settings alone."""
    job, text = drafted(tmp_path, LLAMA_7B, "64xH100", products=ProductFormat.FP8)
    assert "products: fp8" in text
    assert "tp" not in yaml.safe_load(text)["layouts"]["llm"]
    assert job.layouts == ()
    assert job.settings.of("llm").products is ProductFormat.FP8


@pytest.mark.parametrize(
    ("config", "name"),
    [("llama-7b/config.json", "llama-7b"), ("llama-7b", "llama-7b"), ("configs/big.json", "big")],
)
def test_a_job_is_named_after_the_model_s_folder_or_its_file(tmp_path: Path, config: str, name: str) -> None:
    """Files of one folder that are not all `config.json` are different models."""
    path = tmp_path / config
    file = path if path.suffix else path / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(SMALL_TIED))
    accept("init", path, "--gpus", "1xH100", "-o", tmp_path / "job.yaml")
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["name"] == name


def test_no_more_weights_are_trained_than_there_are(tmp_path: Path) -> None:
    """Of a model whose head is its table of tokens."""
    words = ("init", config_in(tmp_path, SMALL_TIED), "--gpus", "4xH100", "-o", tmp_path / "job.yaml")
    weights, trained = re.findall(r"\d+,[\d,]+", accept(*words).output)
    assert weights == trained


def test_mergers_that_stay_frozen_inside_a_tower_are_named(tmp_path: Path) -> None:
    """Qwen3-VL's last merger is its projector; those of inner blocks belong to their blocks."""
    model, job = config_in(tmp_path, CONFIGS["qwen3_vl"]), tmp_path / "job.yaml"
    inner = len(CONFIGS["qwen3_vl"]["vision_config"]["deepstack_visual_indexes"])
    note = f"module 'vision': its last merger is trained, the {inner} of inner blocks (DeepStack) are frozen"
    told = workbench("init", model, "--gpus", "1xH100", "-o", job).stderr
    assert note in " ".join(told.split())
    assert note in job.read_text(encoding="utf-8")
    told = workbench("init", model, "--gpus", "1xH100", "--train", "all", "-o", job).stderr
    assert "DeepStack" not in told + job.read_text(encoding="utf-8")


def test_a_job_file_with_edits_is_replaced_with_a_warning(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    words = ("init", config_in(tmp_path, SMALL_TIED), "--gpus", "4xH100", "-o", job)
    assert [accept(*words).stderr for _ in range(2)] == ["", ""]
    drafted_text = job.read_text()
    job.write_text(drafted_text.replace("samples: ", "samples: 1"))
    assert accept(*words).stderr.startswith(f"workbench: warning: {job} had other content, which is replaced")
    assert job.read_text() == drafted_text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(("--train", "projectors"), "--train: projectors want a model that has some", id="train"),
        pytest.param(("--image", "448x448"), "--image: want a model with an encoder for images", id="image"),
    ],
)
def test_a_flag_of_what_the_model_lacks_is_refused(
    tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    job = tmp_path / "job.yaml"
    done = workbench("init", config_in(tmp_path, SMALL_TIED), "--gpus", "4xH100", "-o", job, *more)
    assert done.exit_code == 2
    assert message in done.output
    assert not job.exists()


@pytest.mark.parametrize("command", ["plan", "search"])
def test_a_seed_of_nothing_is_refused(tmp_path: Path, command: str) -> None:
    done = workbench(command, write(tmp_path), "--seed", "3", "-o", tmp_path / "plan.json")
    assert done.exit_code == 2
    assert "--seed 3 has no effect without --sizes" in done.output


@pytest.mark.parametrize(
    ("gpus", "device"), [("8xh100-sxm", "H100"), ("8xNVIDIA-A100-SXM4-80GB", "A100-80GB"), ("8xH100", "H100")]
)
def test_gpus_have_the_names_that_profiles_have(gpus: str, device: str) -> None:
    assert machines_of(gpus, None).device == device


@pytest.mark.parametrize(
    ("gpus", "refusal"),
    [
        ("8xA100", "want one of A100-40GB, A100-80GB; nearest: A100-40GB"),
        ("8xH100-40GB", "H100 has 80GB; nearest: H100"),
        ("8xH10", "nearest: H100"),
    ],
)
def test_gpus_of_no_one_profile_are_refused(gpus: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=f"--gpus: no profile {gpus[2:]!r}: .*{refusal}$"):
        machines_of(gpus, None)


@pytest.mark.parametrize(("nodes", "nearest"), [(15, 16), (13, 16), (5, 4), (1000, 128)])
def test_the_nearest_number_of_nodes_may_be_larger(nodes: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=f"--nodes: must divide 128 GPUs, got {nodes}; nearest: {nearest}$"):
        machines_of("128xH100", nodes)
