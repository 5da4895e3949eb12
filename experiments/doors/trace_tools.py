"""HolisticTraceAnalysis and mlc-chakra, in a separate folder beside the project's packages.

HTA requires jupyterlab, which its analyses do not need, and fails with pandas 3 (a column of small numbers
that receives larger ones). So neither is installed with its dependencies, and pandas 2 is installed beside
them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.harness.foreign import answer

PACKAGES = (
    "HolisticTraceAnalysis==0.5.0",
    "mlc-chakra==1.0.0",
    "narwhals==2.29.0",
    "pandas==2.3.3",
    "plotly==7.1.0",
    "protobuf==7.36.2",
    "psutil==7.2.2",
    "pydot==4.0.1",
    "pytz==2025.2",
    "tzdata==2025.2",
)
INSTALL_S, READ_S = 300.0, 300.0
FOLDER = Path(tempfile.gettempdir()) / f"workbench-trace-tools-{sys.version_info[0]}{sys.version_info[1]}"


def tools_folder() -> Path:
    """The folder of the packages, filled once; ValueError where they are not available."""
    done = FOLDER / "complete"
    if done.exists() and done.read_text() == "\n".join(PACKAGES):
        return FOLDER
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--upgrade",
        "--target",
        str(FOLDER),
    ]
    try:
        subprocess.run([*command, *PACKAGES], check=True, capture_output=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise ValueError(f"{PACKAGES[0]} and {PACKAGES[1]} cannot be installed: {error}") from None
    done.write_text("\n".join(PACKAGES))
    return FOLDER


def read_with(reader: str, folder: Path) -> Any:
    """The JSON that a module of this package prints for a folder of traces; ValueError with its last line."""
    path = os.pathsep.join((str(tools_folder()), *filter(None, sys.path), str(Path.cwd())))
    command = [sys.executable, "-m", f"experiments.doors.{reader}", str(folder)]
    return answer(command, failure=reader, limit_s=READ_S, environment=os.environ | {"PYTHONPATH": path})
