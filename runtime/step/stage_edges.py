"""Which edges between modules can run: from an encoder into the LLM, from the LLM into a generator."""

from workbench.model.model_graph import TEXT, Edge
from workbench.plan.plan import Plan, Stage


def edges_into_stage(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Those that enter a layer of the stage; ValueError for one that cannot run."""
    edges = tuple(edge for edge in plan.model.edges_into(stage.module) if edge.entered_in(stage.layers))
    for edge in edges:
        _check(plan, edge)
    return edges


def edges_before_the_end(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Those that leave the stage before its last layer; ValueError where its tokens are shared."""
    first, last = stage.layers
    edges = tuple(e for e in plan.model.edges_out_of(stage.module) if first <= e.after_layer < last - 1)
    if edges and stage.cp > 1:
        raise ValueError(
            f"stage {stage.id}: edge {edges[0].name} leaves in its midst, which ranks that share tokens "
            f"cannot run; want cp 1, got {stage.cp}"
        )
    return edges


def _check(plan: Plan, edge: Edge) -> None:
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
    emitted, wanted = source.layers[edge.after_layer].out_width, target.entering_width(edge.before_layer)
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
