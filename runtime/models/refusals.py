"""Refusals of configurations by transformers, as errors that name the module."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError


@contextmanager
def named_refusals(module: str) -> Iterator[None]:
    """Turn transformers' errors about a configuration into a ValueError that names the module."""
    try:
        yield
    except (StrictDataclassError, AssertionError, KeyError, TypeError) as error:
        reason = f"unknown value {error}" if isinstance(error, KeyError) else str(error)
        message = " ".join(reason.split())
        raise ValueError(f"module {module!r}: transformers refuses its configuration: {message}") from error
