"""Configurations of transformers by their fields, checked once: every microbatch asks for its module's."""

import copy
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from transformers.configuration_utils import PretrainedConfig


def configuration(kind: type[PretrainedConfig], fields: Mapping[str, Any]) -> PretrainedConfig:
    """A configuration of the caller's own, which it may change."""
    return copy.deepcopy(_checked(kind.from_dict, json.dumps(fields)))


@lru_cache(maxsize=64)
def _checked(checks: Callable[..., PretrainedConfig], text: str) -> PretrainedConfig:
    return checks(json.loads(text))
