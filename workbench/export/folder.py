"""Files common to all exported folders: launcher, batch script, environment, container, README."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.export.approximation import Approximation, Difference
from workbench.export.target import Launch, Target
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.units import MS_PER_S
from workbench.whole_file import check_writable, naming

MARK = "export.json"
FORMAT = "multimodal-workbench export"
README, LAUNCH, BATCH, ENVIRONMENT, CONTAINER = (
    "README.md",
    "launch.sh",
    "job.sbatch",
    "env.sh",
    "CONTAINER.md",
)
_PORT = 29500
# torchrun itself ends with a traceback where the port is taken. bash's /dev/tcp connects to what listens.
_PORT_CHECK = """\
if [[ ! "$MASTER_PORT" =~ ^[1-9][0-9]{0,4}$ ]] || ((MASTER_PORT > 65535)); then
  echo "launch.sh: error: MASTER_PORT: want 1 to 65535, got '$MASTER_PORT'" >&2
  exit 2
fi
is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
if [[ "$NODE_RANK" == 0 ]] && is_taken "$MASTER_PORT"; then
  free=$((MASTER_PORT % 65535 + 1))
  while is_taken "$free"; do free=$((free % 65535 + 1)); done
  echo "launch.sh: error: port $MASTER_PORT is in use on this machine, where all processes are to meet;" \
    "set a free one on every node, nearest: MASTER_PORT=$free" >&2
  exit 2
fi
"""


def ranks_by_node(plan: Plan) -> tuple[int, ...]:
    """Processes on every node in use, in the order of nodes."""
    counts = Counter(plan.cluster.node_of(rank) for rank in plan.ranks)
    return tuple(counts[node] for node in sorted(counts))


def common_files(target: Target, approximation: Approximation) -> dict[str, str]:
    """Texts of the common files by name."""
    launch = target.launch(approximation)
    return {
        README: _readme(target, approximation, launch.training),
        LAUNCH: _launch(approximation.plan, launch),
        BATCH: _batch(target, approximation.plan),
        ENVIRONMENT: _environment(launch),
        CONTAINER: f"# Container\n\n{launch.container.strip()}\n",
        MARK: json.dumps(_mark(target, approximation), indent=2, sort_keys=True) + "\n",
    }


def _mark(target: Target, approximation: Approximation) -> Mapping[str, object]:
    return {
        "format": FORMAT,
        "target": target.name,
        "system": target.system,
        "plan_hash": plan_hash(approximation.plan),
        "plan_step_s": approximation.step_s,
        "exported_step_s": approximation.becomes_s,
        "differences": [
            {"has": each.has, "gets": each.gets, "seconds": each.seconds}
            for each in approximation.differences
        ],
    }


def _launch(plan: Plan, launch: Launch) -> str:
    """A script to run once on every node; torchrun starts the node's processes."""
    per_node = ranks_by_node(plan)
    if len(set(per_node)) == 1:
        processes = f"PROCESSES={per_node[0]}"
    else:
        cases = "\n".join(f"  {node}) PROCESSES={count} ;;" for node, count in enumerate(per_node))
        processes = f'case "$NODE_RANK" in\n{cases}\nesac'
    nodes = len(per_node)
    return f"""#!/usr/bin/env bash
# Starts this node's processes; run it once on each of {nodes} node(s), with NODE_RANK 0, 1, ...
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
source ./{ENVIRONMENT}
{_node_check(nodes)}NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:-0}}}}"
MASTER_ADDR="${{MASTER_ADDR:-127.0.0.1}}"
MASTER_PORT="${{MASTER_PORT:-{_PORT}}}"
{_PORT_CHECK}{processes}
{launch.before}exec torchrun \\
  --nnodes {nodes} --node-rank "$NODE_RANK" --nproc-per-node "$PROCESSES" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
  {launch.program} "$@"
"""


def _node_check(nodes: int) -> str:
    """Lines that refuse several nodes without an address: each would wait for the others at its own."""
    if nodes == 1:
        return ""
    return f"""\
if [[ -z "${{MASTER_ADDR:-}}" || -z "${{NODE_RANK:-${{SLURM_NODEID:-}}}}" ]]; then
  echo "launch.sh: error: {nodes} nodes want MASTER_ADDR, the name of the first node, and NODE_RANK," \\
    "0 to {nodes - 1}, on each of them; sbatch {BATCH} sets both" >&2
  exit 2
fi
"""


def _batch(target: Target, plan: Plan) -> str:
    per_node = ranks_by_node(plan)
    on_devices = plan.cluster.nodes[0].num_cores is None
    devices = f"#SBATCH --gpus-per-node={max(per_node)}\n" if on_devices else ""
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={target.name}-{_word(plan.model.name)}
#SBATCH --nodes={len(per_node)}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Add --partition, --account and --time as your site wants them.
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?start this with sbatch from the folder it lies in}}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR
srun --kill-on-bad-exit=1 bash ./{LAUNCH} "$@"
"""


def _word(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _environment(launch: Launch) -> str:
    lines = ["# Sourced by launch.sh; what is set already stays."]
    for name, (value, reason) in launch.environment.items():
        lines += [f"# {reason}", f'export {name}="${{{name}:-{value}}}"']
    return "\n".join(lines) + "\n"


def _readme(target: Target, approximation: Approximation, training: str) -> str:
    plan = approximation.plan
    nodes = len(ranks_by_node(plan))
    return f"""# {plan.model.name} under {target.system}

{target.summary[0].upper()}{target.summary[1:]}.

| | |
| --- | --- |
| plan | {plan.made_by}, hash {plan_hash(plan)[:12]} |
| ranks | {len(plan.ranks)} on {nodes} node(s) of {plan.cluster.nodes[0].device} |
| predicted step of the plan | {_ms(approximation.step_s)} |
| predicted step of this folder | {_ms(approximation.becomes_s)} |

## Start it

{_start(nodes)}; under Slurm `sbatch {BATCH}` from this folder. {CONTAINER} says what the
image must have, {ENVIRONMENT} what is set for every process. What stands behind either is handed on to
the program, which runs in this folder: relative paths start here.

## Data, weights and steps

{training.strip()}

## What the plan has and {target.name} does otherwise

{_differences(approximation.differences)}
"""


def _start(nodes: int) -> str:
    if nodes == 1:
        return f"`bash {LAUNCH}`"
    last = nodes - 1
    return f"On each node `MASTER_ADDR=<first node> NODE_RANK=<0 to {last}> bash {LAUNCH}`"


def _differences(differences: tuple[Difference, ...]) -> str:
    if not differences:
        return "Nothing: this folder executes the plan exactly."
    lines = ["| the plan has | here instead | predicted cost of a step |", "| --- | --- | --- |"]
    lines += [
        f"| {_cell(difference.has)} | {_cell(difference.gets)} | {_cost(difference)} |"
        for difference in differences
    ]
    ending = "Each cost is relative to the line above it; their sum is the difference between the two steps."
    return "\n".join([*lines, "", ending])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _cost(difference: Difference) -> str:
    if difference.seconds is None:
        return "not predicted"
    return f"{difference.seconds * MS_PER_S:+.3f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * MS_PER_S:.3f} ms"


_PROGRAM_MODE, _FOLDER_MODE = 0o755, 0o777


def check_folder(folder: Path) -> None:
    """Refuse early what cannot be overwritten; creates nothing.

    Raises:
        ValueError: it is a file, contains something that no export wrote, or is in an unwritable place.
    """
    if folder.is_symlink() or folder.is_file():
        raise ValueError(f"{folder}: want a folder to write, this is a file or a link")
    check_writable(folder / MARK)
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(
            f"{folder}: has files that no export wrote; want a new folder, or one of `workbench export`"
        )


def _is_ours(folder: Path) -> bool:
    try:
        mark = json.loads(read_bounded(folder / MARK, MOST_SETTINGS_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("format") == FORMAT


def write_folder(files: Mapping[str, str], folder: Path) -> None:
    """Write the files into a temporary sibling folder, then rename it over the old one as a whole.

    Raises:
        ValueError: as `check_folder`.
        OSError: it cannot be written; names a file or the folder.
    """
    check_folder(folder)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        with naming(folder):
            for name, text in files.items():
                path = staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                if name.endswith(".sh"):
                    path.chmod(_PROGRAM_MODE)
            staging.chmod(_FOLDER_MODE & ~_umask())
            _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, folder: Path) -> None:
    """Rename over an empty folder; a previous export is moved aside first, and back if that fails."""
    if not folder.exists() or not any(folder.iterdir()):
        staging.replace(folder)
        return
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.replace(aside)
    try:
        staging.replace(folder)
    except OSError:
        aside.replace(folder)
        raise
    shutil.rmtree(aside)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
