"""The microbenchmark without the rest: torch, triton and numpy alone, one process or several."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from runtime.measure.attention import num_pairs, time_attention
from runtime.measure.clock import Clock
from runtime.measure.microbench import header_here, kind_of, known_rows, main, operator_tasks, run_tasks
from runtime.measure.operators import time_host_copies, time_operator, time_products
from runtime.models.attention_mask import token_fields
from tests.bench_sizes import CELLS, SHORT, SMALL
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import (
    AttentionRow,
    CollectiveRow,
    CopyRow,
    LinkRow,
    MatmulRow,
    Measurement,
    OverheadRow,
    read_measurement,
    write_measurement,
)
from workbench.cost.collectives import Collective
from workbench.cost.profile import load_profile
from workbench.masks.builders import causal, encoder_embedded, full

ERRORS = "TORCHELASTIC_ERROR_FILE"

# What pyproject.toml names besides torch, triton and numpy, by the name of the import.
REST = (
    "matplotlib networkx numba pandas PIL pyarrow pydantic yaml rich safetensors scipy simpy "
    "transformers typer"
)

ALONE = f"""
import sys
from contextlib import ExitStack

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REST.split()!r}:
            raise ImportError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Refuse())
from runtime.measure import microbench, wires
from runtime.measure.attention import AttentionSizes, Heads
from runtime.measure.cells import CellSizes
from runtime.measure.operators import Sizes
from runtime.measure.sustained import SustainedSizes

wires.BYTES = (2**10, 2**14, 2**18, 2**20)
wires.OVERLAP_BYTES = 2**23
wires.OVERLAP_PRODUCT = {{"cpu": 64}}
microbench.cell_sizes = lambda device: {CELLS!r}
sys.exit(microbench.main(sys.argv[1:]))
"""


def start(path: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", ALONE, "--device", "cpu", "-o", str(path), "--timeout", "60"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_runs_without_the_rest_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    said, progress = start(path).communicate(timeout=100)
    measured = read_measurement(path)
    assert f"{len(measured.rows)} rows written to {path}" in said
    assert "not measured: layers of adapters: need transformers and a job" in progress
    assert "not measured: messages and collectives: one process, start with torchrun" in progress
    assert "transformers" not in dict(measured.header.versions)
    kinds = [MatmulRow, CopyRow, AttentionRow, OverheadRow]
    assert all(any(isinstance(row, kind) for row in measured.rows) for kind in kinds)
    kept = tuple(row for row in measured.rows if not isinstance(row, MatmulRow))
    write_measurement(Measurement(measured.header, kept), path)
    monkeypatch.setattr("runtime.measure.microbench.cell_sizes", lambda device: CELLS)
    assert main(["--device", "cpu", "-o", str(path)]) == 0
    again = read_measurement(path)
    assert again.rows[: len(kept)] == kept
    assert {type(row) for row in again.rows[len(kept) :]} == {MatmulRow}


def test_several_processes_measure_what_is_between_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    own = [{"RANK": f"{i}", "LOCAL_RANK": f"{i}", ERRORS: f"{tmp_path}/{i}/error.json"} for i in range(2)]
    with ExitStack() as until_ended:
        ranks = [until_ended.enter_context(start(path, **world, **each)) for each in own]
        for rank in ranks:  # one that fails leaves none behind
            until_ended.callback(rank.kill)
        for rank in ranks:
            _, problem = rank.communicate(timeout=100)
            assert rank.returncode == 0, problem
    rows = read_measurement(path).rows
    assert {row.link for row in rows if isinstance(row, LinkRow)} == {"intra"}
    found = {(row.collective, row.num_ranks) for row in rows if isinstance(row, CollectiveRow)}
    kinds = [kind.value for kind in Collective]
    assert found == {(name, 2) for name in kinds}
    profile = fit("here", [read_measurement(path)])
    assert any(reason.startswith("compute beside all_reduce of 2") for reason in profile.unmeasured)
    assert {fitted.table for fitted in profile.fits} >= {"all_reduce of 2 over intra", "intra link", "copies"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "-o", str(tmp_path / "rows.jsonl")]) == 2
    said = capsys.readouterr()
    assert said.err == f"error: device cuda: torch {torch.__version__} sees no GPU here; want cpu, or a GPU\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device_name", "kind"),
    [
        ("NVIDIA A40", "A40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_devices_have_the_names_of_the_shipped_profiles(device_name: str, kind: str) -> None:
    assert kind_of(device_name) == kind == load_profile(kind).device


def test_rows_of_another_machine_are_refused(tmp_path: Path) -> None:
    header = header_here()
    path = tmp_path / "rows.jsonl"
    versions = tuple((name, "0" if name == "torch" else version) for name, version in header.versions)
    other = type(header)(**{**{n: getattr(header, n) for n in header.__slots__}, "versions": versions})
    write_measurement(Measurement(other, ()), path)
    with pytest.raises(ValueError, match="torch is 0, here it is"):
        known_rows(path, header)


@pytest.mark.parametrize("field", [causal(100), full(70), encoder_embedded(130, seed=1)])
def test_pairs_are_counted(field: object) -> None:
    fields = token_fields(field, "cpu")  # type: ignore[arg-type]
    length = len(fields)
    pairs = num_pairs(fields)
    assert length <= pairs <= length * length


def test_pairs_of_simple_masks() -> None:
    assert num_pairs(token_fields(causal(2000), "cpu")) == 2000 * 2001 // 2
    assert num_pairs(token_fields(full(1500), "cpu")) == 1500**2


def test_operators_become_tables(tmp_path: Path) -> None:
    """One profile out of operators alone: rates by size, norms apart, attention with its backward."""
    clock = Clock()
    rows = [*time_products(clock, torch.float32, SMALL.products, 0.0)]
    rows += [
        row
        for name in ("add", "gelu", "rms_norm")
        for row in time_operator(clock, SMALL, torch.float32, name)
    ]  # type: ignore[misc]
    rows += time_attention(clock, SHORT, torch.float32, "causal")  # type: ignore[arg-type]
    rows += time_attention(clock, SHORT, torch.float32, "embedded")  # type: ignore[arg-type]
    rows += time_host_copies(clock, SMALL)  # type: ignore[arg-type]
    profile = fit("here", [Measurement(header_here(), tuple(rows))])
    assert [len(table.points) for table in (profile.matmul, profile.pointwise, profile.normalization)] == [
        3,
        3,
        3,
    ]
    assert len(profile.attention.points) == 2
    assert profile.attention_backward_rate > 0
    assert profile.attention_head_dim == 16
    assert {link.scope for link in profile.links} == {"to_device", "to_host"}
    assert "attention, other masks by their pairs" in {fitted.table for fitted in profile.fits}
    assert not any(reason.startswith(("attention", "matmul")) for reason in profile.unmeasured)


def test_tasks_name_everything_once() -> None:
    tasks = operator_tasks(Clock(), torch.float32)
    names = [task.what for task in tasks]
    assert len(set(names)) == len(names)
    assert not any(task.is_done(()) for task in tasks)
    assert run_tasks([], header_here()).rows == ()
