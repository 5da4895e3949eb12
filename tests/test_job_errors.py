"""Every mistake in a job.yaml is one line that names the file, the place, the rule and the value."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.job_files import JOB, put, write
from workbench.job.job import load_job
from workbench.job.job_file import parse_spec
from workbench.job.schema import JobSpec


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("presicion",), "float32", "unknown key 'presicion'; did you mean 'precision'?"),
        (
            ("cluster", "local", "rank"),
            3,
            "unknown key 'cluster.local.rank'; did you mean 'ranks'?",
        ),
        (
            ("model", "modules", "llm", "trainble"),
            "all",
            "unknown key 'model.modules.llm.trainble'; did you mean 'trainable'?",
        ),
        (
            ("batch", "fixed", "items", "vision", "image"),
            [[1, 2]],
            "unknown key 'batch.fixed.items.vision.image'; did you mean 'images'?",
        ),
        (
            ("layouts", "llm", "zz"),
            1,
            "unknown key 'layouts.llm.zz'; known keys are pp, tp, cp, ep, dp, rank_offset, stage_layers, "
            "recompute, recompute_layers, recompute_modules, key_exchange, sequence_parallel, sharding, "
            "instances",
        ),
        (("profile",), ..., "missing key 'profile'"),
        (("batch", "samples"), ..., "missing key 'batch.samples'"),
        (("batch", "samples"), 0, "batch.samples: input should be greater than or equal to 1, got 0"),
        (
            ("batch", "samples"),
            "4",
            "batch.samples: input should be a valid integer, got '4'; want it without quotes",
        ),
        (
            ("precision",),
            "fp8",
            "precision: input should be 'float64', 'float32' or 'bfloat16', got 'fp8'; want products: fp8",
        ),
        (
            ("batch", "mixture"),
            {"seed": 1, "text_tokens": [1, 2]},
            "exactly one of 'fixed', 'mixture' and 'sizes'",
        ),
        (("cluster", "device"), "A40", "'local' excludes 'device', 'nodes' and 'ranks_per_node'"),
        (("cluster", "local"), ..., "want 'local', or all of 'device', 'nodes' and 'ranks_per_node'"),
        (("cluster", "memory_gib"), ..., "no profile 'cpu.json'"),
        (("cluster", "intra"), ..., "no profile 'cpu.json'"),
        (("model", "modules"), {}, "model.modules: dictionary should have at least 1 item"),
        (("model", "modules", "llm", "zoo"), "gpt2", "want exactly one of 'zoo' and 'config'"),
        (("model", "modules", "llm"), {"zoo": "lama-3.1-8b"}, "did you mean 'llama-3.1-8b'?"),
        (
            ("model", "modules", "llm", "config", "model_type"),
            "lama",
            "unknown model_type 'lama' (nearest: llama)",
        ),
        (("model", "modules", "llm", "config"), "nowhere", "no such file or folder with a config.json"),
        (("model", "modules", "llm", "modality"), "vision", "want exactly one LLM (modality text), got none"),
        (("model", "modules", "llm", "projector"), "mlp", "it has no projector, got 'mlp'"),
        (("model", "modules", "vision", "projector"), "merger", "must be 'linear' or 'mlp', got 'merger'"),
        (("model", "edges"), [["vision", "llm"], ["llm", "vision"]], "must be acyclic, got the cycle"),
        (("model", "edges"), [["visoin", "llm"]], "no module 'visoin'; did you mean 'vision'?"),
        (("model", "edges"), [], "module 'vision' feeds nothing; want an edge [vision, llm]"),
        (("layouts", "lm"), {"pp": 1}, "no module 'lm'; did you mean 'llm'?"),
        (("layouts", "lm"), {}, "no module 'lm'; did you mean 'llm'?"),
        (("layouts", "llm", "sequence_parallel"), "yes", "layouts.llm.sequence_parallel: "),
        (
            ("layouts", "llm", "ep"),
            3,
            "module 'llm': ep must divide its tp x cp = 1 ranks, got 3; nearest: 1",
        ),
        (("layouts", "llm", "pp"), 5, "module 'llm' has 4 layers, which cannot make 5 stages"),
        (("precision",), "bf16", "or 'bfloat16', got 'bf16'; did you mean 'bfloat16'?"),
        (("schedule",), {"kind": "1F1B"}, "or 'three-phase', got '1F1B'; did you mean '1f1b'?"),
        (("schedule",), "1f1b", "schedule: want keys and values, such as kind, "),
        (("layouts", "llm"), 4, "layouts.llm: want keys and values, such as pp, tp, cp, ep, got 4"),
        (("layouts",), [{"tp": 1}], "layouts: want keys and values, got [{'tp': 1}]"),
        (("cluster", "memory_gib"), "80GB", "got '80GB'; want a number alone, without a unit"),
        (("batch", "samples"), "32k", "got '32k'; want a number alone, without a unit"),
        (("batch", "samples"), "5e2", "got '5e2'; want it as 500"),
        (("max_ranks",), 4, "max_ranks must be 1 to 3, the ranks of cluster 'small', got 4"),
        (("batch", "fixed", "items", "audio"), {}, "no encoder of modality 'audio'; there are vision"),
        (("batch", "fixed", "items", "vision", "seconds"), 3, "module 'vision' is no audio encoder"),
        (("batch", "fixed", "items", "vision", "images"), [[9, 9]], "module 'vision' takes one image size"),
        (("batch", "fixed", "items", "vision", "missing"), 0.5, "'most' and 'missing' belong to a 'mixture'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, path, value, message):
    file = write(tmp_path, put(*path, value=value))
    with pytest.raises(ValueError) as refusal:
        load_job(file)
    text = str(refusal.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert "\n" not in text


def test_a_plan_of_any_size_is_told_from_a_job():
    values = ", ".join(["0"] * 200_000)
    with pytest.raises(ValueError, match="a file of format 'multimodal-workbench plan'; want a job file"):
        parse_spec(f'{{\n "format": "multimodal-workbench plan",\n "plan": [{values}]\n}}')


def test_a_value_is_told_once():
    text = JOB.replace("batch:\n", "batch:\n  mask: sliding_window(window=-1)\n", 1)
    with pytest.raises(ValueError) as refusal:
        parse_spec(text)
    said = "job: batch.mask: mask sliding_window: window must be a whole number >= 0, got -1"
    assert str(refusal.value) == said


def test_sizes_that_an_encoder_cannot_have(tmp_path):
    def any_size(data):
        data["model"]["modules"]["vision"] = {"config": {"model_type": "qwen2_vl_vision"}}

    with pytest.raises(
        ValueError, match="takes items of any size: want 'images', 'videos', 'seconds' or 'tokens'"
    ):
        load_job(write(tmp_path, any_size))

    def too_long(data):
        data["model"]["modules"]["vision"] = {"config": {"model_type": "whisper"}, "modality": "vision"}
        data["batch"]["fixed"]["items"]["vision"] = {"tokens": [1501, 1501]}

    with pytest.raises(ValueError, match="has 1500 positions, got items of 1501 tokens"):
        load_job(write(tmp_path, too_long))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "want keys and values, got nothing; `workbench init` drafts a job"),
        ("- 1", "want keys and values, got list"),
        (
            "name: a\nmodel:\n\tmodules: {}",
            "not YAML: line 3: found character '\\t' that cannot start any token; want spaces",
        ),
        ('{\n // a job\n "name": "j"}', "; a comment begins with #"),
        ("a: [1", "not YAML: line 1"),
        ("name: a\nname: b", "not YAML: line 2: key 'name' stands twice"),
        ("name: a\nmodel: {modules: {m: {zoo: a}, m: {zoo: b}}}", "key 'm' stands twice"),
    ],
)
def test_files_that_are_no_jobs(text, message):
    with pytest.raises(ValueError) as refusal:
        parse_spec(text)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml: cannot be read: No such file"):
        load_job(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.yaml: not UTF-8 text at byte 0"):
        load_job(tmp_path / "binary.yaml")


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(junk=JUNK, key=st.sampled_from(sorted(JobSpec.model_fields)))
def test_junk_is_refused_in_one_line(junk, key):
    text = yaml.safe_dump(yaml.safe_load(JOB) | {key: junk}, allow_unicode=True)
    message = refusal_of(text)
    assert message is None or "\n" not in message
    assert message is not None or key in ("name", "profile", "layouts", "schedule", "max_ranks")


def refusal_of(text: str) -> str | None:
    """What is wrong with it; anything but a ValueError fails the test."""
    try:
        parse_spec(text)
    except ValueError as error:
        return str(error)
    return None
