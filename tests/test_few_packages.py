"""What measures a machine and makes its profile runs where few packages are installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LACKING = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "simpy", "zmq")

SCRIPT = f"""
import sys

sys.modules.update(dict.fromkeys({LACKING!r}))  # importing these raises
import runtime.measure.layers
import runtime.measure.operators
import runtime.measure.microbench
import workbench.calibrate.measurement
from pathlib import Path
from workbench.calibrate.fit import fit
from workbench.cost.execution import Execution, load_execution, write_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile, write_profile
from workbench.plan.codec import dumps, loads

folder = Path(sys.argv[1])
write_profile(ideal_profile("here"), folder / "profile.json")
assert load_profile(folder / "profile.json") == ideal_profile("here")
write_execution(Execution(), folder / "execution.json")
assert load_execution(folder / "execution.json") == Execution()
CostModel(load_profile("H100"))
"""


def test_rows_profiles_and_plans_need_no_more_than_a_machine_of_torch_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
