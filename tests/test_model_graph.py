"""Layers, modules and their DAG: counting, joining, refusals."""

from graphlib import CycleError
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dag_models import chain, dag_models
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Layer, LayerKind, Lookup, Matmul, Parameter, Pointwise, Shard
from workbench.model.model_graph import Edge, ModelGraph, Module, connect
from workbench.model.module_order import producers_first
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.trainable import Trainable, with_trainable
from workbench.model.transformer import Heads, Norm


def layer(name: str, *operators, **more) -> Layer:
    return Layer(name=name, kind=LayerKind.BLOCK, operators=operators, out_width=4, **more)


def test_parameters_of_operators():
    column = Matmul(name="up", in_features=4, out_features=6, bias=True, shard=Shard.COLUMN)
    row = Matmul(name="down", in_features=6, out_features=4, bias=True, shard=Shard.ROW)
    scale = Pointwise(name="norm", width=4, num_passes=2, weights=(("weight", 4),))
    found = layer("block.0", scale, column, row)
    assert list(found.parameters()) == [
        Parameter("block.0.norm.weight", (4,)),
        Parameter("block.0.up.weight", (6, 4), Shard.COLUMN),
        Parameter("block.0.up.bias", (6,), Shard.COLUMN),
        Parameter("block.0.down.weight", (4, 6), Shard.ROW),
        Parameter("block.0.down.bias", (4,)),
    ]
    assert found.num_parameters == 4 + 24 + 6 + 24 + 4


def test_layers_of_a_module_share_equal_operators():
    """What follows from a layer's operators is cached by their identity: also for experts, and for files."""
    same = [layer(f"block.{index}", Matmul(name="up", in_features=4, out_features=4)) for index in range(3)]
    other = layer("block.3", Matmul(name="up", in_features=4, out_features=8))
    module = Module(name="m", modality="text", layers=(*same, other))
    assert module.layers == (*same, other)
    assert len({id(each.operators) for each in module.layers}) == 2
    config = {"model_type": "mixtral", "num_hidden_layers": 3, "num_local_experts": 4}
    experts = module_from_config(config, name="llm", modality="text")
    assert len({id(each.operators) for each in experts.layers}) == len({e.operators for e in experts.layers})


def test_tied_weights_count_once_in_a_module():
    table = Lookup(name="embed_tokens", num_rows=10, width=4)
    head = Matmul(name="lm_head", in_features=4, out_features=10)
    tied = Module(
        name="llm",
        modality="text",
        layers=(
            layer("embed", table, tied=(("embed_tokens.weight", "shared"),)),
            layer("head", head, tied=(("lm_head.weight", "shared"),)),
        ),
    )
    untied = Module(name="llm", modality="text", layers=(layer("embed", table), layer("head", head)))
    assert (tied.num_parameters, untied.num_parameters) == (40, 80)
    assert (tied.num_trained, untied.num_trained) == (40, 80)
    assert (tied.tied_layers, untied.tied_layers) == ((0, 1), ())


def test_a_text_only_model_is_a_graph_of_one_module():
    llm = module_from_config({"model_type": "llama", "num_hidden_layers": 1}, name="llm", modality="text")
    model = connect("text", [llm])
    assert model.modules == (llm,)
    assert model.edges == ()
    assert model.num_parameters == llm.num_parameters


def test_connect_joins_two_encoders_at_one_llm():
    vision, audio, llm = chain("vision", [True] * 3), chain("audio", [True] * 2), chain("llm", [True] * 4)
    model = connect("valm", [vision, llm], [audio, llm])
    assert [module.name for module in model.modules] == ["vision", "audio", "llm"]
    assert model.edges_into("llm") == (
        Edge(source="vision", target="llm", after_layer=2, before_layer=0),
        Edge(source="audio", target="llm", after_layer=1, before_layer=0),
    )
    assert [edge.name for edge in model.edges_out_of("vision")] == ["vision>llm"]
    assert model.module("audio") is audio


def test_connect_lists_producers_before_consumers():
    a, b, c = chain("a", [True]), chain("b", [True]), chain("c", [True])
    model = connect("late", [c], [a, b], [b, c])
    assert [module.name for module in model.modules] == ["a", "b", "c"]


@given(model=dag_models())
def test_a_graph_is_what_its_edges_say(model):
    position = {module.name: index for index, module in enumerate(model.in_order)}
    assert set(position) == {module.name for module in model.modules}
    assert all(position[edge.source] < position[edge.target] for edge in model.edges)
    for module in model.modules:
        assert all(edge.target == module.name for edge in model.edges_into(module.name))
        assert all(edge.source == module.name for edge in model.edges_out_of(module.name))


@given(num=st.integers(0, 7), edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_an_order_and_the_lack_of_one_are_those_of_networkx(num: int, edges: list[tuple[int, int]]):
    names = [f"m{7 - index}" for index in range(num)]  # listed against the alphabet
    named = [(names[a], names[b]) for a, b in edges if max(a, b) < num]
    graph = nx.DiGraph(named)
    graph.add_nodes_from(names)
    if nx.is_directed_acyclic_graph(graph):
        assert producers_first(names, named) == [*nx.lexicographical_topological_sort(graph, names.index)]
        return
    with pytest.raises(CycleError) as raised:
        producers_first(names, named)
    cycle = raised.value.args[1]
    assert cycle[0] == cycle[-1]
    assert {*pairwise(cycle)} <= {*named}


def test_with_trainable_sets_every_flag_anew():
    module = chain("m", [True, False, True])
    assert [x.trainable for x in with_trainable(module, Trainable.NONE).layers] == [False] * 3
    assert [x.trainable for x in with_trainable(module, Trainable.ALL).layers] == [True] * 3


def test_pooling_projector_reads_every_token_that_it_merges():
    projection = Projection(kind=Projector.LINEAR, in_width=4, out_width=8, norm=Norm.LAYER, merge=4)
    pool = next(op for op in projector_layer(projection).operators if op.name == "pool")
    assert pool.tokens_scale == 4.0


def edge(source: str, target: str, after: int = 0, before: int = 0) -> Edge:
    return Edge(source=source, target=target, after_layer=after, before_layer=before)


def graph(modules: list[Module], *edges: Edge) -> ModelGraph:
    return ModelGraph(name="bad", modules=tuple(modules), edges=edges)


A, B, C = chain("a", [True, True]), chain("b", [True]), chain("c", [True])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: graph([A, B], edge("a", "b"), edge("b", "a")),
            "must be acyclic, got the cycle",
            id="cycle",
        ),
        pytest.param(
            lambda: connect("bad", [A, B], [B, C], [C, A]),
            "must be acyclic, got the cycle",
            id="connect-cycle",
        ),
        pytest.param(lambda: graph([A], edge("a", "a")), "must be acyclic", id="self"),
        pytest.param(
            lambda: graph([A, B], edge("a", "b"), edge("a", "b", after=1)), "a>b is twice", id="edge-twice"
        ),
        pytest.param(lambda: graph([A, A]), "module names must be unique, 'a' is twice", id="twice"),
        pytest.param(
            lambda: graph([A, B], edge("a", "z")),
            "edge a>z: no module 'z'; the model has a, b",
            id="no-module",
        ),
        pytest.param(
            lambda: graph([A, B], edge("a", "b", after=2)),
            r"edge a>b: a has layers 0\.\.1, got 2",
            id="no-layer",
        ),
        pytest.param(
            lambda: graph([A, B], edge("a", "b", before=-1)), r"b has layers 0\.\.0, got -1", id="negative"
        ),
        pytest.param(
            lambda: graph([A]).module("vision"), "has no module 'vision'; it has a", id="unknown-module"
        ),
        pytest.param(
            lambda: Module(name="m", modality="text", layers=()), "want at least one layer", id="no-layers"
        ),
        pytest.param(
            lambda: Module(name="m", modality="text", layers=(layer("x"), layer("x"))),
            "layer names must be unique, 'x' is twice",
            id="layer-twice",
        ),
        pytest.param(
            lambda: Heads(num=6, num_kv=4, dim=8, causal=True), "got 6 heads, 4 kv_heads", id="heads"
        ),
        pytest.param(
            lambda: with_trainable(A, Trainable.PROJECTOR), "needs a projector layer", id="no-projector"
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
