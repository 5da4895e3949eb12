"""Parts of a campaign whose cells do what their keys say, for tests of what drives them."""

import os
import signal
import sys
import time
from typing import Any

from experiments.gpu_day.campaign import Cell, Measured, Session

LOG = "measured.log"
KEYS = ("ok first", "ok second")


def facts(session: Session) -> dict[str, Any]:
    if session.device == "cuda":
        raise ValueError("device cuda: there is none")
    return {"device_name": "a test's device", "versions": [["torch", "1.0"], ["driver", str(os.getpid())]]}


def cells(session: Session) -> tuple[Cell, ...]:
    """Those that the folder's `keys` file names, a line each, or two that go well."""
    file = session.folder / "keys"
    keys = file.read_text().splitlines() if file.is_file() else KEYS
    return tuple(Cell(key, bound_s=2.0 if key == "hangs" else 120.0) for key in keys)


def measure(session: Session, key: str) -> Measured:
    with (session.folder / LOG).open("a") as log:
        log.write(f"{key}\n")
    what = key.split(maxsplit=1)[0]
    if what == "refuses":
        raise ValueError("it is refused\nin two lines")
    if what == "raises":
        raise RuntimeError("it broke")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        time.sleep(600)
    sys.stdout.write("a library prints\n")
    return Measured({"key": key}, note=f"note of {key}", merit=float(len(key)))
