"""Finds misspelt keys in a model's configuration: unknown ones close to one that transformers knows."""

import csv
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from workbench.model.config_fields import Config
from workbench.model.item_tokens import source_config
from workbench.model.model_graph import ModelGraph

KEYS_CSV = Path(__file__).with_name("config_keys.csv")
_ALIKE = 0.9  # difflib ratio: one letter more, fewer or different in a word of ten


@cache
def known_keys() -> Mapping[str, frozenset[str]]:
    """model_type of a family -> keys of transformers' class: every row of config_keys.csv."""
    with KEYS_CSV.open(encoding="utf-8", newline="") as file:
        return {row["model_type"]: frozenset(row["keys"].split()) for row in csv.DictReader(file)}


def misspelt(config: Config) -> dict[str, str]:
    """Unknown key -> the nearest known one, where that is close and not given itself.

    Other unknown keys are ignored: real configurations have many without effect.

    Example:
        >>> misspelt({"model_type": "llama", "hidden_sizes": 2048, "my_note": 1})
        {'hidden_sizes': 'hidden_size'}
    """
    known = known_keys().get(config["model_type"], frozenset())
    near = {
        key: get_close_matches(key, sorted(known), n=1, cutoff=_ALIKE) for key in config if key not in known
    }
    return {key: matches[0] for key, matches in near.items() if matches and matches[0] not in config}


def misspelt_lines(model: ModelGraph) -> tuple[str, ...]:
    """A warning for each misspelt key of the modules' configurations."""
    return tuple(
        f"module {module.name!r}: {config['model_type']} has no {key!r} in its config, which changes "
        f"nothing; nearest: {near!r}"
        for module in model.modules
        if (config := source_config(module))
        for key, near in misspelt(config).items()
    )
