"""Which gradients run: against all paths walked one by one, closed forms, and torch's autograd."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.utils.flop_counter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import plans
from tests.dag_models import WIDTH, chain, dag_models
from tests.examples import examples
from workbench.model.frozen import FrozenRule, Needs, gradient_needs
from workbench.model.layer import Pointwise
from workbench.model.model_graph import Edge, ModelGraph, Module, connect
from workbench.plan.flop import model_flop

Place = tuple[str, int]  # module, layer


def inputs_of(model: ModelGraph, place: Place, present: frozenset[str]) -> list[Place]:
    """Layers whose output the layer reads."""
    module, layer = place
    found = [(module, layer - 1)] if layer > 0 else []
    found += [
        (edge.source, edge.after_layer)
        for edge in model.edges
        if edge.target == module and edge.before_layer == layer and edge.source in present
    ]
    return found


def paths_to(model: ModelGraph, place: Place, present: frozenset[str]) -> list[tuple[Place, ...]]:
    """Every path of layers that ends before `place`, nearest layer first. Exponential, obviously right."""
    paths = []
    for nearer in inputs_of(model, place, present):
        paths.append((nearer,))
        paths += [(nearer, *rest) for rest in paths_to(model, nearer, present)]
    return paths


def needs_by_paths(model: ModelGraph, present: frozenset[str]) -> dict[str, tuple[Needs, ...]]:
    def is_trainable(place: Place) -> bool:
        return model.module(place[0]).layers[place[1]].trainable

    return {
        module.name: tuple(
            Needs(
                any(
                    is_trainable(place)
                    for path in paths_to(model, (module.name, index), present)
                    for place in path
                ),
                layer.trainable,
            )
            for index, layer in enumerate(module.layers)
        )
        for module in model.modules
    }


def is_narrow(model: ModelGraph) -> bool:
    """Few enough paths to walk them all."""
    return len(model.edges) <= 7


@given(model=dag_models().filter(is_narrow), data=st.data())
@settings(deadline=None)
def test_exact_rule_equals_walking_all_paths(model, data):
    names = [module.name for module in model.modules]
    present = frozenset(data.draw(st.sets(st.sampled_from(names))))
    assert gradient_needs(model, present) == needs_by_paths(model, present)
    assert gradient_needs(model) == needs_by_paths(model, frozenset(names))


@given(model=dag_models())
def test_the_papers_rule_adds_a_layers_own_trainability(model):
    exact = gradient_needs(model)
    paper = gradient_needs(model, rule=FrozenRule.CORNSTARCH)
    for module in model.modules:
        for layer, ours, theirs in zip(module.layers, exact[module.name], paper[module.name], strict=True):
            assert theirs == Needs(ours.input_grad or layer.trainable, ours.weight_grad)


@given(model=dag_models())
def test_unaware_runs_everything(model):
    needs = gradient_needs(model, rule=FrozenRule.UNAWARE)
    assert all(need == Needs(True, True) for row in needs.values() for need in row)


@given(model=dag_models())
def test_training_more_never_needs_less(model):
    everything = ModelGraph(
        name=model.name,
        modules=tuple(chain(m.name, [True] * len(m.layers)) for m in model.modules),
        edges=model.edges,
    )
    more, less = gradient_needs(everything), gradient_needs(model)
    for name, row in less.items():
        for ours, all_on in zip(row, more[name], strict=True):
            assert all_on.input_grad >= ours.input_grad
            assert all_on.weight_grad >= ours.weight_grad


def backward_over_forward(rule: FrozenRule, *flags: list[bool]) -> list[list[int]]:
    """A chain of modules with every gradient kind as long as the forward: backward / forward."""
    modules = [chain(f"m{index}", list(row)) for index, row in enumerate(flags)]
    needs = gradient_needs(connect("chain", modules), rule=rule)
    return [[need.input_grad + need.weight_grad for need in needs[module.name]] for module in modules]


@pytest.mark.parametrize(
    ("flags", "exact", "paper"),
    [
        pytest.param([[False] * 3], [[0, 0, 0]], [[0, 0, 0]], id="all-frozen"),
        pytest.param([[True] * 3], [[1, 2, 2]], [[2, 2, 2]], id="all-trained"),
        pytest.param([[True, False, False]], [[1, 1, 1]], [[2, 1, 1]], id="first-trained"),
        pytest.param([[False, False, True]], [[0, 0, 1]], [[0, 0, 2]], id="last-trained"),
        pytest.param(
            [[False, False, True], [False, False]],
            [[0, 0, 1], [1, 1]],
            [[0, 0, 2], [1, 1]],
            id="only-the-projector-in-front-of-a-frozen-llm",
        ),
        pytest.param(
            [[False, False], [True, True]],
            [[0, 0], [1, 2]],
            [[0, 0], [2, 2]],
            id="frozen-encoder-trained-llm",
        ),
    ],
)
def test_backward_is_0_1_or_2_times_the_forward(flags, exact, paper):
    assert backward_over_forward(FrozenRule.EXACT, *flags) == exact
    assert backward_over_forward(FrozenRule.CORNSTARCH, *flags) == paper


def test_a_missing_modality_spares_its_consumers():
    vision, audio, llm = chain("v", [False, True]), chain("a", [False]), chain("l", [False, False])
    model = connect("valm", [vision, llm], [audio, llm])
    both = gradient_needs(model)["l"]
    text_only = gradient_needs(model, present={"l"})["l"]
    audio_only = gradient_needs(model, present={"a", "l"})["l"]
    assert [need.any for need in both] == [True, True]
    assert [need.any for need in text_only] == [need.any for need in audio_only] == [False, False]


def test_deep_injection_starts_gradients_where_it_enters():
    vision, llm = chain("v", [True]), chain("l", [False] * 4)
    edge = Edge(source="v", target="l", after_layer=0, before_layer=2)
    needs = gradient_needs(ModelGraph(name="deep", modules=(vision, llm), edges=(edge,)))["l"]
    assert [need.input_grad for need in needs] == [False, False, True, True]


def autograd_needs(model: ModelGraph) -> dict[str, tuple[Needs, ...]]:
    """Run the DAG in torch, one loss per module, and see which gradients backward computes.

    A hook on a layer's input fires when its gradient was computed; a weight has a gradient or not.
    """
    ran: set[Place] = set()
    weights: dict[Place, torch.Tensor] = {}
    outputs: dict[Place, torch.Tensor] = {}
    order = sorted(model.modules, key=lambda module: module.name)  # m0, m1, ...: edges go upwards
    for module in order:
        for index, layer in enumerate(module.layers):
            position = (module.name, index)
            linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            linear.weight.requires_grad_(layer.trainable)
            everything = frozenset(m.name for m in model.modules)
            sources = [outputs[source] for source in inputs_of(model, position, everything)]
            x = torch.ones(2, WIDTH)
            for source in sources:
                x = x + source
            if x.requires_grad:
                x.register_hook(lambda _, position=position: ran.add(position))
            weights[position], outputs[position] = linear.weight, linear(x)
    loss = sum(outputs[module.name, len(module.layers) - 1].sum() for module in model.modules)
    if loss.requires_grad:
        loss.backward()
    return {
        module.name: tuple(
            Needs((module.name, index) in ran, weights[module.name, index].grad is not None)
            for index in range(len(module.layers))
        )
        for module in model.modules
    }


@given(model=dag_models())
@examples(60)
def test_exact_rule_is_what_autograd_does(model):
    torch.set_num_threads(1)
    assert gradient_needs(model) == autograd_needs(model)


def test_every_flag_combination_of_a_join_is_what_autograd_does():
    for flags in itertools.product([False, True], repeat=5):
        left, right = chain("m0", list(flags[:1])), chain("m1", list(flags[1:3]))
        sink = chain("m2", list(flags[3:]))
        model = connect("join", [left, sink], [right, sink])
        assert gradient_needs(model) == autograd_needs(model)


def of_two_products(module: Module) -> Module:
    """A module whose layers are a product, an activation and a product: as a projector is."""
    layers = []
    for layer in module.layers:
        (first,) = layer.operators
        between = Pointwise(name="gelu", width=plans.WIDTH, num_passes=2)
        layers.append(replace(layer, operators=(first, between, replace(first, name="second"))))
    return replace(module, layers=tuple(layers))


@pytest.mark.parametrize("flags", [*itertools.product([False, True], repeat=3)])
def test_useful_flop_are_those_that_autograd_runs(flags):
    """PyTorch counts products of the forward and of the gradients that it computes."""
    module = of_two_products(plans.chain_module("llm", "text", flags))
    batch = [plans.sample(0, images=0, sounds=0)]
    plan = plans.disjoint_plan(ModelGraph(name="text", modules=(module,)), batch)
    layers = []
    for flag in flags:
        width = plans.WIDTH
        both = [torch.nn.Linear(width, width, bias=False).requires_grad_(flag) for _ in range(2)]
        layers += [both[0], torch.nn.GELU(), both[1]]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        loss = torch.nn.Sequential(*layers)(torch.ones(batch[0].num_tokens, width)).sum()
        if any(flags):
            loss.backward()
    assert model_flop(plan) == counter.get_total_flops()
