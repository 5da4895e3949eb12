"""The training program of a Megatron-LM folder of several modules: megatron-core's MIMO classes in a loop.

Source: megatron-core 0.19.2 (Apache-2.0): models/mimo, hyper_comm_grid, pipeline_parallel/schedules.
"""

from workbench.export.mimo_programs import CORE, MODULES, TABLES, TOWERS

_HEAD = '''"""A plan for megatron-core 0.19, made by `workbench export`; run it under torchrun."""

import argparse
import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
'''

_GRIDS = """
TOKENS = {tokens}
LENGTH = {length}
LANGUAGE_KEY = "language"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEED = 0
DENSE = ("tp", "cp", "pp", "dp", "dp-cp", "tp-cp", "tp-pp", "tp-dp", "tp-dp-cp", "tp-cp-dp-pp")
EXPERT = ("ep", "expt_tp", "expt_dp", "expt_tp-ep", "expt_tp-ep-pp")
"""

_PROGRAM = '''
def grid_of(words: dict) -> HyperCommGrid:
    """A module's ranks: tensor-parallel ones beside each other, stages furthest apart."""
    tp, cp = words["tensor_model_parallel_size"], words["context_parallel_size"]
    dp, pp = words["data_parallel_size"], words["pipeline_model_parallel_size"]
    ep = words.get("expert_model_parallel_size", 1)
    grid = HyperCommGrid([tp, cp, dp, pp], ["tp", "cp", "dp", "pp"], rank_offset=words["rank_offset"])
    shape, dims = [1, ep, tp * cp * dp // ep, pp], ["expt_tp", "ep", "expt_dp", "pp"]
    grid.register_view("expert", shape, dims, shared_dims=["pp"])
    return grid


def groups_of(grid: HyperCommGrid, is_language: bool) -> ProcessGroupCollection | None:
    """Of this rank, None outside of the module; every rank calls it for every module, in one order."""
    process_groups = {name: grid.create_pg(name.split("-")) for name in DENSE}
    process_groups |= {name: grid.create_pg(name.split("-"), view="expert") for name in EXPERT}
    chains = [list(ranks) for ranks in grid.get_rank_enum("pp")]
    ends = [(ranks, dist.new_group(sorted({ranks[0], ranks[-1]}))) for ranks in chains]
    firsts = [(ranks, dist.new_group([ranks[0]])) for ranks in chains]
    rank = dist.get_rank()
    if not grid.is_current_rank_in_grid():
        return None
    end = next((group for ranks, group in ends if rank in (ranks[0], ranks[-1])), None)
    first = next((group for ranks, group in firsts if rank == ranks[0]), None)
    return ProcessGroupCollection(
        tp=process_groups["tp"],
        cp=process_groups["cp"],
        pp=process_groups["pp"],
        dp=process_groups["dp"],
        dp_cp=process_groups["dp-cp"],
        dp_cp_gtp_remat=process_groups["dp-cp"],
        intra_dp_cp=process_groups["dp-cp"],
        tp_cp=process_groups["tp-cp"],
        tp_dp_cp=process_groups["tp-dp-cp"],
        mp=process_groups["tp-pp"],
        intra_dist_opt=process_groups["tp-cp-dp-pp"],
        ep=process_groups["ep"],
        expt_tp=process_groups["expt_tp"],
        expt_dp=process_groups["expt_dp"],
        expt_dp_gtp_remat=process_groups["expt_dp"],
        intra_expt_dp=process_groups["expt_dp"],
        tp_ep=process_groups["expt_tp-ep"],
        tp_ep_pp=process_groups["expt_tp-ep-pp"],
        embd=end if is_language else None,
        pos_embd=first if is_language else None,
    )


def model_of(grids: dict, groups: dict) -> MimoModel:
    """This rank's part of the model, frozen where the plan freezes."""
    language = language_spec()
    own = groups[LANGUAGE_KEY]
    if own is not None:
        stage, last = own.pp.rank(), own.pp.size() - 1
        language.params |= {"pg_collection": own, "pre_process": stage == 0, "post_process": stage == last}
        language.params["scatter_embedding_sequence_parallel"] = False
    encoders = {name: encoder_spec(words) for name, words in ENCODERS.items()}
    for name, spec in encoders.items():
        if groups[name] is not None:
            spec.params["pg_collection"] = groups[name]
            spec.submodules["encoders"]["tower"].params["pg_collection"] = groups[name]
            spec.submodules["input_projections"][0].params["tp_group"] = groups[name].tp
    config = MimoModelConfig(
        language_model_spec=language,
        modality_submodules_spec=encoders,
        special_token_ids=SPECIAL_TOKEN_IDS,
        module_to_grid_map=grids,
    )
    model = MimoModel(config, cp_group=own and own.cp, tp_group=own and own.tp).to(DEVICE)
    model.model_type = ModelType.encoder_or_decoder
    if IS_BF16:
        model.to(torch.bfloat16)
    if model.language_model is not None:
        model.language_model.requires_grad_(not FREEZE["freeze_language_model"])
    for name, module in model.modality_submodules.items():
        module.encoders.requires_grad_(not FREEZE["freeze_modality_encoders"][name])
        module.input_projections.requires_grad_(not FREEZE["freeze_modality_projections"][name])
    return model


def wrapped(model: MimoModel, groups: dict) -> dict:
    """Modules of this rank, each with the sums of its gradients over its own replicas."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **DDP)
    by_name = {}
    for name, own in groups.items():
        if own is None:
            continue
        module = model.language_model if name == LANGUAGE_KEY else model.modality_submodules[name]
        config = module.config if name == LANGUAGE_KEY else module.encoders["tower"].config
        by_name[name] = DistributedDataParallel(config, ddp, module, pg_collection=own)
        by_name[name].broadcast_params()
        if name == LANGUAGE_KEY:
            model.language_model = by_name[name]
        else:
            model.modality_submodules[name] = by_name[name]
    return by_name


def finalized(modules: dict, groups: dict):
    """What ends a step's backward: gradients summed, then divided by the tokens of all replicas."""

    def finalize(model: list, num_tokens: torch.Tensor, **_: object) -> None:
        for name, module in modules.items():
            finalize_model_grads([module], num_tokens=None, pg_collection=groups[name])
        total = num_tokens.clone()
        if groups[LANGUAGE_KEY] is not None:
            dist.all_reduce(total, group=groups[LANGUAGE_KEY].dp_cp)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)  # ranks before the last stage count none
        for module in modules.values():
            module.scale_gradients(1.0 / total.item())

    return finalize


def batches(grids: dict, step: int) -> Iterator[dict]:
    """Random images and text, alike on every rank; put your own here."""
    samples = TRAIN["micro_batch_size"]
    for index in range(TRAIN["global_batch_size"] // samples):
        chance = torch.Generator().manual_seed(SEED + step * TRAIN["global_batch_size"] + index)
        ids = torch.randint(1, VOCAB - len(ENCODERS), (samples, LENGTH), generator=chance)
        start = 0
        for name, count in TOKENS.items():
            ids[:, start : start + count] = SPECIAL_TOKEN_IDS[name]
            start += count
        seen = {name: pixels(words, samples, chance) for name, words in ENCODERS.items()}
        mask = torch.ones(samples, LENGTH)
        mask[:, : max(0, start - 1)] = mask[:, -1] = 0.0
        language = {
            "input_ids": ids,
            "labels": ids.roll(-1, 1),
            "loss_mask": mask,
            "position_ids": torch.arange(LENGTH).expand(samples, -1),
        }
        own = [name for name, grid in grids.items() if grid.is_current_rank_in_grid()]
        module = LANGUAGE_KEY if LANGUAGE_KEY in own else own[0]
        batch = {key: share(value, grids[module]) for key, value in language.items()}
        inputs = {name: {"tower": {"x": share(x, grids[name])}} for name, x in seen.items() if name in own}
        yield batch | {"modality_inputs": inputs}


def pixels(words: dict, samples: int, chance: torch.Generator) -> torch.Tensor:
    """An image a sample."""
    shape = (samples, 3, words["tower"]["img_h"], words["tower"]["img_w"])
    return torch.randn(shape, generator=chance).to(torch.bfloat16 if IS_BF16 else torch.float32)


def share(whole: torch.Tensor, grid: HyperCommGrid) -> torch.Tensor:
    """This rank's samples in a module."""
    group = grid.get_pg("dp")
    return whole.chunk(group.size())[group.rank()].to(DEVICE)


def loss_of(mask: torch.Tensor, losses: torch.Tensor):
    """Sum over the tokens that count, their number, and both for the report."""
    total, count = (losses.float() * mask).sum(), mask.sum().int()
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}


def forward_step(iterator: Iterator[dict], model: MimoModel):
    """One microbatch."""
    output, mask = model(**next(iterator))
    return output, partial(loss_of, mask)


def reported(losses: list, groups: dict) -> float | None:
    """Mean loss over the tokens of all replicas, on the last stage."""
    own = groups[LANGUAGE_KEY]
    if own is None or own.pp.rank() != own.pp.size() - 1:
        return None
    total = torch.stack([each["loss"] for each in losses]).sum(0)
    dist.all_reduce(total, group=own.dp_cp)
    return (total[0] / total[1]).item()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=TRAIN["train_iters"])
    steps = parser.parse_args().steps
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    grids = {name: grid_of(words) for name, words in MODULE_PARALLELISMS.items()}
    groups = {name: groups_of(grid, name == LANGUAGE_KEY) for name, grid in grids.items()}
    own = {name: each for name, each in groups.items() if each is not None}
    of_rank = groups[LANGUAGE_KEY] or next(iter(own.values()))
    parallel_state._set_global_memory_buffer()
    model_parallel_cuda_manual_seed(SEED, tp_rank=of_rank.tp.rank(), ep_rank=of_rank.ep.rank(), etp_rank=0)
    model = model_of(grids, groups)
    modules = wrapped(model, groups)
    model.config.finalize_model_grads_func = finalized(modules, groups)
    optimizer = get_mimo_optimizer(
        model,
        OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=IS_BF16, use_distributed_optimizer=IS_SHARDED, clip_grad=1.0
        ),
    )
    if len(own) == len(grids):
        run = partial(forward_backward_no_pipelining, pg_collection=groups[LANGUAGE_KEY])
    else:
        run = partial(
            forward_backward_pipelining_without_interleaving,
            p2p_communicator=MultiModulePipelineCommunicator(
                grids,
                {name: [] if name == LANGUAGE_KEY else [LANGUAGE_KEY] for name in grids},
                model.config,
                dim_mapping={"s": 0, "b": 1, "h": 2},
                module_output_ndim=dict.fromkeys(ENCODERS, 2),
            ),
            pg_collection=MultiModuleProcessGroupCollection(
                own, language_model_module_name=LANGUAGE_KEY if LANGUAGE_KEY in own else None
            ),
        )
    replicas = grids[LANGUAGE_KEY].shape[2]
    for step in range(steps):
        for module in modules.values():
            module.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=batches(grids, step),
            model=[model],
            num_microbatches=TRAIN["global_batch_size"] // TRAIN["micro_batch_size"],
            seq_length=LENGTH,
            micro_batch_size=TRAIN["micro_batch_size"] // replicas,
            forward_only=False,
        )
        optimizer.step()
        loss = reported(losses, groups)
        if loss is not None and own[LANGUAGE_KEY].tp.rank() == own[LANGUAGE_KEY].dp_cp.rank() == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

MEGATRON_SEVERAL = (
    _HEAD + CORE + MODULES + TABLES + _GRIDS + TOWERS + _PROGRAM.replace("{", "{{").replace("}", "}}")
)
