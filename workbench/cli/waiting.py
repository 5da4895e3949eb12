"""The line that says which preprocessing server a command waits for."""

import sys
from typing import TYPE_CHECKING

from workbench.plain_text import plain

if TYPE_CHECKING:
    from runtime.preprocess.keys import ClientKeys


def tell_wait(address: str, keys: "ClientKeys | None", wait_s: float) -> None:
    """Print on stderr the server, the longest wait, and which servers never answer."""
    from runtime.preprocess.keys import key_hint

    sys.stderr.write(
        f"workbench: waiting for the server at {plain(address)}, at most {wait_s:g} s{key_hint(keys)}\n"
    )
