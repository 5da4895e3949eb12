"""What one device holds that plays all ranks of a plan."""

import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from workbench.memory.account import memory_table, moved_bytes
from workbench.memory.layer import ADAMW_MOMENTS, MUON_MOMENTS
from workbench.model.trained import trains
from workbench.plan.expert_groups import held_elements
from workbench.plan.lowered import Lowered
from workbench.plan.muon import matrices_of
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.units import gib


def state_bytes(plan: Plan) -> int:
    """Bytes of all ranks' weights and optimizer state; a frozen weight is stored once.

    Complexity: O(parameters of all stages).
    """
    narrow = plan.settings.precision.num_bytes
    wide = plan.settings.optimizer_precision
    updated = narrow if wide is None else max(narrow, wide.num_bytes)
    per_trained = narrow + (updated if updated > narrow else 0)
    trained, moments, frozen = 0.0, 0.0, 0
    seen: set[tuple[str, str]] = set()
    for stage in plan.stages:
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
            matrices = matrices_of(plan.settings, layer)
            for parameter in layer.parameters():
                if trains(layer, parameter):
                    held = held_elements(parameter, stage) * len(stage.flat_ranks)
                    trained += held
                    moments += held * (MUON_MOMENTS if parameter in matrices else ADAMW_MOMENTS)
                elif (stage.module, parameter.name) not in seen:
                    seen.add((stage.module, parameter.name))
                    frozen += parameter.num_elements
    return round(per_trained * trained + updated * moments + narrow * frozen)


def held_bytes(lowered: Lowered, order: Sequence[Action]) -> int:
    """Most bytes that all ranks hold together: their state, and what the account of memory says of actions.

    Args:
        order: in which the actions are done, one at a time.

    Complexity: that of `memory_table`.
    """
    table = memory_table(lowered)
    current = peak = 0
    for action in order:
        moved = [moved_bytes(lowered.plan, table, rank, action) for rank in lowered.plan.ranks_of(action)]
        current += sum(acquired for acquired, _ in moved)
        peak = max(peak, current)
        current -= sum(released for _, released in moved)
    return state_bytes(lowered.plan) + peak


def capacity_of(device: torch.device) -> int | None:
    """Bytes of the device's memory; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    with suppress(ValueError, OSError):
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return capacity if capacity > 0 else None
    return None


def check_fits(lowered: Lowered, order: Sequence[Action], device: torch.device) -> None:
    """Refuse what can not be held: better than to be ended by the system in the middle.

    Raises:
        ValueError: all ranks together need more than the device has.
    """
    wanted, capacity = held_bytes(lowered, order), capacity_of(device)
    if capacity is not None and wanted > capacity:
        raise ValueError(
            f"emulation holds all {len(lowered.plan.ranks)} ranks on one device: want {gib(wanted):.3g} GiB, "
            f"{device} has {gib(capacity):.3g} GiB; want fewer ranks, smaller microbatches or a smaller model"
        )
