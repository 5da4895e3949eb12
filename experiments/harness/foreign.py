"""Programs that run in an environment of their own, such as that of another system's packages."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def answer(
    command: Sequence[str],
    *,
    failure: str,
    limit_s: float,
    asked: str = "",
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Any:
    """The JSON that a program prints as its last line.

    Args:
        failure: begins the error.
        asked: its standard input.

    Raises:
        ValueError: it fails; with the last line that it said.
    """
    done = subprocess.run(
        command,
        input=asked,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env=environment,
        cwd=cwd,
    )
    if done.returncode:
        raise ValueError(f"{failure}: {last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def last_line(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["no output"])[-1]
