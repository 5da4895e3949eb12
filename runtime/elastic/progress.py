"""The state of a whole job as a folder, written by the processes that hold it and read by new ones."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from runtime.elastic.history import ElasticFailed
from runtime.elastic.job import ElasticJob, Member, held_by
from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Save, Saved
from workbench.elastic.layout import Layout

STAMP = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Saved weights and moments that have seen `step` steps."""

    folder: Path
    step: int


def save_progress(
    nodes: Nodes, job: ElasticJob, layout: Layout, lost: Collection[str], step: int, folder: Path
) -> Progress:
    """Write every layer, or every part of it, by one of its holders, then the stamp that makes it whole.

    Raises:
        ElasticFailed: a layer that no process holds, or a holder that did not answer.
        FileExistsError: the folder is there already.
    """
    owner_of = {
        (layer, _part_of(job, member)): member
        for member, layers in held_by(job, layout).items()
        if member.node not in lost
        for layer in layers
    }
    dead = [layer for layer in range(len(job.chain.owners)) if (layer, 0) not in owner_of]
    if dead:
        raise ElasticFailed(f"no process holds layer {dead[0]} ({len(dead)} layers in all)")
    folder.mkdir(parents=True)
    members = tuple(dict.fromkeys(owner_of.values()))
    for number, member in enumerate(members):
        owners = tuple(job.chain.owners[layer] for (layer, _), holder in owner_of.items() if holder == member)
        nodes.send(member, Save(folder=folder / f"part{number}", owners=owners))
    heard = nodes.gather(members, Saved, job.step_s)
    if heard.is_trouble:
        raise ElasticFailed(heard.describe())
    stamp = {
        "step": step,
        "model": job.model.name,
        "owners": [list(owner) for owner in job.chain.owners],
        "parts": _num_parts(job),
    }
    (folder / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
    return Progress(folder=folder, step=step)


def _num_parts(job: ElasticJob) -> int:
    """Of each weight: each of as many ranks of a stage keeps one."""
    return job.ranks_per_stage if job.is_sharded else 1


def _part_of(job: ElasticJob, member: Member) -> int:
    return member.slot % _num_parts(job)


def read_progress(job: ElasticJob, folder: Path) -> Progress:
    """A folder of `save_progress`, of the same model, its weights sharded as this job does.

    Raises:
        ValueError: it is torn, of another model, or in another number of parts.
    """
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no whole progress: {error}") from error
    owners = [list(owner) for owner in job.chain.owners]
    if stamp["model"] != job.model.name or stamp["owners"] != owners:
        raise ValueError(
            f"{folder} is of model {stamp['model']!r} with {len(stamp['owners'])} layers, "
            f"want {job.model.name!r} with {len(owners)}"
        )
    if stamp["parts"] != _num_parts(job):
        raise ValueError(
            f"{folder} holds weights in {stamp['parts']} parts, the job keeps them in {_num_parts(job)}: "
            f"want stages of {stamp['parts']} ranks that share them out, or none that do if that is 1"
        )
    return Progress(folder=folder, step=int(stamp["step"]))
