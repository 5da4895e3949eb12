"""Other names of a configuration's fields mean what they mean to transformers.

`UPDATE_GOLDEN=1` writes the table of them anew.
"""

import csv
import io
import os
from dataclasses import fields
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.models.choose import adapter_of
from workbench.model.config_aliases import ALIASES_CSV, aliases, without_aliases
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import source_config
from workbench.model.model_graph import Module

CASES = [(kind, alias, field) for kind, own in aliases().items() for alias, field in own.items()]
NOT_READ = ("layerdrop", "num_mtp_layers")  # neither a layer nor what is read later depends on them
OF_LAYERS = [case for case in CASES if case[2] not in NOT_READ]


def table() -> str:
    """Pairs of names, one of which is a field, of transformers' class of every family that is planned."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("model_type", "alias", "field"))
    for kind in (each for each in ARCHITECTURES if each in CONFIG_MAPPING):
        made = CONFIG_MAPPING[kind]
        own = {each.name for each in fields(made)}
        pairs = (pair if pair[1] in own else pair[::-1] for pair in made.attribute_map.items())
        rows.writerows((kind, alias, field) for alias, field in sorted(pairs))
    return text.getvalue()


def example(kind: str) -> dict[str, object]:
    return {"model_type": kind, **next(iter(ARCHITECTURES[kind].examples.values())).config}


def module(config: dict[str, object]) -> Module:
    modality = ARCHITECTURES[str(config["model_type"])].modality
    return module_from_config(config, name="m", modality=modality, llm_width=128)


def other_than(value: Any) -> Any:
    """Another valid value: kinds of blocks the other way round, numbers twice as large."""
    return value[::-1] if isinstance(value, list) else 2 * value


def num_elements(module: Module) -> list[int]:
    """Of the weights of each layer that the runtime builds."""
    adapter = adapter_of(module)
    built = [adapter.build(index) for index in range(adapter.num_layers)]
    return [sum(weight.numel() for weight in layer.parameters()) for layer in built]


def test_the_table_is_transformers_own() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        ALIASES_CSV.write_text(table(), encoding="utf-8")
    assert ALIASES_CSV.read_text(encoding="utf-8") == table(), "UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize(("kind", "alias", "field"), OF_LAYERS)
def test_layers_and_what_is_read_later_are_those_of_the_field(kind: str, alias: str, field: str) -> None:
    named = module(example(kind))
    renamed = {alias if key == field else key: value for key, value in example(kind).items()}
    other = module(renamed)
    assert alias in renamed
    assert other.layers == named.layers
    assert num_elements(other) == [layer.num_parameters for layer in other.layers], "as it runs"
    assert source_config(other) == source_config(named), "which limits and tokens of items are read from"


@pytest.mark.parametrize(("kind", "alias", "field"), CASES)
def test_an_alias_is_what_transformers_takes_it_for(kind: str, alias: str, field: str) -> None:
    value = other_than(example(kind).get(field, 0.25))
    for config in ({**example(kind), alias: value}, {alias: value, **example(kind)}):
        theirs = CONFIG_MAPPING[kind].from_dict(dict(config))
        assert without_aliases(config)[field] == getattr(theirs, field) == value


def test_of_several_aliases_the_last_counts_as_in_files_of_transformers() -> None:
    config = {"model_type": "whisper", "num_attention_heads": 4, "num_key_value_heads": 8}
    theirs = CONFIG_MAPPING["whisper"].from_dict(dict(config))
    assert without_aliases(config)["encoder_attention_heads"] == theirs.encoder_attention_heads == 8


def test_null_counts_as_absent_and_other_families_keep_their_keys() -> None:
    assert without_aliases({"model_type": "gpt2", "n_embd": 64, "hidden_size": None}) == {
        "model_type": "gpt2",
        "n_embd": 64,
    }
    llama = {"model_type": "llama", "n_embd": 64, "hidden_size": 128}
    assert without_aliases(llama) == llama
