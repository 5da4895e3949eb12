"""What the command lines of all experiments have in common."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.whole_file import write_text


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser that understands `--json`; `about`, the module's docstring, is its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def ended(result: Mapping[str, Any], path: Path | None, *, as_json: bool, holds: bool) -> int:
    """Keep the result of a command in a file, if any, and print it where asked for.

    Returns:
        The exit status: 1 where what it is to show does not hold.
    """
    if path is not None:
        write_text(json.dumps(result, indent=1) + "\n", path)
    if as_json:
        print(json.dumps(result))
    return 0 if holds else 1
