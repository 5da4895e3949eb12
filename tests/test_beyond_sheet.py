"""Figures of machines in another unit are named beside those of the data sheet; right ones never are."""

from pathlib import Path

import pytest

from tests.command_line import JOB, workbench
from workbench.calibrate.beyond_sheet import beyond_sheet
from workbench.calibrate.device_sheet import shipped_sheets
from workbench.cost.profile import known_profiles
from workbench.job.job import load_job

LOCAL = "local: {ranks: 4, cores: 2}\n  memory_gib: 1\n  intra: {gb_per_s: 1.0, latency_us: 100.0}"
RIGHT = "device: H100\n  nodes: 2\n  ranks_per_node: 2\n"
MEMORY = "but H100 has 74.5 by its data sheet"
BYTES = "it counts bytes, not bits, of one port or card"


def job_file(folder: Path, cluster: str, profile: str = "H100") -> Path:
    path = folder / "job.yaml"
    text = JOB.replace(LOCAL, cluster)
    assert text != JOB
    path.write_text(text.partition("layouts:")[0] + f"precision: bfloat16\nprofile: {profile}\n")
    return path


@pytest.mark.parametrize(
    ("more", "line"),
    [
        pytest.param("memory_gib: 800", f"memory_gib is 800, {MEMORY}", id="memory"),
        pytest.param("memory_gib: 141", f"memory_gib is 141, {MEMORY}", id="H200"),
        pytest.param("memory_gib: 80", "", id="binary"),
        pytest.param(
            "inter: {gb_per_s: 400, latency_us: 5}",
            f"inter.gb_per_s is 400, but H100 has 50 by its data sheet; {BYTES}",
            id="bits",
        ),
        pytest.param("inter: {gb_per_s: 50, latency_us: 5, cards: 8}", "", id="bytes"),
        pytest.param("inter: {gb_per_s: 100, latency_us: 5}", "", id="next-generation"),
        pytest.param(
            "intra: {gb_per_s: 3600, latency_us: 1}",
            f"intra.gb_per_s is 3600, but H100 has 450 by its data sheet; {BYTES}",
            id="nvlink-bits",
        ),
    ],
)
def test_what_a_device_cannot_have_is_said_with_what_it_has(more: str, line: str, tmp_path: Path) -> None:
    lines = list(beyond_sheet(load_job(job_file(tmp_path, f"{RIGHT}  {more}"))))
    assert lines == ([f"job 'small': {line}"] if line else [])


def test_nothing_is_said_of_devices_without_a_sheet(tmp_path: Path) -> None:
    cluster = RIGHT.replace("H100", "prototype") + "  memory_gib: 800"
    assert not list(beyond_sheet(load_job(job_file(tmp_path, cluster))))


@pytest.mark.parametrize("device", sorted({*shipped_sheets()} & {*known_profiles()}))
def test_profiles_are_within_their_sheets(device: str, tmp_path: Path) -> None:
    path = job_file(tmp_path, RIGHT.replace("H100", device).rstrip(), device)
    assert not list(beyond_sheet(load_job(path)))


def test_a_command_warns_in_one_line(tmp_path: Path) -> None:
    path = job_file(tmp_path, f"{RIGHT}  memory_gib: 800")
    ran = workbench("plan", path, "-o", tmp_path / "plan.json")
    assert ran.exit_code == 0
    assert [line for line in ran.stderr.splitlines() if "data sheet" in line] == [
        "workbench: warning: job 'small': memory_gib is 800, but H100 has 74.5 by its data sheet"
    ]
