"""A Chromium without a window for the tests of pages: the machine's, or one that npm's registry carries."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    from playwright.sync_api import Browser, Error, sync_playwright
except ImportError:
    sync_playwright = None

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = "WORKBENCH_BROWSER_REQUIRED"  # set: a machine without a browser fails, instead of leaving out
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"  # MIT; the binary is Chromium's, compressed with brotli
CACHE = ROOT / ".cache" / f"chromium-{VERSION}"
FETCH_S, UNPACK_S = 180, 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const [from, to] of [["chromium.br", "chromium"], ["al2023.tar.br", "libraries.tar"]])
  fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(`package/bin/${from}`)));
"""


class NoBrowserError(Exception):
    """There is no browser here, and why."""


def find_browser() -> Path:
    """A Chromium that starts: on PATH, fetched before, or fetched now.

    Raises:
        NoBrowserError: none is installed and none can be fetched.
    """
    installed = next((found for name in NAMES if (found := shutil.which(name))), None)
    if installed is not None:
        return Path(installed)
    fetched = CACHE / "chromium"
    if not fetched.exists():
        _fetch()
    return fetched


def _fetch() -> None:
    """Into a folder beside the cache, which then takes its name."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NoBrowserError("no chromium on PATH, and no npm to fetch one with")
    CACHE.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=CACHE.parent) as name:
        folder = Path(name)
        _do(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], folder, FETCH_S)
        (archive,) = folder.glob("*.tgz")
        _untar(archive, folder)
        _do(["node", "-e", UNPACK], folder, UNPACK_S)
        _untar(folder / "libraries.tar", folder / "libraries")
        (folder / "chromium").chmod(0o755)
        made = folder / "made"
        made.mkdir()
        for part in ("chromium", "libraries"):
            (folder / part).rename(made / part)
        if not CACHE.exists():
            made.rename(CACHE)


def _do(command: list[str], folder: Path, limit_s: float) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoBrowserError(f"no chromium on PATH; {command[0]} gave none within {limit_s} s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:200]
        raise NoBrowserError(f"no chromium on PATH; {command[0]} gave none: {said}")


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
        packed.extractall(folder)


@contextmanager
def started() -> Iterator["Browser"]:
    """A browser, ended behind the block.

    Raises:
        NoBrowserError: there is none, or Playwright is not installed.
    """
    if sync_playwright is None:
        raise NoBrowserError("playwright is not installed")
    executable = find_browser()
    libraries = CACHE / "libraries" / "lib"
    extra = {"LD_LIBRARY_PATH": str(libraries)} if executable.parent == CACHE else {}
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=executable, args=FLAGS, env=os.environ | extra, timeout=30_000
            )
        except Error as error:
            raise NoBrowserError(f"{executable} does not start: {error.message.splitlines()[0]}") from None
        yield browser
        browser.close()
