"""Writes the generated pages of the documentation, or says which are stale.

python -m docs.generate [--check]
"""

import argparse
import sys
from collections.abc import Sequence

from docs.generate.pages import DOCS, PAGES, stale_pages
from workbench.whole_file import write_text


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where `--check` finds a stale page."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; list stale pages and exit 1")
    check = parser.parse_args(arguments).check
    stale = stale_pages()
    for name in stale:
        if not check:
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(PAGES[name](), DOCS / name)
        sys.stdout.write(f"docs/{name}: {'stale' if check else 'written'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
