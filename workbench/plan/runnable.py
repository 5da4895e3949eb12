"""What the runtime cannot run of a sound plan; `workbench check` reports it, and a run refuses it."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from workbench.cost.products import ProductFormat
from workbench.data.sample import Sample
from workbench.masks.patterns import CAUSAL, document_lengths
from workbench.model.config_fields import Config, number
from workbench.model.families.family import LanguageModel
from workbench.model.item_tokens import family_of, source_config
from workbench.model.layer import Attention, Operator, Recurrence, TokenCount
from workbench.model.lora import ADAPTED_BY_NAME
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.model.projector import Projector, from_text, shown
from workbench.model.short_conv import has_short_conv
from workbench.model.trained import adapted_products
from workbench.plan.boundaries import Boundaries
from workbench.plan.kernel_heads import CPU, check_kernel_heads
from workbench.plan.kernels import Kernels
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.plan.runnable_choices import check_choices
from workbench.plan.runnable_degrees import check_degrees
from workbench.plan.runnable_items import check_segment
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass

EXECUTED_SHARDINGS = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS)
ROTARY = "rotary"  # operator that turns queries and keys by their positions


def check_runnable(plan: Plan) -> None:
    """Raise ValueError where a plan can be simulated but not run.

    Complexity: O(modules + stages + segments of the batch).
    """
    for module in plan.model.modules:
        check_family(module)
        check_adapters(module, plan.settings.of(module.name))
        check_settings(module.name, plan.settings.of(module.name))
        check_sharding(module.name, plan.settings.of(module.name))
        _check_items(plan, module)
    for edge in plan.model.edges:
        check_edge(plan, edge)
    for stage in plan.stages:
        check_degrees(plan.model.module(stage.module), tp=stage.tp, cp=stage.cp)
        check_shared_tokens(plan, stage)
        _check_masks(plan, stage)
        check_choices(plan, stage)
        _check_kernels(plan, stage)
    check_targets(plan)


def check_runnable_here(plan: Plan) -> None:
    """Raise ValueError where the plan can be simulated but not run on its own cluster's devices."""
    check_runnable(plan)
    for device in dict.fromkeys(node.device for node in plan.cluster.nodes):
        check_boundaries(plan, device)
        check_kernel_heads(plan, device)


def refusal_to_run(plan: Plan) -> str:
    """Why `check_runnable_here` refuses a plan; empty where it can run."""
    try:
        check_runnable_here(plan)
    except ValueError as error:
        return str(error)
    return ""


def check_boundaries(plan: Plan, where: str) -> None:
    """Raise ValueError for brokers except on CPUs, where a thread can relay beside a program.

    Args:
        plan: any plan.
        where: kind of devices that are to run it, or that ranks take turns.
    """
    if plan.settings.boundaries is Boundaries.BROKERS and where != CPU:
        raise ValueError(
            f"brokers run on CPUs, each rank in a process, got {where}; want settings.boundaries 'direct'"
        )


def check_family(module: Module) -> None:
    """Raise ValueError where the runtime has no layers for the module's family."""
    if module.source is None:
        raise ValueError(
            f"module {module.name!r} has no source: only modules made from a transformers "
            "configuration can run"
        )
    family = family_of(module)
    if family is not None and family.reason:
        raise ValueError(
            f"module {module.name!r}: {family.model_type} can be simulated, not run: {family.reason}"
        )
    if family is not None:
        _with_module_name(module, family.check_config, source_config(module))
    projector = module.source.projector
    is_read = module.layers[-1].emits is TokenCount.IN  # by cross-attention
    if projector is not None and is_read and not isinstance(from_text(projector), Projector):
        raise ValueError(
            f"module {module.name!r}: {module.source.architecture} runs with a linear or mlp projector, got "
            f"{shown(from_text(projector))}"
        )
    _check_heads(module)


def check_adapters(module: Module, settings: ModuleSettings) -> None:
    """Raise ValueError where the runtime cannot train the module's adapters."""
    products = adapted_products(module.layers)
    for name in sorted(products.keys() - ADAPTED_BY_NAME.keys()):
        raise ValueError(
            f"module {module.name!r}: lora of {name!r} can be simulated, not run; products that can: "
            f"{', '.join(ADAPTED_BY_NAME)}"
        )
    if products and settings.collective_pieces > 1:
        raise ValueError(
            f"module {module.name!r}: products with lora are summed whole, got collective_pieces "
            f"{settings.collective_pieces}; nearest: 1"
        )


def _with_module_name(module: Module, check: Callable[[Config], None], config: Config) -> None:
    try:
        check(config)
    except ValueError as error:
        raise ValueError(f"module {module.name!r}: {error}") from None


def _check_heads(module: Module) -> None:
    """Raise ValueError for heads that transformers refuses."""
    config, family = source_config(module), family_of(module)
    for layer in module.layers:
        operators = {operator.name: operator for operator in layer.operators}
        for attention in (op for op in layer.operators if isinstance(op, Attention)):
            width = int(attention.head_dim * number(config, "partial_rotary_factor", 1.0))
            if ROTARY in operators and width % 2:
                raise ValueError(
                    f"module {module.name!r}: rotary positions turn pairs of channels, got {width} of a head"
                )
            wants_multiple = isinstance(family, LanguageModel) and family.width_holds_heads
            if wants_multiple and layer.out_width % attention.num_heads:
                raise ValueError(
                    f"module {module.name!r}: hidden width {layer.out_width} must divide by "
                    f"{attention.num_heads} heads to run"
                )


def check_settings(module: str, settings: ModuleSettings) -> None:
    """Raise ValueError where parts of layers are recomputed, or products have a narrow format."""
    if settings.computed_again:
        raise ValueError(
            f"module {module!r}: the runtime computes whole layers again or nothing, got "
            f"{', '.join(settings.computed_again)}; nearest: recompute 'blocks'"
        )
    if settings.products is not ProductFormat.SAME:
        raise ValueError(
            f"module {module!r}: products {settings.products.value!r} can be simulated, not run; nearest: "
            f"products {ProductFormat.SAME.value!r}"
        )


def check_sharding(module: str, settings: ModuleSettings) -> None:
    """Raise ValueError for a level of sharding that is only simulated."""
    if settings.sharding not in EXECUTED_SHARDINGS:
        raise ValueError(
            f"module {module!r}: sharding {settings.sharding.value!r} cannot be executed; want one of "
            f"{', '.join(level.value for level in EXECUTED_SHARDINGS)} (simulate this plan instead)"
        )


def check_targets(plan: Plan) -> int:
    """Return the predicted tokens of the global batch; ValueError if there are none."""
    count = sum(count_targets(sample) for sample in plan.batch)
    if count < 1:
        raise ValueError("the batch has no text token to predict")
    return count


def count_targets(sample: Sample) -> int:
    """Count a sample's next-token targets: its text tokens, except where a document of its mask begins."""
    text = sum(segment.tokens_out for segment in sample.of(TEXT))
    ends = list(accumulate(segment.tokens_out for segment in sample.segments))
    firsts = accumulate(document_lengths(sample)[:-1], initial=0)
    return text - sum(sample.segments[bisect_right(ends, first)].modality == TEXT for first in firsts)


def check_edge(plan: Plan, edge: Edge) -> None:
    """Raise ValueError unless it is from an encoder into the LLM, or from the LLM into a generator."""
    source, target = plan.model.module(edge.source), plan.model.module(edge.target)
    is_generator = source.modality == TEXT and target.has_loss and target.modality != TEXT
    if not is_generator and (target.modality != TEXT or source.modality == TEXT):
        raise ValueError(
            f"edge {edge.name}: only edges from an encoder into the LLM, or from the LLM into a generator, "
            "can run"
        )
    if edge.after_layer != source.leaves_after:
        raise ValueError(
            f"edge {edge.name}: only the last layer's output can leave a module, want after_layer "
            f"{source.leaves_after}, got {edge.after_layer}"
        )
    emitted = source.layers[edge.after_layer].feature_width
    wanted = target.entering_width(edge.before_layer)
    if emitted != wanted:
        raise ValueError(
            f"edge {edge.name}: {edge.source} emits width {emitted}, {edge.target} wants {wanted}"
        )
    if is_generator and edge.before_layer != 0:
        raise ValueError(f"edge {edge.name}: a generator is entered at layer 0, got {edge.before_layer}")
    rivals = [e.name for e in plan.model.edges_into(edge.target) if e.before_layer == edge.before_layer]
    same = [e for e in rivals if plan.model.module(e.split(">")[0]).modality == source.modality]
    if edge.before_layer == 0 and len(same) > 1:
        raise ValueError(f"edges {', '.join(same)} would fill the same places; keep one per modality")


def check_shared_tokens(plan: Plan, stage: Stage) -> None:
    """Raise ValueError where context-parallel ranks of a stage cannot share its tokens."""
    if stage.cp == 1:
        return
    first, last = stage.layers
    inner = [e.name for e in plan.model.edges_out_of(stage.module) if first <= e.after_layer < last - 1]
    if inner:
        raise ValueError(
            f"stage {stage.id}: edge {inner[0]} leaves in its midst, which ranks that share tokens "
            f"cannot run; want cp 1, got {stage.cp}"
        )


def _check_masks(plan: Plan, stage: Stage) -> None:
    """Refuse masks other than causal ones where attention caps scores or is linear."""
    module = plan.model.module(stage.module)
    operators = (o for layer in module.layers[slice(*stage.layers)] for o in layer.operators)
    masks = sorted({sample.mask for sample in plan.batch} - {CAUSAL})
    reason = next(filter(None, map(_only_causal, operators)), "") if masks else ""
    if reason:
        raise ValueError(f"module {module.name!r}: {reason}; want {CAUSAL}, got {masks[0]}")


def _only_causal(operator: Operator) -> str:
    """Return why an operator runs on whole causal items alone; empty where it does not."""
    if isinstance(operator, Recurrence):
        return f"{operator.title} runs over whole samples from their first token, under no mask"
    if has_short_conv([operator]):
        return "a short convolution runs over whole samples, under no mask"
    if isinstance(operator, Attention) and operator.is_capped:
        return "attention under a mask has no soft cap"
    if isinstance(operator, Attention) and operator.top_k is not None:
        return "an indexer chooses among all earlier keys of a sample, under no mask"
    return ""


def _check_kernels(plan: Plan, stage: Stage) -> None:
    """Refuse Megatron's kernels over tp ranks: their stages pass parts of the tokens, a run all tokens."""
    if stage.tp > 1 and plan.settings.kernels.cuts_sequence:
        raise ValueError(
            f"module {stage.module!r}: kernels {plan.settings.kernels.value!r} are priced, and not run over "
            f"tp {stage.tp}; nearest: kernels {Kernels.FUSED.value!r} and sequence_parallel of the module"
        )


def _check_items(plan: Plan, module: Module) -> None:
    """Check every item's number of tokens, and that samples fit in the module's positions."""
    family = family_of(module)
    if isinstance(family, LanguageModel) and family.longest_item is not None:
        longest = family.longest_item(source_config(module))
        for sample in plan.batch:
            if sample.num_tokens > longest:
                raise ValueError(
                    f"module {module.name!r} takes up to {longest} tokens, sample {sample.id} has "
                    f"{sample.num_tokens}"
                )
    for sample in plan.batch:
        for segment in sample.of(module.modality):
            try:
                check_segment(module, segment)
            except ValueError as error:
                where = f"module {module.name!r}, sample {sample.id}, {segment.modality}[{segment.k}]"
                raise ValueError(f"{where}: {error}") from None


def check_whole_backwards(plan: Plan, stage: Stage) -> None:
    """Raise ValueError for a split backward where products run in pieces beside their reductions."""
    split = next((a for a in plan.program_actions if a.stage == stage.id and a.kind is Pass.I), None)
    if split is not None:
        raise ValueError(
            f"stage {stage.id}: a split backward ({split}) takes apart products that run in "
            f"{plan.settings.of(stage.module).collective_pieces} pieces; want collective_pieces 1 or a "
            "schedule with whole ones"
        )
