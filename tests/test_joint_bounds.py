"""The bound of the joint search: layers, and all plans of a small space, take no less."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from experiments.search.spaces import spaces
from sim.predict import IterationJudge
from tests.examples import examples
from tests.test_joint_search import found, small
from tests.test_strategies import cost
from workbench.cost.collectives import Collective
from workbench.cost.hardware import Node, uniform
from workbench.cost.interpolate import Surface
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.least_calls import LeastCalls
from workbench.cost.least_products import ranges
from workbench.cost.least_time import LeastTimes
from workbench.cost.measured import MeasuredLayer
from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.profile import load_profile
from workbench.cost.sustained import Line
from workbench.model.frozen import Needs
from workbench.model.zoo import from_shape
from workbench.planner.layout_choice import Degrees
from workbench.planner.stage_counts import silent
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.bounds import lower_bound_s, module_paths, weighed_s
from workbench.search.joint.choice import TokenRule, build, choice_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Request, evaluate
from workbench.search.joint.grouping_moves import Exchange, Resize
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.least_work import LeastWork, Part, Samples, most_bytes_per_s
from workbench.search.joint.move import Space
from workbench.search.joint.setting_moves import Distribute
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import cornstarch

machine = cache(lambda profile: CostModel(load_profile(profile)))
llm = cache(lambda: from_shape("llama-3.1-8b"))
tokens = st.lists(st.integers(1, 8192), min_size=1, max_size=6)


def causal(lengths) -> Work:
    return Work(tuple(RowWork(n, n, n * (n + 1) // 2) for n in lengths))


@examples(40)
@given(
    lengths=tokens,
    others=st.lists(st.integers(1, 8192), max_size=3),
    cuts=st.sets(st.integers(1, 5)),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    profile=st.sampled_from(["A40", "H100"]),
    place=st.sampled_from([0, 1, -1]),
    needs=st.sampled_from([Needs(*each) for each in product((False, True), repeat=2)]),
)
def test_a_layer_takes_no_less_on_any_grid_in_any_calls(
    *, lengths, others, cuts, tp, cp, profile, place, needs
):
    model, layer = machine(profile), llm().layers[place]
    stock = causal([*lengths, *others])
    least = LeastTimes(model, "bfloat16", stock, degrees=(1, 2, 4, 8), cuts_tokens=cp > 1)
    whole = least.of(layer, causal(lengths), needs)
    borders = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    calls = [
        model.layer_time(layer, causal(lengths[a:b]), tp=tp, cp=cp, precision="bfloat16")
        for a, b in pairwise(borders)
    ]
    way_s = tp * cp * sum(call.forward_s + needs.input_grad * call.input_grad_s for call in calls)
    weights_s = tp * cp * sum(needs.weight_grad * call.weight_grad_s for call in calls)
    assert way_s >= whole.way_s * (1 - 1e-9)
    assert way_s + weights_s >= whole.all_s * (1 - 1e-9)
    assert whole.weights_s >= 0


def test_the_bound_of_a_large_layer_is_near():
    layer, work = llm().layers[5], causal([4096] * 4)
    times = LeastTimes(machine("H100"), "bfloat16", work, degrees=(1, 2, 4, 8), cuts_tokens=False)
    least = times.of(layer, work, Needs(input_grad=True, weight_grad=True))
    time = machine("H100").layer_time(layer, work, tp=1, cp=1, precision="bfloat16")
    assert least.all_s > 0.9 * (time.forward_s + time.input_grad_s + time.weight_grad_s)


def test_stocks_of_nearly_equal_size_share_what_products_take(monkeypatch):
    model, layer, needs = CostModel(load_profile("H100")), llm().layers[5], Needs(True, True)
    looked_at: list[object] = []
    most = model.most_products_flop_per_s
    monkeypatch.setattr(
        model, "most_products_flop_per_s", lambda *asked: looked_at.append(asked) or most(*asked)
    )

    def num_looked_at(*lengths: int) -> int:
        before = len(looked_at)
        times = LeastTimes(model, "bfloat16", causal(lengths), degrees=(1, 2, 4, 8), cuts_tokens=False)
        times.of(layer, causal([1024]), needs)
        return len(looked_at) - before

    assert num_looked_at(4096, 4096, 4096) > 20
    assert num_looked_at(4096, 4096, 4096, 17) == 0
    assert num_looked_at(4096, 4096, 4096, 4096, 17) > 20  # beyond the next power of two


shapes = st.tuples(*(st.sampled_from([1.0, 2.0, 3.0, 4.0, 8.0, 16.0]) for _ in range(3)))
tables = st.dictionaries(shapes, st.floats(1.0, 100.0), min_size=1, max_size=24)
coordinates = st.tuples(*(st.floats(0.5, 32.0) for _ in range(3)))


@examples(150)
@given(table=tables, corners=st.tuples(coordinates, coordinates), inside=st.lists(coordinates, max_size=8))
def test_no_reading_of_a_box_is_above_its_most(table, corners, inside):
    """Also in the corners, and where a measured point lies in the box."""
    surface = Surface([(*shape, rate) for shape, rate in table.items()])
    low, high = (tuple(map(of, *corners)) for of in (min, max))
    most = surface.most(low, high)
    assert most <= surface.extremes[1] * (1 + 1e-9)
    for at in (*inside, *table, low, high):
        clipped = tuple(map(max, low, map(min, high, at)))
        assert surface.read(*clipped).rate <= most * (1 + 1e-9)


@examples(150)
@given(table=tables, at=coordinates, axis=st.integers(0, 2), edges=st.lists(st.floats(0.5, 32.0), min_size=2))
def test_no_reading_between_two_values_of_a_coordinate_is_above_its_most(table, at, axis, edges):
    surface = Surface([(*shape, rate) for shape, rate in table.items()])
    edges = np.array(sorted(edges))
    most = surface.most_along(axis, edges, at)
    assert most.shape == (len(edges) - 1,)
    for (low, high), bound in zip(pairwise(edges), most, strict=True):
        for share in (0.0, 0.1, 0.5, 0.77, 1.0):
            asked = (*at[:axis], low + share * (high - low), *at[axis + 1 :])
            assert surface.read(*asked).rate <= bound * (1 + 1e-9)


def test_the_most_along_a_coordinate_is_near_what_is_read():
    """Of a real table, in sixteenths of octaves."""
    table = Surface(load_profile("H100").matmul.points)
    edges = np.geomspace(300.0, 9000.0, 80)
    most = table.most_along(0, edges, (1.0, 4096.0, 4096.0))
    read = [table.read(at, 4096.0, 4096.0).rate for at in edges]
    assert max(most / np.maximum(read[:-1], read[1:])) < 1.02


line = st.dictionaries(st.integers(1, 64), st.floats(0.1, 10.0), min_size=1, max_size=5)


@given(points=line, ends=st.tuples(st.floats(0.5, 100.0), st.floats(0.5, 100.0)), share=st.floats(0.0, 1.0))
def test_a_line_between_two_lengths_lies_between_its_extremes(points, ends, share):
    short, long = sorted(ends)
    ratios = Line(points.items())
    ratio = ratios.at(short + share * (long - short))
    least, most = ratios.extremes(short, long)
    assert least * (1 - 1e-9) <= ratio <= most * (1 + 1e-9)


def calls_of(profile, one, num_items):
    """Of llama's layers on eight ranks of one node, with and without context-parallel ranks."""
    model = machine(profile)
    link = model.profile.machine_link("intra").link
    plain = LeastTimes(model, "bfloat16", Work(one.rows * num_items), degrees=(1, 2, 4, 8), cuts_tokens=False)
    return LeastCalls(
        machines=(model,),
        precision="bfloat16",
        one=one,
        num_items=num_items,
        grids=((1, None), *((tp, link) for tp in (2, 4, 8))),
        num_ranks=8,
        most_bytes_per_s=link.bytes_per_s,
        plain=plain,
        cutting=plain.cutting_tokens(),
        sums_s={},
    )


def area_and_way(profile, layer, work, tp, cp, needs):
    """Ranks times seconds of all passes, and seconds on the way, of a call that the cost model prices."""
    time = machine(profile).layer_time(layer, work, tp=tp, cp=cp, precision="bfloat16")
    return tp * cp * (time.forward_s + time.backward_s(needs)), time.forward_s + time.through_s(needs)


A_CALL = {
    "grid": st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 8), (2, 4)]),
    "profile": st.sampled_from(["A40", "H100"]),
    "place": st.sampled_from([0, 1, -1]),
    "needs": st.sampled_from([Needs(*each) for each in product((False, True), repeat=2)]),
    "weight": st.floats(0.0, 1.0),
}


@examples(40)
@given(length=st.integers(16, 8192), num=st.integers(1, 40), **A_CALL)
def test_a_call_of_items_that_are_alike_takes_no_less_than_its_kind(
    *, length, num, grid, profile, place, needs, weight
):
    """By area, on the way, and by any mean of the two."""
    layer, one = llm().layers[place], causal([length])
    area_s, way_s = area_and_way(profile, layer, Work(one.rows * num), *grid, needs)
    calls = calls_of(profile, one, 40).of(layer, needs)
    assert np.min(weight * calls[:, 0] + (1 - weight) * calls[:, 1]) <= (
        weight * area_s / num + (1 - weight) * way_s
    ) * (1 + 1e-9)


@examples(40)
@given(lengths=st.lists(st.integers(16, 4096), min_size=1, max_size=6), **A_CALL)
def test_a_call_of_unequal_items_takes_no_less_than_all_of_them(
    *, lengths, grid, profile, place, needs, weight
):
    """Each by its own area, and by the call's way at its share of the tokens."""
    layer, tokens = llm().layers[place], ranges(1.0, float(sum(lengths)))
    area_s, way_s = area_and_way(profile, layer, causal(lengths), *grid, needs)
    least_s = 0.0
    for length in lengths:
        calls = replace(calls_of(profile, causal([length]), 1), num_items=len(lengths))
        share = length / sum(lengths)
        found = calls.among_others(layer, needs, tokens)
        least_s += np.min(weight * found[:, 0] + (1 - weight) * share * found[:, 1])
    assert least_s <= (weight * area_s + (1 - weight) * way_s) * (1 + 1e-9)


seconds = st.floats(1e-4, 1.0)
points = st.dictionaries(st.integers(1, 512), st.tuples(seconds, seconds, seconds), min_size=1, max_size=5)


@examples(60)
@given(measured=points, lengths=tokens, cut=st.integers(1, 5))
def test_a_layer_measured_whole_takes_no_less_in_any_calls(measured, lengths, cut):
    rows = [
        LayerPoint(
            rows=1,
            tokens_in=n,
            attention_area=n * n,
            forward_s=forward_s,
            input_grad_s=input_s,
            weight_grad_s=weight_s,
        )
        for n, (forward_s, input_s, weight_s) in sorted(measured.items())
    ]
    table = LayerTable(signature="block-0", precision="float32", tp=1, cp=1, points=tuple(rows))
    layer = MeasuredLayer(table)
    calls = [layer.read(causal(part)) for part in (lengths[:cut], lengths[cut:]) if part]
    least = layer.least_s(causal(lengths))
    for name in ("forward_s", "input_grad_s", "weight_grad_s", "forward_only_s", "split_weight_s"):
        assert sum(getattr(call, name) for call in calls) >= getattr(least, name) * (1 - 1e-9)


def every_arrangement():
    """Degrees of three modules on four ranks, encoders together or all on the LLM's first stage."""
    for dp, tp, cp, pp in product((1, 2), (1, 2), (1, 2), (1, 2)):
        llm = Degrees(module="llm", tp=tp, cp=cp, pp=pp, dp=dp)
        on_llm = tuple(replace(llm, module=name, pp=1) for name in ("vision", "audio"))
        if llm.num_ranks <= 4:
            yield Arrangement(placement=Placement.FIRST_STAGE, degrees=(*on_llm, llm))
        if llm.num_ranks <= 2:
            apart = tuple(Degrees(module=name, dp=dp) for name in ("vision", "audio"))
            yield Arrangement(placement=Placement.TOGETHER, degrees=(*apart, llm))


def four_ranks():
    job = small()
    return replace(job, batch=job.batch[:4], max_ranks=4, layouts=())


@cache
def every_value() -> tuple[float, ...]:
    """Of all layouts x groupings x owners of tokens of a small space."""
    job = four_ranks()
    first = cornstarch.plan(replace(job, max_ranks=None), cost(), silent)
    space, base = Space(job, cost(), {}), choice_of(job, first, cost())
    groupings = ((), (Resize(2),), (Exchange(0, 3),))
    rules = (TokenRule.ZIGZAG, TokenRule.EXCHANGED, TokenRule.CONTIGUOUS, TokenRule.LONGEST_FIRST)
    values = []
    for arrangement, grouping, rule in product(every_arrangement(), groupings, rules):
        moves = (Arrange(arrangement), *grouping, Distribute(rule))
        outcome = evaluate(space, IterationJudge(cost()), Request(base, moves))
        if outcome.value is not None:
            values.append(outcome.value)
    return tuple(values)


def test_no_plan_of_a_whole_space_is_faster_than_the_bound_nor_than_what_is_found():
    values, bound_s = every_value(), lower_bound_s(four_ranks(), cost(), None)
    assert len(values) > 40
    assert 0 < bound_s <= min(values)
    planners = {"cornstarch": cornstarch.plan}
    stop, scope = Stop(candidates=80), Scope(planners=planners)
    best = joint_search(four_ranks(), cost(), IterationJudge(cost()), stop=stop, scope=scope)
    assert best.value <= min(values) * (1 + 1e-9)
    assert best.lower_bound <= bound_s


@pytest.mark.parametrize("place", range(len(spaces())))
def test_no_plan_of_a_listed_space_is_faster_than_its_bound(place):
    """Of every space the same plans are drawn, with layouts open and with each plan's own."""
    space = spaces()[place]
    judge, bound_s = IterationJudge(space.cost), lower_bound_s(space.job, space.cost, None)
    choices = random.Random(1).sample(list(space.choices()), 24)
    num = 0
    for choice in choices:
        try:
            value = judge.value(build(space.job, choice, space.cost))
        except ValueError:  # it does not fit
            continue
        own_s = lower_bound_s(space.job, space.cost, choice)
        assert 0 < bound_s <= value
        assert bound_s * (1 - 1e-9) <= own_s <= value
        num += 1
    assert num > 8


calls = st.lists(st.tuples(st.floats(0.1, 4.0), st.floats(0.1, 4.0)), min_size=1, max_size=4)


@examples(60)
@given(
    layers=st.lists(calls, min_size=2, max_size=4),
    first=st.integers(0, 1),
    samples=st.integers(1, 6),
    ranks=st.integers(1, 8),
    update_s=st.floats(0.0, 2.0),
)
def test_work_and_ways_are_weighed_as_a_linear_program_does(layers, first, samples, ranks, update_s):
    """The least step into which the area and every way fit, each layer's calls mixed as they like."""
    ids = frozenset(range(samples))
    of_each = tuple(np.array(each) for each in layers)
    works = {"llm": LeastWork((Samples(ids, 1, of_each),))}
    found = weighed_s(works, {"llm": update_s}, {"llm": 1 / ranks}, (Part("llm", first, len(layers)),))
    costs = [(area, way * (at >= first)) for at, each in enumerate(layers) for area, way in each]
    is_of = [
        [float(at == layer) for at, each in enumerate(layers) for _ in each] for layer in range(len(layers))
    ]
    least = linprog(
        [0.0] * len(costs) + [1.0],
        A_ub=[[samples / ranks * area for area, _ in costs] + [-1.0], [way for _, way in costs] + [-1.0]],
        b_ub=[-update_s / ranks, 0.0],
        A_eq=[[*row, 0.0] for row in is_of],
        b_eq=[1.0] * len(layers),
    )
    assert found <= least.fun * (1 + 1e-6)
    assert found >= least.fun * (1 - 1e-3)


@pytest.mark.parametrize("profile", ["A40", "A100-80GB", "H100", "H200", "L20"])
def test_no_all_gather_brings_more_than_the_most(profile):
    """Some of them are measured, and faster than their link is said to be."""
    model = machine(profile)
    links = [model.profile.machine_link(name).link for name in ("intra", "inter")]
    node = Node(device=profile, num_ranks=8, memory_bytes=1)
    most = most_bytes_per_s(uniform("two", node, num_nodes=2, intra=links[0], inter=links[1]), model)
    for link, num, size in product(links, (2, 3, 4, 6, 8, 16), np.geomspace(1e3, 8e9, 61)):
        seconds = model.collectives.seconds(Collective.ALL_GATHER, num * size, num, link)
        assert size / seconds <= most * 1.001


def test_no_all_to_all_brings_more_keys_than_the_most():
    """One measured ten times as fast as gathers: four of them, each of half of a rank's keys and values."""
    profile = load_profile("H100")
    gather = next(each for each in profile.collectives if each.collective == Collective.ALL_GATHER)
    points = tuple((*at, 10 * rate) for *at, rate in gather.table.points)
    exchange = replace(
        gather, collective=str(Collective.ALL_TO_ALL), table=replace(gather.table, points=points)
    )
    model = CostModel(replace(profile, collectives=(gather, exchange)))
    link = profile.machine_link(gather.scope).link
    node = Node(device="H100", num_ranks=8, memory_bytes=1)
    most = most_bytes_per_s(uniform("one", node, num_nodes=1, intra=link, inter=link), model)
    for num, size in product((2, 4, 8), np.geomspace(1e3, 8e9, 61)):
        seconds = 4 * model.collectives.seconds(Collective.ALL_TO_ALL, size / 2, num, link)
        assert size / seconds <= most * 1.001


def test_a_sample_goes_from_where_a_module_is_entered_to_where_it_is_left():
    """Also past a module whose output a later layer reads, and not through layers in front of that."""
    job = small()
    found = set(module_paths(job.model))
    llm_layers = len(job.model.llm.layers)
    for way in found:
        assert way[-1].module == "llm"
        assert way[-1].end == llm_layers
        for part, target in pairwise(way):
            (edge,) = [e for e in job.model.edges_out_of(part.module) if e.target == target.module]
            assert (part.end, target.first) == (edge.after_layer + 1, edge.before_layer)
    assert {way[0].module for way in found} == {m.name for m in job.model.modules if m.name != "llm"}


def test_a_layout_that_stays_is_bounded_more_closely():
    open_s = lower_bound_s(small(), cost(), None)
    for start in found().starts:
        if start.value is not None:
            assert open_s < lower_bound_s(small(), cost(), start.choice) <= start.value
