"""Memory of real runs: what is counted, that it never exceeds the prediction, how it is compared."""

import gc
import json
import threading
from dataclasses import replace

import pytest
import torch

from experiments.fidelity.memory import TINY_MIXES, measure, summarise, tiny_job, variants
from runtime.step.activations import Allocations
from runtime.world.pool import Pool
from tests.split_programs import split, weights_anywhere, weights_last
from tests.test_compare import SIMULATED, executed
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.data.corpus import sample_of
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.families.family import EXAMPLE_VIT
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.lora import Adapted, Lora
from workbench.model.model_graph import Module, connect
from workbench.model.trainable import Trainable, with_adapters, with_trainable
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.report.compare import Group, compare
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch, encoders_replicated

MIB = 2**18  # float32 elements


def test_a_storage_counts_once_from_its_maker_to_its_last_tensor():
    weight = torch.nn.Parameter(torch.ones(10))
    with Allocations([weight, weight]) as memory:
        assert memory.num_bytes == 40
        made = torch.empty(MIB)
        view, alias = made.view(2, -1), made.detach()
        assert memory.num_bytes == 40 + 2**20
        _ = weight.view(2, 5)  # nothing new
        made.mul_(2.0)
        assert memory.num_bytes == 40 + 2**20
        del made, alias
        assert memory.num_bytes == 40 + 2**20
        del view
        assert memory.num_bytes == 40


def test_what_autograd_saves_counts_until_the_backward():
    weight = torch.nn.Parameter(torch.ones(MIB))
    gc.collect()
    with Allocations([weight]) as memory:
        loss = (weight.sin() * 2.0).cos().sum()  # keeps the input of cos, a MiB
        assert memory.num_bytes == pytest.approx(2 * 2**20, abs=64)
        loss.backward()
        del loss
        assert memory.num_bytes == 2 * 2**20  # the weight and its gradient
        assert memory.take_peak().num_bytes >= 4 * 2**20
        assert memory.take_peak().num_bytes == 2 * 2**20


def test_a_tensor_dropped_on_another_thread_is_gone():
    with Allocations([]) as memory:
        held = [torch.empty(MIB)]
        worker = threading.Thread(target=held.clear)
        worker.start()
        worker.join()
        assert memory.num_bytes == 0


COST = CostModel(ideal_profile())
CASES = {mix: lambda mix=mix: cornstarch.plan(tiny_job(mix), COST) for mix in TINY_MIXES}
CASES["encoders on all ranks"] = lambda: encoders_replicated.plan(tiny_job("all"), COST)
CASES |= {name: lambda job=job, plan=plan: plan(job, COST) for name, job, plan in variants()}
CASES |= {  # what is held between I and W: nothing for long, everything, something of all
    "all, split at once": lambda: split(CASES["all"]()),
    "all, all W last": lambda: split(CASES["all"](), weights_last),
    "projectors+llm, W anywhere": lambda: split(CASES["projectors+llm"](), weights_anywhere(3)),
    "projectors, all W last": lambda: split(CASES["projectors"](), weights_last),
    "encoders on all ranks, all W last": lambda: split(CASES["encoders on all ranks"](), weights_last),
    "all, recompute, W anywhere": lambda: split(CASES["all, recompute"](), weights_anywhere(4)),
    "all, bfloat16, all W last": lambda: split(CASES["all, bfloat16"](), weights_last),
}


def folded(job: Job) -> Plan:
    """The LLM in a V over the first two ranks: embedding and head, which are tied, on the first."""
    plan = cornstarch.plan(job, COST)
    last = len(plan.model.module("llm").layers)
    cuts = (0, 1, last // 2, last - 1, last)
    others = tuple(stage for stage in plan.stages if stage.module != "llm")
    others = tuple(replace(stage, id=i, ranks=((2 + i % 2,),)) for i, stage in enumerate(others))
    stages = tuple(
        Stage(id=len(others) + i, module="llm", replica=0, layers=cuts[i : i + 2], ranks=((rank,),))
        for i, rank in enumerate((0, 1, 1, 0))
    )
    return with_programs(replace(plan, stages=(*others, *stages)), Schedule(kind=ScheduleKind.GPIPE))


def tied_job() -> Job:
    """Its vocabulary is a fifth of the LLM's weights."""
    job = tiny_job("all")
    llm = job.model.module("llm")
    tied = json.dumps(json.loads(llm.source.config) | {"tie_word_embeddings": True})
    modules = tuple(
        module_from_config(json.loads(tied), name="llm", modality="text") if m is llm else m
        for m in job.model.modules
    )
    return replace(job, model=replace(job.model, modules=modules))


def tuned(modules: Adapted = Adapted.ALL, *, towers: bool = False) -> Plan:
    """Adapters of the LLM, or of all modules, beside trained projectors."""

    def part(module: Module) -> Module:
        if module.name != "llm" and not towers:
            return module
        trainable = Trainable.NONE if module.name == "llm" else Trainable.PROJECTOR
        return with_adapters(with_trainable(module, trainable), Lora(rank=16, alpha=32), modules)

    job = tiny_job("projectors+llm")
    model = replace(job.model, modules=tuple(map(part, job.model.modules)))
    return cornstarch.plan(replace(job, model=model), COST)


CASES["adapters"] = tuned
CASES["adapters of towers, too"] = lambda: tuned(towers=True)
CASES["adapters of q, k and v"] = lambda: tuned(Adapted.QKV)
CASES["adapters, split at once"] = lambda: split(tuned())
CASES["adapters, all W last"] = lambda: split(tuned(), weights_last)
CASES["tied, in a V"] = lambda: folded(tied_job())
CASES["tied, in a V, all W last"] = lambda: split(folded(tied_job()), weights_last)
CASES["masks of samples"] = lambda: cornstarch.plan(masked(tiny_job("all")), COST)


CASES["images in tiles"] = lambda: tiled({})
CASES["images in tiles, shrunk"] = lambda: tiled({"vision_aspect_ratio": "anyres_max_4"})


def tiled(said: dict[str, str]) -> Plan:
    """Images of 4 to 9 tiles and an overview, little of them padding."""
    job = tiny_job("all")
    llm = job.model.module("llm")
    grids = [[32 * rows, 32 * columns] for rows in range(1, 4) for columns in range(1, 4)]
    config = {"model_type": "siglip_vision_model", **EXAMPLE_VIT, "vision_use_head": False}
    config |= {"image_newline": True, "image_grid_pinpoints": grids, **said}
    vision = module_from_config(config, name="vision", modality="vision", llm_width=llm.layers[0].out_width)
    sizes = ((64, 64), (60, 96), (96, 96), (90, 30))
    images = [("vision", image_tokens(vision, *size)) for size in sizes]
    batch = tuple(sample_of(index, [8, 16], [image]) for index, image in enumerate(images))
    layouts = (ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=2))
    model = connect("tiles", [vision, llm])
    return cornstarch.plan(replace(job, model=model, batch=batch, layouts=layouts), COST)


def masked(job: Job) -> Job:
    masks = ("gemma", "prefix_lm", "causal_document(lengths=3)")
    return replace(job, batch=tuple(replace(s, mask=masks[i % 3]) for i, s in enumerate(job.batch)))


@pytest.mark.parametrize("name", CASES)
def test_measured_peak_is_at_most_the_predicted_one_and_near_it(name: str, pool: Pool):
    """On every rank; the mean within 3 %, each within 6 %."""
    plan: Plan = CASES[name]()
    summary = summarise(measure(name, plan, pool))
    assert summary.num_exceeded == 0
    assert summary.mean_abs_error <= 0.03
    assert summary.worst_abs_error <= 0.06


def test_times_are_of_the_timed_steps_and_memory_of_the_watched_one():
    fast = [replace(trace, memory=()) for trace in executed((0.8, 2.0), (1.2, 2.0))]
    slow = executed((5.0, 9.0))[0]
    comparison = compare(SIMULATED, [*fast, slow])
    assert comparison.total.executed == tuple(trace.iteration_s for trace in fast)
    (memory,) = comparison.of(Group.MEMORY)
    assert (memory.simulated, memory.executed) == (160, (160,))
    assert compare(SIMULATED, fast).of(Group.MEMORY) == ()
    assert compare(SIMULATED, [slow]).total.executed == (slow.iteration_s,)
