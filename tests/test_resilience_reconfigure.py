"""Reconfiguration: the guarantees of the appendix, copies, joins, and the stated refusals."""

import random
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from workbench.elastic.chain import LayerChain
from workbench.elastic.copies import Copy, _stripes, busiest_bytes, copies_between
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.instantiate import fastest
from workbench.elastic.layout import NodeLayout, first_layout, held_layers
from workbench.elastic.node_specification import NodeSpecification, TemplateSet
from workbench.elastic.reconfigure import CannotContinueError, StepKind, join, survive

MOST_NODES = 64


@cache
def templates_from(smallest: int):
    """Templates of 1..64 one-GPU nodes of a model that fits on `smallest` nodes, not on fewer."""
    per_node = -(-MOST_NODES // smallest)
    layers = smallest * per_node
    chain = LayerChain(
        widths=(1,), time_s=((1.0,),) * layers, held_bytes=((1,),) * layers, capacity_bytes=per_node
    )
    found = exact_templates(chain, 1, range(1, MOST_NODES + 1))
    assert min(found) == smallest
    return found, tuple(range(100, 100 + layers))


def planned_for(num_nodes: int, faults: int, smallest: int) -> TemplateSet:
    specification = NodeSpecification(num_nodes=num_nodes, num_faults=faults, smallest=smallest)
    found = templates_from(smallest)[0]
    return TemplateSet(
        specification=specification, templates=tuple(found[size] for size in specification.sizes)
    )


def some_sizes(planned: TemplateSet, num_nodes: int, rng: random.Random) -> list[int]:
    """A random instantiation of all nodes."""
    smallest, largest = planned.specification.smallest, planned.specification.largest
    possible = [
        count
        for count in range(planned.specification.num_faults + 1, num_nodes // smallest + 1)
        if count * smallest <= num_nodes <= count * largest
    ]
    sizes = [smallest] * rng.choice(possible)
    for _ in range(num_nodes - sum(sizes)):
        index = rng.choice([k for k, size in enumerate(sizes) if size < largest])
        sizes[index] += 1
    return sizes


def check(planned: TemplateSet, before: NodeLayout, lost: set[str], after, layer_bytes):
    """All survivors work, every pipeline has a template, and everyone gets what it lacks."""
    survivors = {n for p in before.pipelines for n in p} - lost
    assert {n for p in after.layout.pipelines for n in p} == survivors
    assert len(after.layout.pipelines) > planned.specification.num_faults
    assert all(size in planned.specification.sizes for size in after.layout.sizes)
    had, needs = held_layers(planned, before), held_layers(planned, after.layout)
    got = {(copy.destination, copy.layer) for copy in after.copies}
    parts: dict[tuple[str, int], int] = {}
    for copy in after.copies:
        assert copy.source in survivors
        assert copy.layer in had[copy.source]
        assert copy.num_bytes > 0
        assert copy.first_byte == parts.get((copy.destination, copy.layer), 0)  # parts meet
        parts[copy.destination, copy.layer] = copy.first_byte + copy.num_bytes
    assert all(end == layer_bytes[layer] for (_, layer), end in parts.items())
    for node, layers in needs.items():
        assert {layer for layer in layers if layer not in had[node]} == {
            layer for destination, layer in got if destination == node
        }


def run_down(num_nodes: int, faults: int, smallest: int, rng: random.Random) -> str:
    """Kill random nodes, one to several at once, until the stated refusal; return its reason."""
    planned = planned_for(num_nodes, faults, smallest)
    layer_bytes = templates_from(smallest)[1]
    names = [f"n{k}" for k in range(num_nodes)]
    layout = first_layout(names, some_sizes(planned, num_nodes, rng))
    while True:
        nodes = [n for p in layout.pipelines for n in p]
        lost = set(rng.sample(nodes, min(len(nodes), rng.choice((1, max(1, faults), rng.randint(1, 8))))))
        enough = len(nodes) - len(lost) >= planned.specification.threshold
        try:
            after = survive(planned, layout, sorted(lost), layer_bytes)
        except CannotContinueError as error:
            refusal = str(error)
            break
        assert enough
        check(planned, layout, lost, after, layer_bytes)
        layout = after.layout
    assert ("training stops" in refusal) == (not enough)
    assert not enough or len(lost) > faults, "f simultaneous failures always survive"
    return "lost" if enough else "few"


def test_every_specification_up_to_64_nodes_covers_all_nodes():
    count = 0
    for smallest in range(1, MOST_NODES + 1):
        for num_nodes in range(smallest, MOST_NODES + 1):
            for faults in range(num_nodes // smallest):
                NodeSpecification(num_nodes=num_nodes, num_faults=faults, smallest=smallest)
                count += 1
    assert count == sum(nodes // n0 for n0 in range(1, 65) for nodes in range(1, 65))


def test_failure_sequences_end_in_a_valid_layout_or_the_stated_refusal():
    rng = random.Random(0)
    reasons = []
    for smallest in (*range(1, 12), 16, 21, 32):
        for num_nodes in range(smallest, MOST_NODES + 1, 5):
            faults = rng.randrange(num_nodes // smallest)
            reasons.append(run_down(num_nodes, faults, smallest, rng))
    assert {"few", "lost"} == set(reasons)


@given(st.integers(0, 10**6))
@examples(60)
def test_up_to_f_simultaneous_failures_always_survive(seed):
    rng = random.Random(seed)
    smallest, faults = rng.randint(1, 6), rng.randint(1, 3)
    num_nodes = rng.randint((faults + 1) * smallest + faults, 40)
    planned = planned_for(num_nodes, faults, smallest)
    layer_bytes = templates_from(smallest)[1]
    layout = first_layout([f"n{k}" for k in range(num_nodes)], some_sizes(planned, num_nodes, rng))
    lost = set(rng.sample([n for p in layout.pipelines for n in p], faults))
    check(planned, layout, lost, survive(planned, layout, sorted(lost), layer_bytes), layer_bytes)


def after_loss(sizes, lost, *, faults=0, smallest=2, num_nodes=None, spares=()):
    planned = planned_for(num_nodes or sum(sizes), faults, smallest)
    names = [f"n{k}" for k in range(sum(sizes))]
    return survive(planned, first_layout(names, sizes), lost, templates_from(smallest)[1], spares)


def test_figure_2_8():
    simple = after_loss((4, 4), ["n0"])
    assert [step.kind for step in simple.steps] == [StepKind.SIMPLE]
    assert simple.layout.sizes == (3, 4)
    borrow = after_loss((2, 3), ["n0"])
    assert [step.kind for step in borrow.steps] == [StepKind.BORROW]
    assert borrow.layout.sizes == (2, 2)
    merge = after_loss((2, 2), ["n0"])
    assert [step.kind for step in merge.steps] == [StepKind.MERGE]
    assert merge.layout.sizes == (3,)


def test_a_node_that_waits_takes_the_place_of_a_lost_one():
    with pytest.raises(CannotContinueError, match="3 nodes are left, 2 pipelines of 2 need 4"):
        after_loss((2, 2), ["n0"], faults=1)
    replaced = after_loss((2, 2), ["n0"], faults=1, spares=["x", "y"])
    assert [step.kind for step in replaced.steps] == [StepKind.REPLACE]
    assert replaced.layout.pipelines == (("x", "n1"), ("n2", "n3"))  # n1 keeps its place, y goes on waiting
    assert {copy.destination for copy in replaced.copies} >= {"x"}
    assert [s.kind for s in after_loss((4, 2), ["n0"], spares=["x"]).steps] == [StepKind.SIMPLE]


def least_copied(planned: TemplateSet, before: NodeLayout, lost: str, layer_bytes) -> int:
    """Brute force over every pipeline that can lend a node, and every order of all nodes."""
    smallest, had = planned.specification.smallest, held_layers(planned, before)
    sizes = [len(pipeline) - (lost in pipeline) for pipeline in before.pipelines]
    broken = next(index for index, pipeline in enumerate(before.pipelines) if lost in pipeline)
    nodes = [node for pipeline in before.pipelines for node in pipeline if node != lost]
    lend = (
        [index for index, size in enumerate(sizes) if size > smallest] if sizes[broken] < smallest else [-1]
    )
    assert lend, "a merge"
    least = None
    for donor in lend:
        after = [
            size - (donor >= 0 and index == donor) + (donor >= 0 and index == broken)
            for index, size in enumerate(sizes)
        ]
        wanted = [layers for size in after for layers in planned.of_size(size).layers_by_node()]
        for order in permutations(nodes):
            copied = sum(
                layer_bytes[layer]
                for node, layers in zip(order, wanted, strict=True)
                for layer in layers
                if layer not in had[node]
            )
            least = copied if least is None else min(least, copied)
    return least


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 2), (2, 5), (2, 4), (3, 3)])
def test_one_lost_node_makes_the_fewest_bytes_of_all_donors_and_places(sizes):
    rng = random.Random(sum(sizes))
    planned = planned_for(sum(sizes), len(sizes) - 1, 2)
    layer_bytes = [rng.randint(1, 1000) for _ in templates_from(2)[1]]
    before = first_layout([f"n{k}" for k in range(sum(sizes))], sizes)
    for lost in rng.sample([n for p in before.pipelines for n in p], 2 if sum(sizes) > 6 else 4):
        after = survive(planned, before, [lost], layer_bytes)
        copied = sum(copy.num_bytes for copy in after.copies)
        assert copied == least_copied(planned, before, lost, layer_bytes)


def test_borrowing_again_after_a_merge_keeps_f_plus_one():
    """Three pipelines of 3 lose a node each: merging two, then the third, would leave one pipeline."""
    after = after_loss((3, 3, 3), ["n0", "n4", "n8"], faults=1, smallest=3)
    assert sorted(after.layout.sizes) == [3, 3]


def test_copies_spread_over_sources():
    planned = planned_for(12, 1, 2)
    layer_bytes = templates_from(2)[1]
    names = [f"n{k}" for k in range(12)]
    layout = first_layout(names, (2, 2, 2, 2, 2, 2))
    after = survive(planned, layout, ["n0"], layer_bytes)
    sent = {}
    for copy in after.copies:
        sent[copy.source] = sent.get(copy.source, 0) + copy.num_bytes
    needed = {copy.layer for copy in after.copies}
    giving = [n for n, layers in held_layers(planned, layout).items() if n != "n0" and needed & set(layers)]
    assert set(sent) == set(giving)
    assert max(sent.values()) - min(sent.values()) <= len(after.copies)  # equally busy, to rounding


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 200))
def test_the_busiest_holder_sends_as_little_as_possible(sent, num_bytes):
    stripes = _stripes([(busy, f"n{index}") for index, busy in enumerate(sent)], num_bytes)
    assert sum(part for _, part in stripes) == num_bytes
    after = dict(stripes)
    busiest = max(busy + after[f"n{index}"] for index, busy in enumerate(sent) if f"n{index}" in after)
    level = next(top for top in range(251) if sum(max(0, top - busy) for busy in sent) >= num_bytes)
    assert busiest == level  # the least whole number of bytes up to which all can send


def test_the_busiest_port_may_be_one_that_sends():
    assert busiest_bytes(()) == 0
    parts = (("a", "x", 30), ("b", "x", 30), ("b", "y", 50))
    copies = tuple(
        Copy(layer=0, source=source, destination=destination, first_byte=0, num_bytes=size)
        for source, destination, size in parts
    )
    assert busiest_bytes(copies) == 80  # that b sends


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3), (5, 4, 2)])
def test_join_takes_everyone_in(sizes):
    planned = planned_for(20, 1, 2)
    layer_bytes = templates_from(2)[1]
    names = [f"n{k}" for k in range(20)]
    layout = first_layout(names[: sum(sizes)], sizes)
    new = names[sum(sizes) : 14]
    wanted = fastest(planned, 14, 64).sizes
    after = join(planned, layout, new, wanted, layer_bytes)
    assert sorted(after.layout.sizes) == sorted(wanted)
    assert {n for p in after.layout.pipelines for n in p} == set(names[:14])
    assert {copy.destination for copy in after.copies} >= set(new)
    assert not {copy.source for copy in after.copies} & set(new)
    again = join(planned, after.layout, (), wanted, layer_bytes)
    assert again.steps == ()
    assert again.copies == ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: after_loss((4, 4), ["n9"]), "left before, or never joined", id="unknown"),
        pytest.param(lambda: after_loss((4, 4), ["n1", "n1"]), "2 times at once", id="twice"),
        pytest.param(lambda: after_loss((2, 2), ["n0"], faults=1), "need 4: training stops", id="below"),
        pytest.param(lambda: after_loss((2, 2, 2), ["n0", "n2", "n4"]), "held layer 0 are lost", id="dead"),
        pytest.param(lambda: NodeLayout(pipelines=(("a", "b"), ("b",))), "in 2 places", id="two-places"),
        pytest.param(lambda: NodeLayout(pipelines=((),)), "one node or more", id="empty"),
        pytest.param(lambda: first_layout(["a"], (2,)), "there are 1", id="sizes"),
        pytest.param(
            lambda: join(planned_for(8, 0, 2), first_layout(["a", "b"], (2,)), ["a"], (3,), (1,) * 64),
            "is there already",
            id="joins-twice",
        ),
        pytest.param(
            lambda: join(planned_for(8, 0, 2), first_layout(["a", "b"], (2,)), ["c"], (2, 1), (1,) * 64),
            "1 or more of 2..8 nodes, 3 in all",
            id="no-instantiation",
        ),
        pytest.param(
            lambda: copies_between(
                planned_for(4, 0, 2), first_layout(["a", "b"], (2,)), first_layout(["a", "b"], (2,)), (), (1,)
            ),
            "64 layers",
            id="bytes",
        ),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
