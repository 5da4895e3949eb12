"""The Pareto front: exactly the points that brute force leaves, in records and as pictures."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predict import predict
from tests.test_strategies import cost, job
from workbench.plan.codec import write_plan
from workbench.report.folder import read_folder
from workbench.report.html import report_html
from workbench.report.pareto_plot import draw_pareto, draw_search
from workbench.report.search_points import points_of, tied_front
from workbench.report.search_tables import search_record, search_table
from workbench.search.drive import search
from workbench.search.objectives.pareto import Point, front, undominated
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

FEW = st.integers(0, 4).map(float)  # so that ties are common


def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(st.integers(1, 4).flatmap(lambda d: st.lists(st.tuples(*[FEW] * d), max_size=40)))
@settings(deadline=None)
def test_it_is_what_brute_force_leaves(costs: list[tuple[float, ...]]) -> None:
    left = [i for i, own in enumerate(costs) if not any(dominates(other, own) for other in costs)]
    found = undominated(costs)
    assert sorted(found) == left
    assert [costs[index] for index in found] == sorted(costs[index] for index in left)


def point(name: str, *costs: float, dollars: float | None = None) -> Point:
    time_s, memory_bytes, gpus = costs
    return Point(name=name, time_s=time_s, memory_bytes=memory_bytes, gpus=gpus, dollars=dollars)


def test_equal_points_stand_on_it_together_and_dollars_count() -> None:
    fast, small, twin = point("fast", 1, 2, 4), point("small", 2, 1, 4), point("twin", 1, 2, 4)
    beaten = point("beaten", 2, 2, 4)
    assert front([beaten, small, fast, twin]) == (2, 3, 1)
    priced = [point("a", 2, 2, 4, dollars=1.0), point("b", 1, 1, 4, dollars=2.0)]
    assert front(priced) == (1, 0)
    with pytest.raises(ValueError, match="want dollars of every plan or of none, 'fast' has none"):
        front([fast, *priced])
    assert front([]) == ()


def searched() -> dict[str, object]:
    planners = {name: PLANNERS[name] for name in ("cornstarch", "encoders-replicated", "dip")}
    found = search(job(2, 2, 3), cost(), planners, lambda plan: predict(*accept(plan), cost()))
    return search_record("tiny", found)


def test_a_search_says_which_plans_no_other_beats(tmp_path: Path) -> None:
    record = searched()
    points = {each.name: each for each in points_of(record["candidates"])}
    assert len(points) == 3
    assert record["front"] == [
        name
        for name, own in sorted(points.items(), key=lambda pair: pair[1].costs)
        if not any(dominates(other.costs, own.costs) for other in points.values())
    ]
    if len(record["front"]) > 1:
        told = f"Pareto front of time, memory, GPUs, best first: {', '.join(record['front'])}"
        assert told in str(search_table(record).caption)
    draw_search(record, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pictures_have_the_kind_of_their_name(tmp_path: Path, kind: str, start: bytes) -> None:
    points = [point(f"p{i}", 1 + i, 100 - i, 4 * (1 + i % 3), dollars=1.0 + (7 * i) % 5) for i in range(30)]
    path = tmp_path / "new" / f"front.{kind}"
    draw_pareto(points, path, title="thirty")
    assert path.read_bytes().startswith(start)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want a picture named .png or .pdf, got '.svg'"):
        draw_pareto([point("a", 1, 1, 1)], tmp_path / "a.svg", title="a")
    with pytest.raises(ValueError, match="no plan of the search"):
        draw_pareto([], tmp_path / "a.png", title="a")


def test_a_search_in_a_folder_is_on_its_page(tmp_path: Path) -> None:
    record = searched()
    write_plan(PLANNERS["cornstarch"](job(2, 2, 3), cost(), lambda *_: None), tmp_path / "plan.json")
    (tmp_path / "search.json").write_text(json.dumps(record))
    folder = read_folder(tmp_path)
    [found] = folder.searches
    assert (found.points, found.objective) == (points_of(record["candidates"]), "iteration")
    html = report_html(folder)
    assert "search.json: 3 plans by iteration" in html
    svg = html[html.index('<svg class="scatter"') : html.index("</svg>", html.index('<svg class="scatter"'))]
    assert svg.count('class="beaten"') == 3 - len(record["front"])
    assert svg.count("<circle cx=") == len(tied_front(found.points))


@pytest.mark.parametrize("key", ["step_s", "ranks", "strategy"])
def test_a_damaged_search_is_named(tmp_path: Path, key: str) -> None:
    record = {"objective": "iteration", "front": [], "candidates": [{"plan_hash": "a", "peak_bytes": 1}]}
    whole = {"strategy": "a", "step_s": 1.0, "ranks": 2}
    record["candidates"][0] |= {name: value for name, value in whole.items() if name != key}
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"search.json: a search whose candidates lack .*: '{key}'"):
        read_folder(tmp_path)
    record["candidates"][0] |= whole | {"step_s": "soon"}
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="step_s must be a number >= 0, got 'soon'"):
        read_folder(tmp_path)
