"""Aliases of configuration fields that transformers' classes accept."""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.model.config_fields import Config

ALIASES_CSV = Path(__file__).with_name("config_aliases.csv")


@cache
def aliases() -> Mapping[str, Mapping[str, str]]:
    """model_type of a family -> alias -> field: every row of config_aliases.csv, in order."""
    field_of: dict[str, dict[str, str]] = {}
    with ALIASES_CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            field_of.setdefault(row["model_type"], {})[row["alias"]] = row["field"]
    return field_of


def without_aliases(config: Config) -> dict[str, Any]:
    """The configuration with aliases replaced by field names.

    An alias overrides the field itself, as in transformers, unless it is null.

    Example:
        >>> without_aliases({"model_type": "gpt2", "hidden_size": 64, "n_layer": 2})
        {'model_type': 'gpt2', 'n_layer': 2, 'n_embd': 64}
    """
    field_of = aliases().get(config["model_type"], {})
    values = {field: config[alias] for alias, field in field_of.items() if config.get(alias) is not None}
    return {key: value for key, value in config.items() if key not in field_of} | values
