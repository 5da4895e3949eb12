"""Products in narrow formats, as other systems name them, and where these cannot compute them.

Source: megatron-core 0.19.2 (Apache-2.0): TransformerConfig; TransformerEngine 2.9.0 (Apache-2.0):
pytorch/utils.py, `assert_dim_for_fp8_exec`, and `is_quantizable` of its quantizers; torchtitan 0.3.0
(BSD-3-Clause): components/quantization.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.cost.products import ProductFormat, is_narrowed
from workbench.export.adapters import has_adapters
from workbench.export.approximation import Change, in_settings, longest_tokens, padded
from workbench.export.expressible import narrow_products
from workbench.export.module_layouts import placed_llm
from workbench.model.block_modules import BlockModule
from workbench.model.layer import Layer, Matmul, Shard
from workbench.plan.plan import ModuleSettings, Plan
from workbench.planner.plan_layouts import microbatch_samples

MEGATRON: dict[ProductFormat, dict[str, Any]] = {
    ProductFormat.FP8: {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    ProductFormat.FP8_DELAYED: {"fp8": "hybrid", "fp8_recipe": "delayed"},
    ProductFormat.FP8_BLOCK: {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    ProductFormat.MXFP8: {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    ProductFormat.NVFP4: {"fp4": "e2m1"},
}
"""Fields of megatron-core's `TransformerConfig`."""

TORCHTITAN = (ProductFormat.FP8_ROW, ProductFormat.MXFP8)
MULTIPLES = dict.fromkeys(ProductFormat, 16) | {ProductFormat.MXFP8: 32}  # of tokens and widths of a product
NOT_DELAYED = (BlockModule.NORM, BlockModule.MOE_ACT)  # Megatron recomputes them without their last scales


def megatron_words(settings: ModuleSettings) -> dict[str, Any]:
    """Fields of `TransformerConfig` for a module's products; none where they have the precision."""
    return MEGATRON.get(settings.products, {})


def multiplied_as(
    plan: Plan, known: Sequence[ProductFormat] | Mapping[ProductFormat, Any]
) -> Sequence[Change]:
    """Scale FP8 products as a system does, whose first known format is another one of FP8."""
    used = [each for each in plan.settings.narrow_products if each not in known]
    if not used:
        return ()
    instead = next(iter(known))

    def changed(settings: ModuleSettings) -> ModuleSettings:
        return replace(settings, products=instead) if settings.products in used else settings

    return in_settings(f"products in {', '.join(used)}", f"in {instead}", changed)


def even_tokens(plan: Plan) -> Sequence[Change]:
    """Pad samples until a microbatch on a rank has a multiple of the tokens that its products want."""
    llm = plan.model.llm
    products, cp = plan.settings.of(llm.name).products, placed_llm(plan).layout.cp
    tokens, multiple = longest_tokens(plan), MULTIPLES[products]
    if products is ProductFormat.SAME or tokens * microbatch_samples(plan) % (multiple * cp) == 0:
        return ()
    return (
        Change(
            has=f"samples of {tokens} tokens, where {products} wants a multiple of {multiple}",
            gets=f"padded to {-(-tokens // (multiple * cp)) * multiple * cp} tokens",
            make=lambda job: padded(job, multiple * cp),
        ),
    )


def inexpressible_in_megatron(plan: Plan) -> str | None:
    """Products that Megatron cannot compute: an encoder's, those beside adapters, or of uneven sizes."""
    llm = plan.model.llm
    for module in plan.model.modules:
        products = plan.settings.of(module.name).products
        if products is not ProductFormat.SAME and module is not llm:
            return f"products {products.value!r} of {module.name!r}, an encoder"
    own = plan.settings.of(llm.name)
    if own.products is not ProductFormat.SAME and has_adapters(plan):
        return f"lora adapters beside products {own.products.value!r} of {llm.name!r}"
    parts = [part.value for part in own.computed_again if part in NOT_DELAYED]
    if parts and own.products is ProductFormat.FP8_DELAYED:
        return f"{parts[0]} recomputed beside products {own.products.value!r} of {llm.name!r}"
    return uneven_products(plan)


def inexpressible_in_torchtitan(plan: Plan) -> str | None:
    """Products of four bits, or of uneven sizes."""
    if ProductFormat.NVFP4 in plan.settings.narrow_products:
        return narrow_products(plan)
    return uneven_products(plan)


def uneven_products(plan: Plan) -> str | None:
    """Products of the language model whose widths on a rank are no multiple of their format's."""
    llm = plan.model.llm
    products = plan.settings.of(llm.name).products
    if products is ProductFormat.SAME:
        return None
    tp, multiple = placed_llm(plan).layout.tp, MULTIPLES[products]
    widths = (width for layer in llm.layers for width in _widths(layer, tp))
    uneven = next((width for width in widths if width % multiple), None)
    if uneven is None:
        return None
    return f"products {products.value!r} of {llm.name!r} of width {uneven}, no multiple of {multiple}"


def _widths(layer: Layer, tp: int) -> Iterator[int]:
    """Widths of the inputs and results of narrow products on a rank."""
    for product in layer.operators:
        if isinstance(product, Matmul) and is_narrowed(layer, product):
            yield product.in_features // (tp if product.shard is Shard.ROW else 1)
            yield product.out_features // (tp if product.shard is Shard.COLUMN else 1)
