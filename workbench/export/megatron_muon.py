"""Muon in Megatron-LM: what of a plan's it expresses, and its flags.

Source: megatron-core, core/optimizer/emerging_optimizers.py and layer_wise_optimizer.py (Apache-2.0); names
of coefficients are those of NVIDIA's Emerging-Optimizers.
"""

from collections.abc import Sequence

from workbench.export.approximation import Change
from workbench.export.decoder import decoder_of
from workbench.export.trained import Trained
from workbench.model.layer import Layer
from workbench.model.muon import MOMENTUM, NEWTON_SCHULZ_STEPS, RMS
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import ModuleSettings, Plan, Sharding

COEFFICIENTS = "simple"  # the name of `workbench.model.muon.COEFFICIENTS`
GATE, QKV = "mlp.gate", "qkv_proj"  # of products of a plan's blocks


def inexpressible_muon(plan: Plan) -> str | None:
    """How a plan shards Muon's state that Megatron-LM cannot; None: it can, or the optimizer is AdamW."""
    rule = plan.settings.optimizer
    if rule is Optimizer.ADAMW:
        return None
    llm = plan.model.llm
    settings, what = plan.settings.of(llm.name), f"optimizer {rule.value!r}"
    if settings.sharding not in (Sharding.NONE, Sharding.OPTIMIZER):
        return f"{what} with sharding {settings.sharding.value!r}"
    if settings.instances > 1:
        return f"{what} with {settings.instances} instances of sharded state"
    return None


def lacks_for_muon(trained: Trained) -> str | None:
    """What of a model Megatron-LM cannot train with Muon; None: nothing, or the optimizer is AdamW."""
    rule, model = trained.settings.optimizer, trained.model
    if rule is Optimizer.ADAMW:
        return None
    if len(model.modules) > 1:
        return f"optimizer {rule.value!r} beside other modules"
    if not decoder_of(model.llm).is_rotary:
        return f"optimizer {rule.value!r} beside learned positions, which are a matrix to it"
    return None


def muon_arguments(plan: Plan, settings: ModuleSettings) -> dict[str, str | None]:
    """Flags of the optimizer, in place of those of sharding; none of AdamW, the default."""
    if plan.settings.optimizer is Optimizer.ADAMW:
        return {}
    flags: dict[str, str | None] = {
        "--optimizer": "dist_muon" if settings.sharding is Sharding.OPTIMIZER else "muon",
        "--muon-momentum": str(MOMENTUM),
        "--muon-nesterov": None,
        "--muon-scale-mode": "spectral",
        "--muon-extra-scale-factor": str(RMS),
        "--muon-coefficient-type": COEFFICIENTS,
        "--muon-num-ns-steps": str(NEWTON_SCHULZ_STEPS),
        "--muon-tp-mode": "duplicated",
    }
    return flags | ({"--muon-no-split-qkv": None} if _has_product(plan, QKV) else {})


def muon_changes(plan: Plan) -> Sequence[Change]:
    """What Megatron's Muon does differently; none of it is in the prediction."""
    if plan.settings.optimizer is Optimizer.ADAMW:
        return ()
    changes = []
    if _has_product(plan, GATE):
        gets = "one matrix of both, orthogonalised together"
        changes.append(Change(has="gate and up of an MLP orthogonalised each by itself", gets=gets))
    if plan.settings.of(plan.model.llm.name).sharding is Sharding.OPTIMIZER:
        has = "parts of every momentum on a rank, sent to a matrix's owner for the update"
        changes.append(Change(has=has, gets="whole momenta of some matrices on a rank"))
    return changes


def _has_product(plan: Plan, name: str) -> bool:
    """Whether the language model's blocks have a product of that name."""

    def names(layer: Layer) -> set[str]:
        return {operator.name for operator in layer.operators}

    return any(name in names(layer) for layer in plan.model.llm.layers)
