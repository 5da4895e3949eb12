"""Optional packages, and the extra of the installation that provides each."""

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
"""Extra -> its packages, from import name to the name of the distribution."""


def missing_text(command: str, error: ModuleNotFoundError) -> str | None:
    """`run needs torch: pip install 'multimodal-workbench[run]'`; None if no extra provides the module."""
    imported = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if imported in packages:
            return f"{command} needs {packages[imported]}: {install_text(extra)}"
    return None


def install_text(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def has_extra(extra: str) -> bool:
    """Whether all its packages that exist for this platform are installed."""
    modules = [name for name in EXTRAS[extra] if name != "triton"]  # Linux alone has wheels
    return all(find_spec(name) is not None for name in modules)
