"""Plans whose two ranks divide a layer's weights between them: for computing, or for storage only."""

from dataclasses import replace
from functools import partial

from experiments.fidelity.work import LLM, Cuts, Plans, Work, plan_of, text_only, text_samples
from workbench.cost.hardware import Cluster
from workbench.model.hf_config import module_from_config
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import Plan, Sharding

BOTH = (0, 1)


def experts_work() -> Work:
    """A Mixtral of three blocks of four experts, two a token, on six texts."""
    config = {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 448,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    model = text_only(module_from_config(config, name=LLM, modality="text"))
    return Work(name="experts", model=model, batch=text_samples([128] * 6))


def text_plans(work: Work, cluster: Cluster) -> Plans:
    """Eight layers on both ranks: tensor parallelism, sequence parallelism, sharded weights."""
    cuts: Cuts = {LLM: ((8, BOTH),)}
    both = partial(plan_of, work, cluster, cuts, samples=(1,) * 8)
    yield "tensor parallel", partial(both, divided=as_tensors)
    yield "tensor and sequence parallel", partial(both, divided=as_sequences)
    whole: list[Cuts] = [{LLM: ((8, (rank,)),)} for rank in BOTH]
    each = partial(plan_of, work, cluster, whole, divided=as_shared_weights)
    for count in (8, 4, 2):
        yield f"weights shared out, {count} microbatches", partial(each, samples=(8 // count,) * count)


def image_plans(work: Work, cluster: Cluster) -> Plans:
    """Encoder and language model on each rank, weights of both sharded; ranks have unequal images."""
    whole: list[Cuts] = [{"vision": ((6, (rank,)),), LLM: ((6, (rank,)),)} for rank in BOTH]
    make = partial(plan_of, work, cluster, whole, samples=(1,) * 6, divided=as_shared_weights)
    yield "weights shared out", make


def expert_plans(work: Work, cluster: Cluster) -> Plans:
    """Every expert cut in two, or two experts on each rank."""
    cuts: Cuts = {LLM: ((5, BOTH),)}
    both = partial(plan_of, work, cluster, cuts, samples=(1,) * 6)
    yield "experts cut", partial(both, divided=as_tensors)
    yield "experts dealt out", partial(both, divided=as_experts)


def as_tensors(draft: Plan) -> Plan:
    """Make all ranks of a stage tensor-parallel."""
    stages = tuple(replace(stage, ranks=(stage.flat_ranks,)) for stage in draft.stages)
    return replace(draft, stages=stages)


def as_sequences(draft: Plan) -> Plan:
    """Make all ranks of a stage tensor-parallel with sequence parallelism."""
    modules = tuple(replace(module, sequence_parallel=True) for module in draft.settings.modules)
    return replace(as_tensors(draft), settings=replace(draft.settings, modules=modules))


def as_experts(draft: Plan) -> Plan:
    """Make all ranks of a stage tensor-parallel, except for experts, which are distributed."""
    tensors = as_tensors(draft)
    return replace(tensors, stages=tuple(replace(stage, ep=len(BOTH)) for stage in tensors.stages))


def as_shared_weights(draft: Plan) -> Plan:
    """Shard every layer's weights over the replicas."""
    modules = tuple(replace(module, sharding=Sharding.PARAMETERS) for module in draft.settings.modules)
    return in_units(replace(draft, settings=replace(draft.settings, modules=modules)))
