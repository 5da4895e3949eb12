"""Profiles: strict files, shipped ones, and the command that builds them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.calibrate.data_sheet import A40, SHEETS
from workbench.calibrate.derived import LIKE
from workbench.calibrate.public import build_profile, main
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.profile import (
    CollectiveTable,
    Direction,
    SustainedProducts,
    Table,
    dump_profile,
    ideal_profile,
    known_profiles,
    load_profile,
    parse_profile,
    write_profile,
)


def test_known_profiles():
    measured = {sheet.device for sheet in SHEETS}
    assert set(known_profiles()) == measured | set(LIKE)
    assert all(load_profile(name).device == name for name in known_profiles())


@pytest.mark.parametrize("name", known_profiles())
def test_shipped_profile_round_trips_and_names_its_sources(name: str):
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(dump_profile(profile)) == profile
    assert all(table.source for table in (profile.matmul, profile.attention, profile.pointwise))
    assert ("matmul" in {fit.table for fit in profile.fits}) is profile.matmul.measured
    assert any("backward of matmul" in reason for reason in profile.unmeasured)
    tables = (profile.matmul, profile.attention, profile.pointwise)
    for table, word in zip(tables, ("matmul: ", "attention: ", "memory-bound kernels: "), strict=True):
        assert any(reason.startswith(word) for reason in profile.unmeasured) is not table.measured


def test_building_again_gives_the_shipped_bytes(tmp_path: Path):
    main([str(tmp_path)])
    for sheet in SHEETS:
        shipped = Path("workbench/cost/profiles") / f"{sheet.device}.json"
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes(), (
            "run workbench.calibrate.public"
        )


@pytest.mark.parametrize("name", known_profiles())
def test_leave_one_out_errors_of_the_tables_are_small(name: str):
    profile = load_profile(name)
    fits = {fit.table: fit for fit in profile.fits}
    assert ("matmul" in fits) is profile.matmul.measured
    if profile.matmul.measured:
        assert fits["matmul"].median < 0.04
        assert fits["matmul"].p90 < 0.12
    assert ("attention" in fits) is profile.attention.measured
    if profile.attention.measured:
        assert fits["attention"].median < 0.03
        assert fits["attention"].p90 < 0.11


def test_the_command_prints_the_errors_it_ships(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([str(tmp_path), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {sheet.device for sheet in SHEETS}
    assert printed["A40"]["matmul"]["median"] == load_profile("A40").fits[0].median


def test_a40_says_what_it_lacks():
    profile = build_profile(A40)
    assert profile.matmul.measured
    assert not profile.attention.measured
    assert "A100-80GB scaled" in profile.attention.source
    assert [link.measured for link in profile.links] == [False, False]
    assert not profile.collectives
    largest = max(rate for *_, rate in profile.matmul.points)
    assert 0.7 < largest / profile.peak("bfloat16") < 1.0


def test_unknown_name_lists_the_known_ones():
    shipped = len(known_profiles())
    with pytest.raises(ValueError, match=f"no profile 'A41': want a file or one of {shipped} such as A40, "):
        load_profile("A41")
    with pytest.raises(
        ValueError, match=r"no profile 'gone\.json': want a file, which `workbench calibrate` writes, or"
    ):
        load_profile("gone.json")


def test_a_file_is_loaded_by_path(tmp_path: Path):
    path = tmp_path / "mine.json"
    write_profile(ideal_profile("mine"), path)
    assert load_profile(path) == ideal_profile("mine") == load_profile(str(path))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"device"', '"devise"', "profile: unknown key 'devise'; did you mean 'device'"),
        (
            '"kernel_floor_s": 0.0',
            '"kernel_floor_s": "fast"',
            "profile.kernel_floor_s: want float, got 'fast'",
        ),
        ('"fits": []', '"fits": [], "speed": 3', "profile: unknown key 'speed'"),
        ('"format_version": 1', '"format_version": 2', "want format_version 1, got 2"),
        ('"memory_bytes": 1099511627776', '"memory_bytes": 0', "rates and memory must be > 0"),
        ('"axes": []', '"axes": [], "points": [[1.0]], "unit": 3', "unknown key 'unit'"),
        ("}\n", "", "the profile is not JSON"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, message: str):
    text = dump_profile(ideal_profile())
    assert old in text
    path = tmp_path / "wrong.json"
    head, _, tail = text.rpartition(old)
    path.write_text(head + new + tail)
    with pytest.raises(ValueError, match=message) as refusal:
        load_profile(path)
    assert str(refusal.value).startswith(str(path))


def test_bad_facts_are_refused():
    with pytest.raises(ValueError, match=r"want points \(\*axes, rate\) > 0"):
        Table(axes=("m",), points=((1.0, 0.0),))
    sizes = Table(axes=("bytes",), points=((1.0, 1.0),))
    with pytest.raises(ValueError, match="matmul: want points over m, n, k, got bytes"):
        replace(ideal_profile(), matmul=sizes)
    with pytest.raises(ValueError, match="sustained products, forward: want points over m, n, k, got bytes"):
        SustainedProducts(direction=Direction.FORWARD, table=sizes)
    with pytest.raises(ValueError, match="all_reduce of the 'intra' link: want points over num_ranks, bytes"):
        CollectiveTable(collective="all_reduce", scope="intra", table=sizes)
    with pytest.raises(ValueError, match="want >= 1 row and token"):
        LayerPoint(rows=0, tokens_in=1, attention_area=1, forward_s=1, input_grad_s=1, weight_grad_s=1)
    with pytest.raises(ValueError, match="only in: bfloat16, float32, float64"):
        ideal_profile().peak("int8")
    with pytest.raises(ValueError, match="has no memory bandwidth"):
        _ = replace(ideal_profile(), peak_bytes_per_s=None).memory_bytes_per_s
    with pytest.raises(ValueError, match=r"has no 'intra' link; it has none"):
        ideal_profile().machine_link("intra")


def test_layers_survive_the_file():
    point = LayerPoint(
        rows=1, tokens_in=8, attention_area=36, forward_s=1e-3, input_grad_s=0, weight_grad_s=0
    )
    table = LayerTable(signature="block-0", precision="float32", points=(point,))
    profile = replace(ideal_profile(), layers=(table,))
    assert parse_profile(dump_profile(profile)) == profile


def test_l20_is_the_a40_at_its_own_peak():
    """Nobody published its tables: every rate is another machine's, times the ratio of the data sheets."""
    found, like = load_profile("L20"), load_profile("A40")
    assert not any(table.measured for table in (found.matmul, found.attention, found.pointwise))
    for mine, its in zip(found.matmul.points, like.matmul.points, strict=True):
        assert mine[:-1] == its[:-1]
        assert mine[-1] / its[-1] == pytest.approx(119.5 / 149.7, rel=1e-3)
