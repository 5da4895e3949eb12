"""Adapters as Megatron-Bridge's CanonicalLoRA has them: one beside each product, as in PEFT.

Its LoRA has one adapter for q, k and v together and one for gate and up, which is another model.

Source: Megatron-Bridge 0.6.2 (Apache-2.0): peft/canonical_lora.py, peft/utils.py, training/setup.py.
"""

from collections.abc import Sequence
from typing import Any

from workbench.export.approximation import Change, longest_tokens
from workbench.export.module_layouts import placed_llm, placed_modules
from workbench.export.trained import Trained
from workbench.model.lora import Lora
from workbench.model.model_graph import Module
from workbench.model.trained import adapted_products
from workbench.plan.plan import Plan
from workbench.planner.plan_layouts import microbatch_samples

TARGETS = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "mlp.gate": "linear_fc1_gate",
    "mlp.up": "linear_fc1_up",
    "mlp.down": "linear_fc2",
}
QKV = {"q_proj", "k_proj", "v_proj"}
_FUSED = (QKV, {"mlp.gate", "mlp.up"})  # in Megatron one product, of which all parts have adapters


def has_adapters(trained: Trained) -> bool:
    """Whether any module has adapters."""
    return any(layer.has_adapters for module in trained.model.modules for layer in module.layers)


def inexpressible_adapters(trained: Trained) -> str | None:
    """Adapters that Megatron-Bridge's program of a language model alone cannot have; None: there are none."""
    module = _adapted(trained)
    if module is None:
        return None
    if len(trained.model.modules) > 1:
        return f"lora adapters of {module.name!r} beside other modules"
    return _inexpressible_products(module)


def _adapted(trained: Trained) -> Module | None:
    return next((module for module in trained.model.modules if adapted_products(module.layers)), None)


def _inexpressible_products(module: Module) -> str | None:
    if any(layer.trainable for layer in module.layers):
        return f"trained layers of {module.name!r} beside lora adapters"
    by_block = [adapted_products([layer]) for layer in module.layers if layer.has_adapters]
    products = by_block[0]
    if any(other != products for other in by_block) or len(set(products.values())) > 1:
        return f"different lora adapters in blocks of {module.name!r}"
    for name in products:
        parts = next((parts for parts in _FUSED if name in parts), {name})
        if name not in TARGETS or not parts <= products.keys():
            return f"lora adapters of {name!r} of {module.name!r}"
    return None


def inexpressible_cut(plan: Plan) -> str | None:
    """What of a language model's adapters tensor-parallel ranks cannot divide."""
    module = _adapted(plan)
    if module is None:
        return None
    layout, products = placed_modules(plan)[module.name].layout, adapted_products(module.layers)
    rank, tp = _lora(module).rank, layout.tp
    tokens = microbatch_samples(plan) * longest_tokens(plan) // layout.cp
    if rank % tp:
        return f"lora rank {rank} of {module.name!r}, which tp {tp} does not divide"
    if tokens % tp and not QKV.isdisjoint(products):
        return (
            f"lora adapters of 'q_proj' of {module.name!r} for {tokens} tokens, which tp {tp} does not divide"
        )
    return None


def _lora(module: Module) -> Lora:
    return next(iter(adapted_products(module.layers).values()))


def adapters_cut(plan: Plan) -> Sequence[Change]:
    """Both halves of an adapter are cut over tensor-parallel ranks."""
    if not has_adapters(plan) or placed_llm(plan).layout.tp == 1:
        return ()
    return (
        Change(
            has="one half of each adapter whole on every tensor-parallel rank",
            gets="both cut, and the result of A gathered or summed; A of output and down drawn within "
            "sqrt(tp / in), not 1 / sqrt(in)",
        ),
    )


def adapter_words(plan: Plan) -> dict[str, Any]:
    """Fields of `CanonicalLoRA`; A is drawn as PEFT draws it."""
    module = plan.model.llm
    lora = _lora(module)
    return {
        "target_modules": [TARGETS[name] for name in adapted_products(module.layers)],
        "dim": lora.rank,
        "alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "dropout": 0.0,
        "lora_A_init_method": "kaiming",
    }
