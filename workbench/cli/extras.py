"""Packages that the planner does without: which extra of the installation brings each."""

from importlib.util import find_spec

DISTRIBUTION = "multimodal-workbench"

EXTRAS = {
    "run": {
        "PIL": "pillow",
        "safetensors": "safetensors",
        "torch": "torch",
        "transformers": "transformers",
        "triton": "triton",
        "zmq": "pyzmq",
    },
    "report": {"matplotlib": "matplotlib"},
    "data": {"pandas": "pandas", "pyarrow": "pyarrow"},
    "ray": {"ray": "ray"},
}
"""Of every extra, its packages: the name that is imported to the name that is installed."""


def missing_text(command: str, error: ModuleNotFoundError) -> str | None:
    """`run needs torch: pip install 'multimodal-workbench[run]'`; None where no extra brings the module."""
    imported = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if imported in packages:
            return f"{command} needs {packages[imported]}: {install_text(extra)}"
    return None


def install_text(extra: str) -> str:
    """The command that brings an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def has_extra(extra: str) -> bool:
    """Whether all its packages that this platform can have are installed."""
    wanted = [name for name in EXTRAS[extra] if name != "triton"]  # Linux alone has wheels
    return all(find_spec(name) is not None for name in wanted)
