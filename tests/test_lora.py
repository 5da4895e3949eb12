"""Low-rank adapters of a job's module: counts, FLOP, time and memory, against closed forms and autograd."""

from dataclasses import replace
from itertools import compress
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from tests import paper_models, plans
from tests.cost_models import GPT, LLAMA_8B, block, causal, compute_only
from tests.examples import examples
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.least_time import LeastTimes
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, layer_flop
from workbench.cost.signature import signature
from workbench.memory.layer import layer_bytes, layer_split_bytes
from workbench.memory.setting import Setting
from workbench.model.experts import Experts, with_experts
from workbench.model.frozen import Needs, gradient_flow
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Layer, LayerKind, Matmul, Shard
from workbench.model.lora import APART, Adapted, Lora, is_adapted
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.model.trainable import Trainable, with_adapters, with_trainable
from workbench.model.trained import frozen_parameters, num_trained, trained_parameters
from workbench.model.transformer import Mlp
from workbench.model.zoo import from_shape
from workbench.plan.flop import model_flop
from workbench.plan.kernels import Kernels

THROUGH, TRAINED, BEHIND = Needs(True, False), Needs(True, True), Needs(False, True)
R16 = Lora(rank=16, alpha=32)


def frozen(*layers: Layer) -> Module:
    return with_trainable(Module(name="llm", modality=TEXT, layers=layers), Trainable.NONE)


def adapted(layer: Layer, rank: int = 16, modules: Adapted = Adapted.ALL) -> Layer:
    """The frozen layer with adapters; without any for rank 0."""
    module = frozen(layer)
    return (with_adapters(module, Lora(rank=rank, alpha=32), modules) if rank else module).layers[0]


@pytest.mark.parametrize(
    ("modules", "products"),
    [
        (Adapted.QKV, 3 * 2 * 4096),
        (Adapted.ATTENTION, 4 * 2 * 4096),
        (Adapted.MLP, 3 * (4096 + 11008)),
        (Adapted.ALL, 4 * 2 * 4096 + 3 * (4096 + 11008)),
    ],
)
def test_an_adapter_trains_rank_times_the_sum_of_both_widths(modules: Adapted, products: int) -> None:
    """PEFT, `LoraLayer`: A is [r, in], B [out, r]. Llama 2 7B with r = 16 on all: 39,976,960."""
    llm = with_trainable(from_shape("llama-2-7b", module="llm"), Trainable.NONE)
    module = with_adapters(llm, R16, modules)
    assert module.num_trained == 32 * 16 * products
    assert module.num_parameters == llm.num_parameters + module.num_trained
    first = module.layers[1]
    assert {*trained_parameters(first), *frozen_parameters(first)} == {*first.parameters()}
    assert frozen_parameters(first) == llm.layers[1].parameters()


@pytest.mark.parametrize("config", paper_models.DECODERS.values(), ids=paper_models.DECODERS)
def test_every_product_of_a_block_is_of_its_attention_or_of_its_mlp(config: dict[str, Any]) -> None:
    module = module_from_config(config, name="llm", modality=TEXT)
    for operators in {layer.operators for layer in module.layers if layer.kind is LayerKind.BLOCK}:
        for name in (each.name for each in operators if isinstance(each, Matmul)):
            in_parts = is_adapted(name, Adapted.ATTENTION) + is_adapted(name, Adapted.MLP)
            assert in_parts == (0 if name.startswith(APART) else 1), name


def test_modulations_and_convolutions_are_of_no_attention() -> None:
    """Both streams of Stable Diffusion 3, and every attention of a UNet."""
    for name, ends in (("sd3-medium", ("qkv_proj", "o_proj")), ("sd-2.1-unet", (".q", ".k", ".v", ".o"))):
        network = with_trainable(from_shape(name), Trainable.NONE)
        by_modules = {each: adapted_names(with_adapters(network, R16, each)) for each in Adapted}
        is_of_attention = [name.endswith(ends) for name in by_modules[Adapted.ALL]]
        assert by_modules[Adapted.ATTENTION] == [*compress(by_modules[Adapted.ALL], is_of_attention)]
        leaving = [name for name in by_modules[Adapted.ATTENTION] if name not in by_modules[Adapted.QKV]]
        assert {name.rpartition(".")[2] for name in leaving} == {ends[-1].removeprefix(".")}


def adapted_names(module: Module) -> list[str]:
    operators = (each for layer in module.layers for each in layer.operators)
    return [each.name for each in operators if isinstance(each, Matmul) and each.lora is not None]


def test_a_is_cut_with_rows_and_b_with_columns() -> None:
    shards = {p.name: (p.shape, p.shard) for p in trained_parameters(adapted(block()))}
    assert shards["block.0.q_proj.lora_A.weight"] == ((16, 4096), Shard.REPLICATED)
    assert shards["block.0.q_proj.lora_B.weight"] == ((4096, 16), Shard.COLUMN)
    assert shards["block.0.o_proj.lora_A.weight"] == ((16, 4096), Shard.ROW)
    assert shards["block.0.o_proj.lora_B.weight"] == ((4096, 16), Shard.REPLICATED)


def attention_like(width: int, inner: int) -> Layer:
    """Three products of one input and one of their results."""
    into = [
        Matmul(name=name, in_features=width, out_features=inner, shard=Shard.COLUMN)
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    out = Matmul(name="o_proj", in_features=inner, out_features=width, shard=Shard.ROW)
    return Layer(name="block.0", kind=LayerKind.BLOCK, operators=(*into, out), out_width=width)


def run(x: torch.Tensor, weights: list[torch.Tensor], adapters: dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """PyTorch's version of `attention_like`, with adapters beside some of its products."""

    def product(x: torch.Tensor, index: int) -> torch.Tensor:
        y = linear(x, weights[index])
        if index not in adapters:
            return y
        down, up = adapters[index]
        return y + 2.0 * linear(linear(x, down), up)

    return product(product(x, 0) + product(x, 1) + product(x, 2), 3)


@pytest.mark.parametrize("modules", [Adapted.ALL, Adapted.QKV])
@pytest.mark.parametrize("rank", [1, 3])
def test_useful_flop_are_those_that_autograd_runs(modules: Adapted, rank: int) -> None:
    """Of two layers, of which the first reads what needs no gradient: no product makes one of its input."""
    width, inner = plans.WIDTH, 3 * plans.WIDTH
    layers = (attention_like(width, inner), replace(attention_like(width, inner), name="block.1"))
    module = with_adapters(frozen(*layers), Lora(rank=rank, alpha=2 * rank), modules)
    batch = [plans.sample(0, images=0, sounds=0)]
    plan = plans.disjoint_plan(ModelGraph(name="text", modules=(module,)), batch)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        x = torch.ones(batch[0].num_tokens, width)
        for _ in layers:
            weights = [torch.ones(inner, width)] * 3 + [torch.ones(width, inner)]
            adapters = {
                index: (
                    torch.ones(rank, weight.shape[1], requires_grad=True),
                    torch.ones(weight.shape[0], rank, requires_grad=True),
                )
                for index, weight in enumerate(weights)
                if index < 3 or modules is Adapted.ALL
            }
            x = run(x, weights, adapters)
        x.sum().backward()
    assert model_flop(plan) == counter.get_total_flops()


def test_a_layer_with_adapters_counts_as_trained() -> None:
    """Gradients run behind its first one, and carry on; autograd's rule, as for a trained layer."""
    layers = [replace(attention_like(8, 8), name=f"block.{index}") for index in range(3)]
    module = frozen(*layers)
    model = ModelGraph(name="text", modules=(module,))
    assert gradient_flow(model).needs["llm"] == (Needs(False, False),) * 3
    middle = with_adapters(frozen(layers[1]), R16, Adapted.ALL).layers[0]
    around = module.layers[0], middle, module.layers[2]
    mixed = ModelGraph(name="text", modules=(replace(module, layers=around),))
    assert gradient_flow(mixed).needs["llm"] == (Needs(False, False), BEHIND, THROUGH)


def test_times_are_flop_over_peak() -> None:
    """Forward, gradients through, and of weights: those of W never, those of A and B always."""
    cost, work = CostModel(compute_only()), causal(64)
    with_, without = adapted(block()), adapted(block(), rank=0)
    time = cost.layer_time(with_, work, tp=1, cp=1, precision="bfloat16")
    base = cost.layer_time(without, work, tp=1, cp=1, precision="bfloat16")
    more_s = (layer_flop(with_, work) - layer_flop(without, work)) / 1e12
    assert more_s == pytest.approx(2 * 64 * num_trained([with_]) / 1e12)
    assert time.forward_s == pytest.approx(base.forward_s + more_s)
    assert time.through_s(TRAINED) == pytest.approx(base.input_grad_s + more_s)
    assert time.weights_s(TRAINED) == pytest.approx(more_s)


RANKS = st.integers(0, 9).map(lambda power: 2**power // 2)


@given(st.sampled_from(["H100", "A100-80GB"]), RANKS, RANKS, st.integers(6, 13), st.sampled_from([1, 2, 4]))
@examples(60)
def test_more_rank_is_never_faster_and_none_is_a_frozen_layer(
    profile: str, low: int, high: int, power: int, tp: int
) -> None:
    cost = CostModel(load_profile(profile))
    times = [
        cost.layer_time(adapted(block(), rank), causal(2**power), tp=tp, cp=1, precision="bfloat16")
        for rank in sorted((low, high))
    ]
    fewer, more = times
    assert fewer.forward_s <= more.forward_s * (1 + 1e-9)
    least, most = (
        time.backward_s(TRAINED if rank else THROUGH)
        for time, rank in zip(times, sorted((low, high)), strict=True)
    )
    assert least <= most * (1 + 1e-9)
    bare = cost.layer_time(frozen(block()).layers[0], causal(2**power), tp=tp, cp=1, precision="bfloat16")
    if low == 0 or high == 0:
        assert fewer == bare


def test_a_measured_layer_takes_its_measured_time_and_that_of_its_adapters() -> None:
    point = LayerPoint(
        rows=1,
        tokens_in=64,
        attention_area=64 * 65 // 2,
        forward_s=1.0,
        input_grad_s=1.1,
        weight_grad_s=0.9,
        weight_only_s=1.8,
        forward_only_s=0.7,
    )
    table = LayerTable(signature=signature(block()), precision="bfloat16", points=(point,))
    cost = CostModel(replace(compute_only(), layers=(table,)))
    time = cost.layer_time(adapted(block()), causal(64), tp=1, cp=1, precision="bfloat16")
    more_s = 2 * 64 * num_trained([adapted(block())]) / 1e12
    assert time.forward_s == pytest.approx(1.0 + more_s)
    assert time.forward_without_graph_s() == pytest.approx(0.7 + more_s)
    assert time.through_s(TRAINED) == time.split_through_s(TRAINED) == pytest.approx(1.1 + more_s)
    assert time.weights_s(TRAINED) == pytest.approx(more_s)
    assert "adapters: added to the layer's time" in time.unmeasured


@given(st.integers(1, 300), st.sampled_from(Adapted), st.sampled_from(["H100", "V100-32GB"]))
@settings(deadline=None, max_examples=20)
def test_lower_bounds_of_a_search_hold(tokens: int, modules: Adapted, profile: str) -> None:
    cost, work = CostModel(load_profile(profile)), causal(tokens)
    layer = adapted(block(), 8, modules)
    least = LeastTimes(cost, "bfloat16", work, degrees=(1,), cuts_tokens=False)
    for needs in (TRAINED, BEHIND):
        time = cost.layer_time(layer, work, tp=1, cp=1, precision="bfloat16")
        bound = least.of(layer, work, needs)
        assert bound.all_s <= (time.forward_s + time.backward_s(needs)) * (1 + 1e-9)


def setting(tokens: int, tp: int = 1) -> Setting:
    return Setting(causal(tokens), Grid(tp, 1), 2, is_gathered=False)


@given(st.integers(1, 512), st.sampled_from([1, 4]))
@settings(deadline=None)
def test_kept_are_inputs_of_adapted_products_and_what_is_between_a_and_b(tokens: int, tp: int) -> None:
    """Beside a frozen GPT block: qkv and the MLP's products read 2 + 2 + 8 / tp h; o's input is kept."""
    bare = layer_bytes(adapted(block(GPT), 0), THROUGH, setting(tokens, tp), Kernels.FUSED)
    with_ = layer_bytes(adapted(block(GPT)), TRAINED, setting(tokens, tp), Kernels.FUSED)
    inputs = 2 * 1024 * (1 + 1 + 4 / tp)
    assert with_.kept.num_bytes - bare.kept.num_bytes == tokens * (inputs + 2 * 4 * 16)
    qkv = layer_bytes(adapted(block(GPT), 16, Adapted.QKV), TRAINED, setting(tokens, tp), Kernels.FUSED)
    assert qkv.kept.num_bytes - bare.kept.num_bytes == tokens * (2 * 1024 + 2 * 16)


@pytest.mark.parametrize("kernels", list(Kernels))
@pytest.mark.parametrize("shape", [GPT, LLAMA_8B])
def test_adapters_need_more_than_a_frozen_layer_and_less_than_a_trained_one(kernels: Kernels, shape) -> None:
    """Kept tensors, and weights' gradients of a split backward."""
    trained, bare = block(shape), adapted(block(shape), 0)
    tiny = adapted(block(shape), 1)
    kept = [
        layer_bytes(layer, needs, setting(256), kernels).kept.num_bytes
        for layer, needs in ((bare, THROUGH), (tiny, TRAINED), (trained, TRAINED))
    ]
    inner = 256 * 2 * len([op for op in trained.operators if isinstance(op, Matmul)])
    assert kept[0] <= kept[1] <= kept[2] + inner
    split = layer_split_bytes(tiny, TRAINED, setting(256), kernels)
    assert split.gradients == 2 * num_trained([tiny])
    assert layer_bytes(tiny, TRAINED, setting(256), kernels).has_backward


def test_experts_have_no_adapters_but_attention_beside_them_has() -> None:
    mixture = with_experts(
        block(), Experts(num=4, num_chosen=2, mlp=Mlp(width=64, gated=True, activation="silu"))
    )
    for modules in (Adapted.ALL, Adapted.MLP):
        with pytest.raises(ValueError, match="experts have no adapters"):
            adapted(mixture, 16, modules)
    assert num_trained([adapted(mixture, 16, Adapted.QKV)]) > 0


def test_a_trained_layer_has_no_adapters() -> None:
    layer = replace(adapted(block()), trainable=True)
    with pytest.raises(ValueError, match="has adapters, so its own weights are frozen"):
        Module(name="llm", modality=TEXT, layers=(layer,))
