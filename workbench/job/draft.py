"""Drafts a first job file for a model: its modules, the cluster, and a batch to start from."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from workbench.cost.device_names import check_memory, shipped_device
from workbench.cost.products import ProductFormat, narrow_rate
from workbench.cost.profile import known_profiles, load_profile
from workbench.job.drafted_activations import PRECISION, WIDE
from workbench.job.drafted_batch import WantedBatch, drafted_batch, drafted_rows
from workbench.job.drafted_layout import drafted_layout
from workbench.job.drafted_state import ModuleCut
from workbench.job.job_file import parse_spec
from workbench.job.parts import model_of, zoo_names
from workbench.model.checkpoint import missing_weights
from workbench.model.composites.composite import LLM, Part, Parts
from workbench.model.composites.registry import COMPOSITES, is_composite, take_apart
from workbench.model.experts import num_experts
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import modality_of, read_config
from workbench.model.layer import LayerKind
from workbench.model.lora import Adapted
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.model.processor_config import parts_with_processor, read_processor
from workbench.model.projector import Projector, ProjectorStep
from workbench.model.trainable import Trainable, num_frozen_mergers
from workbench.plan.plan import Recompute, Sharding

USUAL_PER_NODE = 8
LARGEST_IMAGE_PX = 10_000
RANK, ALPHA = 16, 32  # of adapters
_NOISE = (  # keys of a config.json that do not concern its layers
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


class Train(StrEnum):
    """Trained weights: ALL; LLM: the LLM and the projectors, over frozen encoders; or PROJECTORS alone.

    LORA: the projectors, and adapters of the frozen LLM.
    """

    ALL = "all"
    LLM = "llm"
    PROJECTORS = "projectors"
    LORA = "lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of a drafted job.

    Args:
        device: name of a shipped profile.
        gpus: number of GPUs in all.
        per_node: number of GPUs of a node.
        products: format in which they compute the products of the LLM's blocks; those of encoders have the
            precision.
    """

    device: str
    gpus: int
    per_node: int
    products: ProductFormat = ProductFormat.SAME

    @property
    def nodes(self) -> int:
        return self.gpus // self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job file before it is written.

    Args:
        text: the file's text, with comments.
        model: its modules.
        parts: the parts of a composite model; None where the model is not a composite.
        missing: files of weights that the checkpoint's index names and its folder lacks.
        microbatch_rule: how the samples of a microbatch were chosen; empty if it has one without a rule.
    """

    text: str
    model: ModelGraph
    parts: Parts | None
    missing: tuple[str, ...] = ()
    microbatch_rule: str = ""


def _gpus_near(gpus: str) -> str:
    """The number and the device of a text such as `128*H100`, `H100x128` or `128`, or usual ones."""
    words = re.split(r"[x*\s]+", gpus.lower())
    numbers = [int(word) for word in words if re.fullmatch(r"0*[1-9]\d{0,6}", word)]
    devices = [device for device in known_profiles() if device.lower() in words]
    return f"{(numbers or [USUAL_PER_NODE])[0]}x{(devices or ['H100'])[0]}"


def machines_of(gpus: str, nodes: int | None, products: ProductFormat = ProductFormat.SAME) -> Machines:
    """Parse GPUs such as `16xH100` and a number of nodes; None: nodes of eight, or one.

    Raises:
        ValueError: another form, an unknown device, GPUs that nodes do not share equally, or a format of
            products that the device does not have.
    """
    match = re.fullmatch(r"(\d{1,7})x(.+)", gpus)
    if match is None or int(match[1]) < 1:
        raise ValueError(
            f"--gpus: want a number, 'x' and a device, got {gpus!r}; nearest: {_gpus_near(gpus)}"
        )
    number = int(match[1])
    try:
        device = shipped_device(match[2], known_profiles())
        check_memory(match[2], device, load_profile(device).memory_bytes)
    except ValueError as error:
        raise ValueError(f"--gpus: {error}") from None
    count = nodes or -(-number // USUAL_PER_NODE)
    if number % count and nodes is None:
        raise ValueError(
            f"--gpus: {number} GPUs make no whole nodes of {USUAL_PER_NODE}; want --nodes, or "
            f"{count * USUAL_PER_NODE} GPUs"
        )
    if number % count:
        divisors = (d for d in range(1, number + 1) if number % d == 0)
        nearest = min(divisors, key=lambda nodes: abs(nodes - count))
        raise ValueError(f"--nodes: must divide {number} GPUs, got {count}; nearest: {nearest}")
    if products is not ProductFormat.SAME:
        _check_products(device, products)
    return Machines(device=device, gpus=number, per_node=number // count, products=products)


def _check_products(device: str, products: ProductFormat) -> None:
    try:
        narrow_rate(load_profile(device), products)
    except ValueError as error:
        raise ValueError(f"--products: {error}") from None


def draft(
    model: str,
    machines: Machines,
    *,
    train: Train,
    wanted: WantedBatch = WantedBatch(),  # noqa: B008  (it is frozen)
    folder: Path = Path(),
) -> Draft:
    """Draft a job that `plan` accepts as it is.

    Args:
        model: a config.json, the folder of a checkpoint, or a name of the zoo.
        machines: where the job runs.
        train: which weights are trained.
        wanted: what the user says of the samples.
        folder: where the job file will be; it names the data from there.

    Raises:
        ValueError: no such model, a composite of unknown structure, an encoder alone, projectors for a model
            without them, or what `drafted_rows` and `drafted_batch` refuse.
    """
    name, parts, modules = _modules(model, train)
    spec: dict[str, Any] = {"name": name, "model": {"modules": modules}, **_cluster(machines)}
    graph = _built(spec)
    _check_train(train, graph)
    if train is Train.LORA:
        modules[LLM]["lora"] = _adapters(graph.module(LLM))
        graph = _built(spec)
    memory_bytes = load_profile(machines.device).memory_bytes
    rows = drafted_rows(wanted, parts, graph, folder)
    cut = drafted_layout(
        graph, rows.drawn, gpus=machines.gpus, per_node=machines.per_node, memory_bytes=memory_bytes
    )
    layouts = {module: _layout(each) for module, each in cut.cuts.items() if max(each.tp, each.ep) > 1}
    if cut.recompute is not Recompute.NONE:
        layouts.setdefault(LLM, {})["recompute"] = cut.recompute.value
    if machines.products is not ProductFormat.SAME:
        layouts.setdefault(LLM, {})["products"] = machines.products.value
    step = drafted_batch(wanted, rows, graph, cut, gpus=machines.gpus, memory_bytes=memory_bytes)
    spec |= {"batch": step.entries, **({"layouts": layouts} if layouts else {})}
    spec |= {"precision": PRECISION.value, "optimizer_precision": WIDE.value, "profile": machines.device}
    missing = missing_weights(Path(model))
    rules = (step.rule,) if step.rule else ()
    not_here = (f"not downloaded yet: {name}" for name in missing)
    text = _text(spec, (*_comments(parts), *rules, *frozen_mergers(graph), *cut.notes, *not_here))
    parse_spec(text, where="draft")
    return Draft(text=text, model=graph, parts=parts, missing=missing, microbatch_rule=step.rule)


def _layout(cut: ModuleCut) -> dict[str, Any]:
    if cut.ep > 1:
        return {"ep": cut.ep, "sharding": Sharding.OPTIMIZER.value}
    return {"tp": cut.tp}


def frozen_mergers(graph: ModelGraph) -> tuple[str, ...]:
    """Which modules have projectors in frozen blocks, which the runtime and the plan freeze with them."""
    return tuple(
        f"module {module.name!r}: its last merger is trained, the {count} of inner blocks (DeepStack) are "
        f"frozen with their blocks; trainable: {Trainable.ALL} trains all"
        for module in graph.modules
        if (count := num_frozen_mergers(module))
    )


def _modules(model: str, train: Train) -> tuple[str, Parts | None, dict[str, Any]]:
    """The job's name, the parts of a composite, and the job file's entries for its modules."""
    if model in zoo_names():
        return model, None, {LLM: {"zoo": model, "trainable": _trainable(LLM, train)}}
    if not Path(model).exists():
        near = difflib.get_close_matches(model, zoo_names(), n=1, cutoff=0.0)
        raise ValueError(
            f"model {model!r}: no such file, folder or name of the zoo; nearest name: {near[0]}; of a model "
            "on a hub, give its config.json"
        )
    config = read_config(model)
    path = Path(model).resolve()
    name = path.name if path.is_dir() else path.parent.name if path.stem == "config" else path.stem
    if str(config.get("model_type")) in COMPOSITES:
        parts = parts_with_processor(take_apart(config), read_processor(model))
        for module_name, part in parts.modules.items():
            _check_known(f"model {model!r}: {module_name}", str(part.config["model_type"]), module_name)
        return (
            name,
            parts,
            {module_name: _module(module_name, part, train) for module_name, part in parts.modules.items()},
        )
    if is_composite(config):
        take_apart(config)
    kind = str(config.get("model_type"))
    _check_known(f"model {model!r}", kind, LLM)
    if modality_of(config) != TEXT:
        raise ValueError(f"model {model!r}: {kind} is an encoder; want a model with an LLM")
    return name, None, {LLM: {"config": _plain(config), "trainable": _trainable(LLM, train)}}


def _check_train(train: Train, graph: ModelGraph) -> None:
    kinds = {layer.kind for module in graph.modules for layer in module.layers}
    if train is Train.PROJECTORS and LayerKind.PROJECTOR not in kinds:
        raise ValueError(
            f"--train: {train} want a model that has some, {graph.name!r} has none; nearest: {Train.ALL}"
        )


def _module(module_name: str, part: Part, train: Train) -> dict[str, Any]:
    entry: dict[str, Any] = {"config": _plain(part.config), "trainable": _trainable(module_name, train)}
    if isinstance(part.projector, Projector):
        entry["projector"] = part.projector.value
    elif part.projector is not None:
        entry["projector"] = [_step(step) for step in part.projector]
    if part.feature_layer is not None:
        states = part.feature_layer
        entry["feature_layer"] = states if isinstance(states, int) else list(states)
    return entry


def _trainable(module_name: str, train: Train) -> str:
    if module_name == LLM:
        return "none" if train in (Train.PROJECTORS, Train.LORA) else "all"
    return "all" if train is Train.ALL else "projector"


def _adapters(llm: Module) -> dict[str, Any]:
    """Adapters of all products, or, where blocks have experts, of those that may have one."""
    has_experts = any(map(num_experts, llm.layers))
    return {
        "rank": RANK,
        "alpha": ALPHA,
        "modules": (Adapted.ATTENTION if has_experts else Adapted.ALL).value,
    }


def _step(step: ProjectorStep) -> dict[str, Any]:
    if step.norm is not None:
        return {"norm": step.norm.value, "eps": step.eps, "offset": step.offset}
    if step.merge is not None:
        return {"merge": step.merge, "how": step.how.value}
    if step.act is not None:
        return {"act": step.act}
    if step.softmax is not None:
        return {"softmax": step.softmax}
    return {"linear": "out" if step.linear_out else step.linear, "bias": step.bias}


def _check_known(where: str, kind: str, role: str) -> None:
    """Raise ValueError unless a family plans models of that type; the message says what is needed.

    Args:
        role: of the module, as families have it: the nearest type is one of those.
    """
    known_types = {
        *ARCHITECTURES,
        *(alias for architecture in ARCHITECTURES.values() for alias in architecture.aliases),
    }
    if kind in known_types:
        return
    alike = [known for known, architecture in ARCHITECTURES.items() if architecture.role == role]
    near = difflib.get_close_matches(kind, alike, n=1)
    hint = (
        f"; nearest: {near[0]}. If its arithmetic is the same, use that model_type; else"
        if near
        else ": to plan it,"
    )
    raise ValueError(
        f"{where}: model_type {kind!r} is not supported{hint} add its layers (workbench/model/families), and "
        "an adapter to run it"
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without keys that do not concern its layers."""
    return {
        key: value
        for key, value in config.items()
        if key not in _NOISE and not key.startswith("_") and value is not None
    }


def _cluster(machines: Machines) -> dict[str, Any]:
    return {
        "cluster": {
            "device": machines.device,
            "nodes": machines.nodes,
            "ranks_per_node": machines.per_node,
        }
    }


def _built(spec: Mapping[str, Any]) -> ModelGraph:
    """The model of a spec without batch and profile, to size it."""
    batch = {"samples": 1, "fixed": {"text_tokens": 1}}
    text = yaml.safe_dump({**spec, "batch": batch, "profile": "any"})
    checked = parse_spec(text, where="draft")
    return model_of(checked.name, checked.model, folder=Path())


def _text(spec: Mapping[str, Any], comments: Iterable[str]) -> str:
    lines = [f"# {line}" for line in comments]
    body: str = yaml.safe_dump(
        json.loads(json.dumps(spec)), sort_keys=False, default_flow_style=None, width=100
    )
    return "\n".join([*lines, body])


def _comments(parts: Parts | None) -> Iterator[str]:
    if parts is None:
        return
    for module, number in parts.token_ids.items():
        yield f"{module}: its outputs stand where the text has token {number}"
    dropped_weights: dict[str, str] = {}
    for dropped in parts.dropped:
        dropped_weights.setdefault(dropped.what, dropped.weights)
    for what, weights in dropped_weights.items():
        yield f"left out: {weights}* ({what})"
    yield from parts.notes
