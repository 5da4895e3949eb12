"""Misspelt keys of configurations are told. `UPDATE_GOLDEN=1` writes the table of known ones anew."""

import csv
import io
import json
import os
from dataclasses import fields
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from tests.command_line import accept
from tests.job_files import put, write
from workbench.model.composites.registry import take_apart
from workbench.model.config_keys import KEYS_CSV, known_keys, misspelt
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.item_tokens import source_config


def table() -> str:
    """Fields, and other names of fields, of transformers' classes of every family that is planned."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("model_type", "keys"))
    for kind, family in ARCHITECTURES.items():
        made = [CONFIG_MAPPING[each] for each in (kind, *family.aliases) if each in CONFIG_MAPPING]
        names = {name for each in made for name in (*(one.name for one in fields(each)), *each.attribute_map)}
        if names:
            rows.writerow((kind, " ".join(sorted(names))))
    return text.getvalue()


def test_the_table_is_transformers_own():
    if os.environ.get("UPDATE_GOLDEN"):
        KEYS_CSV.write_text(table(), encoding="utf-8")
    assert KEYS_CSV.read_text(encoding="utf-8") == table(), "UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("kind", known_keys())
def test_every_key_with_a_letter_missing_is_told_and_none_that_is_whole(kind):
    known = known_keys()[kind]
    for key in sorted(known):
        wrong = key[:4] + key[5:]
        if len(key) >= 10 and wrong not in known:
            assert list(misspelt({"model_type": kind, wrong: 1})) == [wrong]
    assert misspelt(dict.fromkeys(known, 1) | {"model_type": kind}) == {}


def test_models_that_are_written_rightly_are_not_spoken_of():
    examples = [
        each.config | {"model_type": kind}
        for kind, family in ARCHITECTURES.items()
        for each in family.examples.values()
    ]
    modules = [modules_of(dict(take_apart(each).modules)).values() for each in CONFIGS.values()]
    parts = [source_config(module) for each in modules for module in each]
    assert [misspelt(config) for config in examples + parts] == [{}] * len(examples + parts)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"hidden_sizes": 2048, "num_hidden_layer": 80}, ["hidden_size", "num_hidden_layers"]),
        ({"num_key_values_heads": 2}, ["num_key_value_heads"]),
        ({"hidden_size": 64, "hidden_sizes": 2048}, []),
        ({"rope_local_note": 1, "note": 2, "hidden_dimension": 3}, []),
    ],
)
def test_what_is_near_is_told_where_it_is_not_said_itself(said, told):
    assert list(misspelt({"model_type": "llama"} | said).values()) == told


def test_a_plan_is_made_and_the_key_is_named(tmp_path: Path):
    job = write(tmp_path, put("model", "modules", "llm", "config", "num_key_values_heads", value=2))
    done = accept("plan", job, "--profile", "A40", "-o", tmp_path / "plan.json")
    [line] = [each for each in done.stderr.splitlines() if "num_key_values_heads" in each]
    assert line.startswith("workbench: warning: module 'llm': ")
    assert line.endswith("nearest: 'num_key_value_heads'")


def test_a_job_is_drafted_in_the_same_words(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_sizes": 64}), encoding="utf-8")
    job = tmp_path / "job.yaml"
    drafted = accept("init", config, "--gpus", "8xH100", "-o", job, "--json")
    assert json.loads(drafted.stdout)["job"] == str(job)
    read = accept("layout", job)
    lines = [each for each in drafted.stderr.splitlines() if "hidden_sizes" in each]
    assert lines == [each for each in read.stderr.splitlines() if "hidden_sizes" in each]
    assert [line.rpartition("nearest: ")[2] for line in lines] == ["'hidden_size'"]
