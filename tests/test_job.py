"""job.yaml: what it builds, and the one line that every mistake gets."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from tests.dag_models import chain
from tests.job_files import put, write
from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.job.parts import zoo_names
from workbench.model.hf_config import module_from_config
from workbench.model.layer import LayerKind
from workbench.model.mmdit import MMDITS
from workbench.model.model_graph import Module, connect
from workbench.model.zoo import from_shape
from workbench.plan.check import check
from workbench.plan.plan import ModuleSettings, Precision, Recompute, Settings, Sharding
from workbench.strategies import cornstarch
from workbench.units import GIB

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)


def test_a_small_job(tmp_path):
    job = load_job(write(tmp_path))
    assert [(m.name, m.modality, len(m.layers)) for m in job.model.modules] == [
        ("vision", "vision", 4),
        ("llm", "text", 4),
    ]
    assert [layer.trainable for m in job.model.modules for layer in m.layers] == [False] * 3 + [True] + [
        False
    ] * 4
    assert [edge.name for edge in job.model.edges] == ["vision>llm"]
    assert job.cluster.nodes == (Node(device="cpu", num_ranks=3, memory_bytes=GIB, num_cores=2),)
    assert job.cluster.intra == Link(name="intra", bytes_per_s=1e9, latency_s=50e-6)
    assert job.batch == fixed_samples(4, text_tokens=10, items={"vision": [ItemTokens(4, 4)] * 2})
    assert job.layouts == (ModuleLayout(module="llm", pp=2),)
    assert job.settings.precision is Precision.FLOAT32
    assert job.settings.of("llm") == ModuleSettings(module="llm", recompute=Recompute.FULL)
    assert (job.microbatch_samples, job.replicas, job.max_ranks, job.profile) == (1, 1, None, "cpu.json")
    with pytest.raises(FrozenInstanceError):
        job.replicas = 2


def test_an_entry_of_settings_alone_leaves_degrees_open(tmp_path):
    """Searches keep the tp, cp and ep of a layout; whoever writes `tp: 1` means it."""
    open_job = load_job(write(tmp_path, put("layouts", "llm", value={"recompute": "full"})))
    assert open_job.layouts == ()
    assert open_job.settings.of("llm") == ModuleSettings(module="llm", recompute=Recompute.FULL)
    fixed = load_job(write(tmp_path, put("layouts", "llm", value={"recompute": "full", "tp": 1})))
    assert fixed.layouts == (ModuleLayout(module="llm", tp=1),)


def test_equal_files_give_equal_jobs(tmp_path):
    assert load_job(write(tmp_path)) == load_job(write(tmp_path))


def test_example_valm_is_the_cluster_of_cornstarch():
    job = load_job(EXAMPLES / "valm.yaml")
    assert {m.name: round(m.num_parameters / 1e9, 1) for m in job.model.modules} == {
        "vision": 0.4,
        "audio": 0.7,
        "llm": 8.0,
    }
    assert (len(job.cluster.nodes), job.cluster.num_ranks) == (6, 24)
    assert job.cluster.nodes[0].device == load_profile("A40").device
    assert job.cluster.nodes[0].memory_bytes == load_profile("A40").memory_bytes
    assert len(job.batch) == 24
    trained = [layer.kind for module in job.model.modules for layer in module.layers if layer.trainable]
    assert trained == [LayerKind.PROJECTOR] * 2
    assert {sample.num_tokens for sample in job.batch} == {1024 + 729 + 1500}


def test_example_tiny_has_samples_of_every_kind():
    job = load_job(EXAMPLES / "tiny.yaml")
    assert job.cluster.num_ranks == 4
    assert job.model.num_parameters < 5e6
    kinds = {(bool(sample.of("vision")), bool(sample.of("audio"))) for sample in job.batch}
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
    assert job.model.module("llm").layers[-1].out_width == 259


def test_a_config_may_be_a_path_beside_the_file(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}'
    )
    job = load_job(write(tmp_path, put("model", "modules", "llm", "config", value="llama")))
    assert len(job.model.module("llm").layers) == 5


def test_a_profile_may_be_a_path_beside_the_file(tmp_path):
    (tmp_path / "cpu.json").write_text("{}")
    assert load_job(write(tmp_path)).profile == str(tmp_path / "cpu.json")


def test_an_encoder_may_feed_another(tmp_path):
    def cascade(data):
        first = dict(data["model"]["modules"]["vision"])
        data["model"]["modules"] = {"first": first | {"modality": "raw"}} | data["model"]["modules"]
        data["model"]["edges"] = [["first", "vision"], ["vision", "llm"]]

    job = load_job(write(tmp_path, cascade))
    assert job.model.module("first").layers[-1].out_width == 16
    assert job.model.module("vision").layers[-1].out_width == 32


def test_a_text_only_job(tmp_path):
    def text_only(data):
        del data["model"]["modules"]["vision"]
        data["batch"]["fixed"]["items"] = {}

    job = load_job(write(tmp_path, text_only))
    assert [module.name for module in job.model.modules] == ["llm"]
    assert job.model.edges == ()


@pytest.mark.parametrize("name", zoo_names())
def test_every_name_of_the_zoo_is_a_module(tmp_path, name):
    generates = name == "sd-2.1-unet" or name in MMDITS
    is_encoder = not generates and not name.startswith(
        ("llama", "mistral", "phi-4", "qwen2.5-", "gemma", "gpt", "bert", "cornstarch-llama")
    )
    is_encoder |= name in ("qwen2.5-vl-vision", "phi-4-mm-audio (conformer)")

    def use(data):
        data["batch"]["fixed"]["items"] = {}
        modules = data["model"]["modules"]
        if is_encoder:
            modules["vision"] = {"zoo": name}
        elif generates:
            modules["drawing"] = modules.pop("vision") | {"zoo": name}
            del modules["drawing"]["config"]
        else:
            del modules["vision"]
            modules["llm"] = {"zoo": name}

    job = load_job(write(tmp_path, lambda data: (use(data), data.pop("layouts"))))
    assert job.model.modules[0 if generates else -1].modality == "text"
    assert len(job.model.modules) == 1 + is_encoder + generates


@pytest.mark.parametrize(
    ("config", "item", "tokens"),
    [
        ({"model_type": "qwen2_vl_vision"}, {"images": [[720, 1280]]}, [(4784, 1196)]),
        ({"model_type": "qwen2_vl_vision"}, {"images": [[56, 56], [28, 112]]}, [(16, 4), (16, 4)]),
        ({"model_type": "whisper"}, {"seconds": 45}, [(1500, 1500)] * 2),
        ({"model_type": "whisper", "max_source_positions": 100}, {"seconds": 3}, [(100, 100)] * 2),
        ({"model_type": "whisper"}, {"tokens": [700, 350]}, [(700, 350)]),
        ({"model_type": "phi4_multimodal_audio"}, {"seconds": 30}, [(375, 375)]),
        ({"model_type": "clip_vision_model"}, {}, [(50, 49)]),
        ({"model_type": "clip_vision_model"}, {"each": 3}, [(50, 49)] * 3),
        ({"model_type": "clip_vision_model"}, {"each": 0}, []),
    ],
)
def test_sizes_of_items(tmp_path, config, item, tokens):
    def change(data):
        data["model"]["modules"]["vision"] = {"config": config, "modality": "seen"}
        data["batch"]["fixed"]["items"] = {"seen": item}

    sample = load_job(write(tmp_path, change)).batch[0]
    assert [(segment.tokens_in, segment.tokens_out) for segment in sample.of("seen")] == tokens


def test_a_mixture(tmp_path):
    def change(data):
        data["batch"] = {
            "samples": 30,
            "microbatch_samples": 2,
            "replicas": 3,
            "mixture": {
                "seed": 7,
                "text_tokens": [4, 9],
                "items": {"vision": {"most": 3, "missing": 0.5, "tokens": [4, 2]}},
            },
        }

    job = load_job(write(tmp_path, change))
    assert (job.microbatch_samples, job.replicas) == (2, 3)
    assert {len(sample.of("vision")) for sample in job.batch} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"sharding": "parameters"}, {"sharding": Sharding.PARAMETERS}),
        ({"sharding": "optimizer", "instances": 2}, {"sharding": Sharding.OPTIMIZER, "instances": 2}),
        ({"tp": 2, "sequence_parallel": True}, {"sequence_parallel": True}),
    ],
)
def test_a_layout_says_settings_of_its_module(tmp_path, layout, settings):
    job = load_job(write(tmp_path, put("layouts", "llm", value={"pp": 1} | layout)))
    assert job.settings.modules == (ModuleSettings(module="llm", **settings),)


def test_a_job_says_the_optimizers_precision(tmp_path):
    job = load_job(write(tmp_path, put("optimizer_precision", value="float64")))
    assert job.settings.optimizer_precision is Precision.FLOAT64


def python_job(**changes) -> Job:
    vision, llm = chain("vision", [True] * 2), chain("llm", [True] * 3)
    llm = replace(llm, modality="text")
    node = Node(device="toy", num_ranks=4, memory_bytes=GIB)
    given = {
        "name": "j",
        "model": connect("m", [vision, llm]),
        "cluster": Cluster(name="c", nodes=(node,), intra=LINK, inter=LINK),
        "batch": (Sample(0, (Segment("text", 0, 3, 3), Segment("vision", 0, 4, 4))),),
    }
    return Job(**(given | changes))


def test_a_job_in_python():
    job = python_job(layouts=(ModuleLayout(module="llm", tp=2),), max_ranks=4)
    assert job.settings == Settings()
    assert job.layouts[0].pp is None


def two_texts() -> tuple[Module, ...]:
    return tuple(replace(chain(name, [True]), modality="text") for name in ("a", "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"batch": ()}, "want >= 1 sample"),
        (lambda: {"replicas": 0}, "replicas, got 1, 1 and 0"),
        (lambda: {"batch": (Sample(1, (Segment("text", 0, 1, 1),)),) * 2}, "ids must be unique, 1 is twice"),
        (
            lambda: {"batch": (Sample(1, (Segment("vison", 0, 1, 1),)),)},
            "modality 'vison', which no module works on; did you mean 'vision'?",
        ),
        (lambda: {"model": connect("m", list(two_texts()))}, r"want exactly one .* got \['a', 'b'\]"),
        (lambda: {"model": connect("m", [chain("vision", [True])])}, "got none"),
        (
            lambda: {"model": connect("m", [two_texts()[0]], [chain("vision", [True])])},
            "module 'vision' has no edge",
        ),
        (
            lambda: {
                "model": connect("m", [from_shape("gpt2")], [chain("vision", [True]), from_shape("gpt2")])
            },
            "edge vision>llm joins width 3 to 768",
        ),
        (lambda: {"layouts": (ModuleLayout(module="lm"),)}, "no module 'lm'; did you mean 'llm'?"),
        (lambda: {"layouts": (ModuleLayout(module="llm"),) * 2}, "module 'llm' has two layouts"),
        (
            lambda: {"settings": Settings(modules=(ModuleSettings(module="x"),))},
            "no module 'x'; there are vision, llm",
        ),
        (lambda: {"max_ranks": 5}, "max_ranks must be 1 to 4"),
        (lambda: {"layouts": (ModuleLayout(module="llm", tp=0),)}, "layout of 'llm': tp must be >= 1, got 0"),
    ],
)
def test_a_job_in_python_is_checked_too(changes, message):
    with pytest.raises(ValueError, match=message):
        python_job(**changes())


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 8}
OPT = {
    "model_type": "opt",
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize("config", [GPT2, OPT])
def test_samples_end_with_the_positions_that_a_model_learns(config):
    """As many tokens as the table has positions are the longest sample; OPT's two rows more are none."""
    model = connect("m", [module_from_config(config, name="llm", modality="text")])
    longest, longer = ((Sample(0, (Segment("text", 0, tokens, tokens),)),) for tokens in (8, 9))
    job = python_job(model=model, batch=longest)
    message = "module 'llm' has 8 positions, sample 0 has 9 tokens"
    with pytest.raises(ValueError, match=message):
        python_job(model=model, batch=longer)
    made = cornstarch.plan(job, CostModel(load_profile("H100")))
    check(made)
    with pytest.raises(ValueError, match=message):
        check(replace(made, batch=longer))


def test_what_turns_with_positions_has_no_longest_sample():
    """Rotary positions go on; up to which length the runtime takes such a model is not the job's matter."""
    llama = {
        "model_type": "llama4_text",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "attention_chunk_size": 4,
    }
    model = connect("m", [module_from_config(llama, name="llm", modality="text")])
    batch = (Sample(0, (Segment("text", 0, 9, 9),)),)
    assert python_job(model=model, batch=batch).batch == batch


@pytest.mark.parametrize(
    ("replicas", "max_ranks", "nearest"), [(1, 2, "max_ranks 3"), (2, 3, "a cluster of 6")]
)
def test_too_few_ranks_name_a_number_that_the_job_may_state(
    tmp_path: Path, replicas: int, max_ranks: int, nearest: str
) -> None:
    """Vision on a rank, the LLM on two, and as many replicas; the cluster has three ranks."""
    job = replace(load_job(write(tmp_path)), replicas=replicas, max_ranks=max_ranks)
    refusal = f"no stage counts fit {max_ranks} ranks; nearest: {nearest}, or smaller tp, cp and dp"
    with pytest.raises(ValueError, match=refusal):
        cornstarch.plan(job, CostModel(load_profile("A40")))
