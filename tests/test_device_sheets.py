"""Data sheets, names of devices, and profiles that are made of sheets."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench.calibrate.derived import LIKE, main, profile_of
from workbench.calibrate.device_sheet import (
    SHEETS,
    DeviceSheet,
    check_sheet,
    read_sheet,
    shipped_sheet,
    shipped_sheets,
)
from workbench.calibrate.leave_one_out import Rule, rule_errors
from workbench.calibrate.transfer import TILE, product_seconds, rescaled
from workbench.cli.app import main as workbench
from workbench.cost.device_limits import PowerLimit
from workbench.cost.device_names import shipped_device
from workbench.cost.power import clock_share
from workbench.cost.profile import known_profiles, load_profile

B200 = (SHEETS / "B200.csv").read_text()
ALL = [shipped_sheet(name) for name in shipped_sheets()]


def test_building_again_gives_the_shipped_bytes(tmp_path: Path):
    main([str(tmp_path)])
    for device in LIKE:
        made, shipped = tmp_path / f"{device}.json", SHEETS.parent / f"{device}.json"
        assert made.read_bytes() == shipped.read_bytes(), "run workbench.calibrate.derived"


def test_every_shipped_profile_has_a_sound_sheet():
    assert set(shipped_sheets()) == set(known_profiles())
    for sheet in ALL:
        check_sheet(sheet, ALL)
        assert {cell for cell, _ in sheet.sources} >= set(sheet.presumed)


def test_racks_join_72_devices():
    assert {name: load_profile(name).node_ranks for name in LIKE if name.startswith("GB")} == {
        "GB200": 72,
        "GB300": 72,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("cell,value", "name,value"), "unknown column 'name'"),
        (("power_watts", "tdp_watts"), "line 15: unknown cell 'tdp_watts'"),
        (("processors,148", "processors,148.5"), "line 4: processors: want a whole number, got 148.5"),
        (("processors,148", "processors,many"), "line 4: processors: want a number, got 'many'"),
        (("memory_gbytes,180", "memory_gbytes,-1"), "line 5: memory_gbytes: want a number > 0, got -1"),
        (("memory_gbytes,180,sourced", "memory_gbytes,180,guessed"), "standing 'guessed': want one of"),
        (("memory_gbytes,180", "processors,180"), "cell 'processors' stands twice"),
        (("architecture,Blackwell", "architecture,"), "line 3: architecture: want a value and its source"),
    ],
)
def test_bad_sheets_are_refused_by_line(tmp_path: Path, change: tuple[str, str], message: str):
    path = tmp_path / "sheet.csv"
    path.write_text(B200.replace(*change))
    with pytest.raises(ValueError, match=message):
        read_sheet(path)


def test_a_missing_cell_is_named(tmp_path: Path):
    path = tmp_path / "sheet.csv"
    path.write_text("\n".join(line for line in B200.splitlines() if not line.startswith("power_watts")))
    with pytest.raises(ValueError, match="no cell power_watts; want each, presumed where nobody"):
        read_sheet(path)


SPARSE: list[tuple[str, Callable[[DeviceSheet], DeviceSheet]]] = [
    ("bfloat16_tflop_per_s", lambda s: replace(s, bfloat16_flop_per_s=2 * s.bfloat16_flop_per_s)),
    (
        "bfloat16_tflop_per_s",
        lambda s: replace(s, architecture="new", bfloat16_flop_per_s=2 * s.bfloat16_flop_per_s),
    ),
    ("fp8_tflop_per_s", lambda s: replace(s, fp8_flop_per_s=2 * s.fp8_flop_per_s)),
    ("nvfp4_tflop_per_s", lambda s: replace(s, nvfp4_flop_per_s=2 * s.nvfp4_flop_per_s)),
    ("reached_bfloat16_tflop_per_s", lambda s: replace(s, reached_bfloat16_flop_per_s=4e15)),
    ("full_power_watts", lambda s: replace(s, full_power_w=500.0)),
    ("link_gbytes_per_s", lambda s: replace(s, link_bytes_per_s=9e12)),
]


@pytest.mark.parametrize(("cell", "spoiled"), SPARSE)
def test_contradictory_cells_are_named(cell: str, spoiled: Callable[[DeviceSheet], DeviceSheet]):
    with pytest.raises(ValueError, match=f"data sheet of B200: .*{cell}.*nearest"):
        check_sheet(spoiled(shipped_sheet("B200")), ALL)


@pytest.mark.parametrize("architecture", ["ada", "Ada Lovelace", "Ada AD103"])
def test_a_sparse_peak_is_seen_beside_others_of_the_generation(architecture: str):
    """Per watt alone it would pass: 733 TFLOP/s at 350 W are less than 1.6 times what a GB200 does."""
    sheet = replace(shipped_sheet("L40S"), architecture=architecture, fp8_flop_per_s=None)
    check_sheet(sheet, ALL)
    with pytest.raises(ValueError, match=f"at most 1.6 times others of {architecture}, got 724.1"):
        check_sheet(replace(sheet, bfloat16_flop_per_s=2 * sheet.bfloat16_flop_per_s), ALL)


def test_a_sheet_equal_to_its_likes_gives_its_likes_tables():
    sheet = shipped_sheet("H100")
    same = rescaled(sheet, load_profile("H100"), sheet)
    like = load_profile("H100")
    for name in ("attention", "pointwise", "normalization"):
        assert getattr(same, name).points == getattr(like, name).points
    capped = [(*point[:-1], min(point[-1], 794.5e12)) for point in like.matmul.points]
    assert [*same.matmul.points] == capped
    assert [c.table.points for c in same.collectives] == [c.table.points for c in like.collectives]


def test_products_fill_processors_wave_after_wave():
    sheet, rate = replace(shipped_sheet("H100"), memory_bytes_per_s=1e30), 1e15
    whole = np.asarray([[TILE[0] * 12.0, TILE[1] * 11.0, 8192.0]])
    more = whole + np.asarray([[1.0, 0.0, 0.0]])
    once, twice = (float(product_seconds(sheet, at, rate)[0]) for at in (whole, more))
    assert once == pytest.approx(2.0 * whole.prod() / rate)
    tiles = 12 * 11 + 11  # a row more opens a row of tiles, and these a second wave
    assert twice == pytest.approx(2.0 * more.prod() / rate * (2 * 132 / tiles) ** 0.5)


def test_products_meet_the_roofline_away_from_its_corner():
    sheet = shipped_sheet("H100")
    tall, wide = np.asarray([[1.0, 8192.0, 8192.0], [8448.0, 8192.0, 65536.0]])[:, None]
    assert product_seconds(sheet, tall, 1e15)[0] == pytest.approx(2 * 8192**2 / 3.35e12, rel=1e-2)
    assert product_seconds(sheet, wide, 1e15)[0] == pytest.approx(2.0 * wide.prod() / 1e15, rel=1e-2)


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "bfloat16_flop_per_s", "link_bytes_per_s"])
def test_a_better_device_is_nowhere_slower(field: str):
    sheet, like = replace(shipped_sheet("H200"), reached_bfloat16_flop_per_s=None), load_profile("H200")
    made = rescaled(replace(sheet, **{field: 1.7 * getattr(sheet, field)}), like, sheet)
    tables = [(getattr(made, n), getattr(like, n)) for n in ("matmul", "attention", "pointwise")]
    tables += [(new.table, old.table) for new, old in zip(made.collectives, like.collectives, strict=True)]
    for table, before in tables:
        pairs = zip(table.points, before.points, strict=True)
        assert all(new[-1] >= old[-1] * (1 - 1e-3) for new, old in pairs)


def test_a_power_limit_slows_what_computes_and_nothing_else():
    limited, free = load_profile("H100-500W"), load_profile("H100")
    assert limited.pointwise.points == free.pointwise.points
    ratio = max(p[-1] for p in limited.attention.points) / max(p[-1] for p in free.attention.points)
    assert ratio == pytest.approx(clock_share(500.0, PowerLimit(rated_w=700.0, source="sheet")), rel=1e-3)


def test_what_scaling_earned_is_what_profiles_ship():
    pairs = [each for each in rule_errors() if each.rule is Rule.PRODUCTS]
    assert {each.device for each in pairs} == {"A40", "A100-80GB", "H100", "H200", "L40S"}
    assert all(each.like != each.device for each in pairs)
    across = [each.median for each in pairs if not each.alike]
    within = [each.median for each in pairs if each.alike]
    fits = {name: load_profile(name).fits[0] for name in ("B200", "A100-40GB")}
    assert fits["B200"].median == pytest.approx(float(np.mean(across)), rel=1e-3)
    assert fits["A100-40GB"].median == pytest.approx(float(np.mean(within)), rel=1e-3)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40GB"),
        ("h100_80gb", "H100"),
        ("H100-SXM", "H100"),
        ("GB200 NVL72", "GB200"),
        ("H100 500W", "H100-500W"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("B200-192GB", "B200"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("H100 NVL", "H100-NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA H100 96GB 500W", "H100-96GB-500W"),
    ],
)
def test_names_of_the_field(said: str, meant: str):
    assert load_profile(said).device == meant


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("A100", "want one of A100-40GB, A100-80GB"),
        ("V100", "want one of V100-16GB, V100-32GB"),
        ("P100-PCIe", "no profile 'P100-PCIe'.*nearest: V?H?100-PCIe"),
        ("H100-94GB", "H100 has 80GB; nearest: H100"),
    ],
)
def test_names_that_mean_another_device(said: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_profile(said)


@pytest.mark.parametrize("name", known_profiles())
def test_every_known_name_means_itself(name: str):
    assert shipped_device(name, known_profiles()) == name
    assert shipped_device(name.lower().replace("-", "_"), known_profiles()) == name


def test_the_command_makes_what_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, sheet = tmp_path / "B200.json", SHEETS / "B200.csv"
    assert _run(monkeypatch, "new", "B200", "--from-sheet", sheet, "--like", "H100-SXM", "-o", path) == 0
    assert path.read_bytes() == (SHEETS.parent / "B200.json").read_bytes()
    assert _run(monkeypatch, "check", path) == _run(monkeypatch, "check", sheet) == 0
    assert _run(monkeypatch, "show", path, "--json") == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["like"] == "H100"
    assert shown["peak_flop_per_s"]["nvfp4"] == 9e15


def test_a_device_that_is_scaled_is_no_like(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert _run(monkeypatch, "new", "X", "--from-sheet", SHEETS / "B200.csv", "--like", "GB200") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no profile 'GB200'" in line
    with pytest.raises(ValueError, match="nearest"):
        profile_of(shipped_sheet("B200"), "V100")


def _run(monkeypatch: pytest.MonkeyPatch, *words: object) -> object:
    monkeypatch.setattr(sys, "argv", ["workbench", "profile", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        workbench()
    return stop.value.code
