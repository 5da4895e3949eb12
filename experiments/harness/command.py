"""What the command lines of all experiments have in common."""

import argparse


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser that understands `--json`; `about`, the module's docstring, is its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser
