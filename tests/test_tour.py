"""The tour with a real configuration: a job, the best plan of all strategies, and why it takes that long."""

import time
from pathlib import Path

import pytest

from tests.command_line import accept, answered

CONFIG = Path(__file__).parents[1] / "examples" / "llava-1.5-7b" / "config.json"
MOST_CPU_S = 120.0


def test_from_a_configuration_to_an_explained_plan_within_two_minutes(tmp_path: Path) -> None:
    """Seconds of this process, which does all of it: those of the clock are others' too."""
    job, plan = tmp_path / "llava.yaml", tmp_path / "llava.json"
    began_s = time.process_time()
    accept("init", CONFIG, "--gpus", "16xH100", "-o", job)
    found = answered("search", job, "-o", plan)
    told = answered("explain", plan, "--job", job)
    accept("export", plan, "--to", "fsdp2", "-o", tmp_path / "folder")
    assert time.process_time() - began_s < MOST_CPU_S
    assert (tmp_path / "folder" / "launch.sh").is_file()
    best = found["candidates"][0]
    assert told["step"]["strategy"] == best["strategy"]
    assert told["step"]["iteration_s"] == best["iteration_s"]
    assert sum(row["seconds"] for row in told["critical_path"]) == pytest.approx(best["iteration_s"])
    others = {each["strategy"]: each["iteration_s"] for each in found["candidates"] if "refusal" not in each}
    tried = [each for each in told["changes"]["slower"] if each["kind"] == "strategy"]
    for each in tried:
        assert each["iteration_s"] == others[each["change"].removeprefix("strategy ")]
    assert tried
