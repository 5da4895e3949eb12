"""The list of model families against what the planner and the runtime really know."""

from typer.testing import CliRunner

from runtime.models.choose import known_architectures
from tests import cross_models, tiny_models
from tests.test_adapters_encoders import CASES
from workbench.cli.app import app
from workbench.model.dit import DIT
from workbench.model.families import FAMILIES
from workbench.model.hf_encoder import ENCODERS
from workbench.model.hf_llm import LLMS


def test_every_known_architecture_is_listed_once() -> None:
    listed = [family.model_type for family in FAMILIES if family.model_type is not None]
    assert sorted(listed) == sorted([*LLMS, *ENCODERS, DIT])
    assert set(known_architectures()) <= set(listed)


def test_what_cannot_run_has_a_reason_and_nothing_else_has() -> None:
    known = known_architectures()
    for family in FAMILIES:
        works = family.plans and family.runs(known)
        assert works == (not family.reason), family.name


def test_the_command_lists_them() -> None:
    listed = CliRunner().invoke(app, ["models"])
    assert listed.exit_code == 0
    assert all(family.name in listed.output for family in FAMILIES)
    record = CliRunner().invoke(app, ["models", "--json"])
    assert '"EVA-CLIP"' in record.output
    assert '"not in transformers"' in record.output


def test_every_encoder_is_held_against_transformers() -> None:
    """The decoders' list is in test_adapters_decoders."""
    configs = (tiny_models.SIGLIP, tiny_models.CLIP, tiny_models.WHISPER, cross_models.VISION)
    tested = {case.config["model_type"] for case in CASES.values()} | {c["model_type"] for c in configs}
    assert tested == set(ENCODERS)
