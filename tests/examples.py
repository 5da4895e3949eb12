"""How many cases a property gets: all in `make test-all`, a third in `make test` (profile `quick`)."""

from hypothesis import settings

QUICK = "quick"
LEAST = 25


def is_quick() -> bool:
    return settings.get_current_profile_name() == QUICK


def examples(number: int) -> settings:
    """Of a property that wants more than the profile gives."""
    return settings(max_examples=max(LEAST, number // 3) if is_quick() else number)
