"""The fourth round of multimodal runs: its inputs, its models and what its rows add."""

from pathlib import Path

import pytest

from experiments.public import multimodal
from experiments.public.blind import INTERVALS, rows_of
from experiments.public.unseen_multimodal_fourth import ROUND
from tests.test_public_multimodal_third import _own_parameters
from workbench.cost.execution import TokenCopies

PUBLIC = Path(__file__).parents[1] / "experiments" / "public"
DATA, RECORD = PUBLIC / "data" / "README.md", PUBLIC / "record" / "unseen.md"
RUNS = ROUND.runs()
SAID = {name: row for name, row in RUNS.items() if not row["unsaid"]}
MODELS = multimodal.models_of(ROUND.models)


def _job(name, **cells):
    return multimodal.job_of(RUNS[name] | cells, MODELS)


def test_every_judged_row_is_a_job_or_says_why_not():
    rows = rows_of(ROUND.inputs)
    assert len({row["id"] for row in rows}) == len(rows) == 44
    assert (len(RUNS), len(SAID)) == (39, 34)
    assert all(row["why_not"] for row in rows if row["id"] not in RUNS)
    for name, row in SAID.items():
        job = _job(name)
        assert len(job.batch) == multimodal.samples_of(row)
        assert all(sample.num_tokens == multimodal.tokens_of(row) for sample in job.batch)


def test_the_page_of_data_counts_the_rows():
    assert "| `unseen/multimodal_fourth.csv` | 44 |" in DATA.read_text(encoding="utf-8")


def test_super_vl_has_the_bytes_that_its_card_states():
    """A predicting module has attention and experts; jobs have its experts alone, and other parts besides."""
    vision, llm = map(_own_parameters, _job("sv-sft-gb200-sep", mtp="1").model.modules)
    attention = _job("sv-sft-gb200-sep").model.llm.layers[1 + 7].num_parameters
    patches = 3 * 16 * 16 * 1280
    scales = 32 * 2 * 1280  # of transformers' tower
    correction = 2 * (40 + 1) * 512  # a bias of four bytes an expert, counted in two
    summary = 5 * 8 // 2  # indices
    whole = vision - scales + 2 * patches + llm + attention + correction + summary
    assert whole == 248_906_833_960 // 2


def test_nano_omni_has_the_parameters_of_its_language_model():
    (_, llm) = _job("sp-h100-am-sft").model.modules
    assert llm.num_parameters == 31_577_937_344


def test_adapters_are_beside_attention_and_state_spaces_alone():
    (_, llm) = _job("sp-h100-mb-lora-ddp").model.modules
    adapted = {
        operator.name.rpartition(".")[2]
        for layer in llm.layers
        for operator in layer.operators
        if getattr(operator, "lora", None)
    }
    assert {"in_proj", "out_proj", "o_proj"} <= adapted
    assert not any("expert" in name or "shared" in name for name in adapted)


def test_deepep_sends_a_token_once_from_modules_of_transformers():
    execution = multimodal.EXECUTIONS["transformers-deepep"]
    assert execution.copies is TokenCopies.ONCE
    assert execution.pointwise == multimodal.TRANSFORMERS.pointwise


@pytest.mark.parametrize(("size", "billions"), [("2b", 1.95), ("14b", 14.24)])
def test_cosmos_has_the_size_of_its_name(size, billions):
    job = _job(f"cp2-{size}-b200")
    assert job.model.num_parameters == pytest.approx(billions * 1e9, rel=2e-3)
    settings = job.settings.of("llm")
    assert settings.key_exchange == "all-to-all"
    assert set(map(str, settings.computed_again)) == {"norm", "mlp"}
    assert job.batch[0].num_tokens == 24 * 44 * 80


def test_stages_of_super_vl_have_the_blocks_of_the_recipe():
    (layout,) = (each for each in _job("sv-sft-h100-sep").layouts if each.module == "llm")
    first, last = layout.stage_layers
    assert (first, last) == (1 + 38, 50 + 2 * 3 + 1)  # two predicting modules of three layers, and the head
    assert layout.ep == 32


def test_a_step_has_the_intervals_that_simulate_prints():
    step = multimodal.step_of(RUNS["cp2-14b-h100nvl"], _job("cp2-14b-h100nvl"))
    assert list(step.ends) == list(INTERVALS)
    widths = [high / low for low, high in step.ends.values()]
    assert widths == sorted(widths)
    highs = [high for _, high in step.ends.values()]
    assert highs == sorted(highs)
    assert step.value < step.ends["inside_80"][1]
