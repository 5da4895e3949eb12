"""Job files, and layouts in every notation."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.writing import (
    CORPUS,
    folder_in,
    json_bytes,
    parse_yaml_document,
    written,
    yaml_bytes,
)
from workbench.cli.layouts import layout_command
from workbench.cli.planning import plan_command
from workbench.job.job import load_job
from workbench.job.notations.job_layouts import Notation, write_layouts
from workbench.strategies.placings import with_layout_file


def job_trees() -> list[Any]:
    """Of the small jobs of the corpus."""
    return [parse_yaml_document(path.read_bytes()) for path in sorted(CORPUS.glob("job*.yaml"))]


def _job(folder: Path) -> Ready:
    out = folder_in(folder)

    def read(path: Path) -> None:
        with naming(path.name):
            load_job(path)
        layout_command(path, None, Notation.JOB, as_json=True)
        plan_command(job=path, output=out / "plan.json", as_json=True)

    return Ready(
        seeds=job_trees(),
        render=yaml_bytes,
        parse=parse_yaml_document,
        take=written(folder / "job.yaml", read),
        out=out,
    )


def _layout(notation: Notation, folder: Path) -> Ready:
    job_file = folder / "job.yaml"
    job_file.write_bytes((CORPUS / "job.yaml").read_bytes())
    job = load_job(job_file)

    def read(path: Path) -> None:
        with naming(path.name):
            with_layout_file(job, path)
        layout_command(job_file, path, Notation.JOB, as_json=True)

    return Ready(
        seeds=_MORE.get(notation) or [write_layouts(job, notation)],
        render=yaml_bytes if notation is not Notation.TORCHTITAN else json_bytes,
        parse=parse_yaml_document,
        take=written(folder / "layout.yaml", read),
    )


_MORE: Mapping[Notation, tuple[Any, ...]] = {
    Notation.MEGATRON: (
        "Et|tL",
        "Et|(t|)*1L",
        {"pipeline_model_parallel_layout": "E|ttL", "pipeline_model_parallel_size": 2},
    ),
    Notation.TORCHTITAN: (
        {
            "module_fqns_per_model_part": [
                ["tok_embeddings", "layers.0"],
                ["layers.1", "norm", "output"],
            ]
        },
    ),
    Notation.CORNSTARCH: (
        {
            "encoder_specs": {"vision": {"tp_size": 1}, "audio": {"tp_size": 1}},
            "language_model_spec": {"pp_size": 2},
            "modality_parallelism": "colocated",
        },
    ),
}

TARGETS = (
    Target(
        name="job",
        make=_job,
        readers=(
            "workbench.job.job_file:read_spec",
            "workbench.job.job_file:parse_spec",
            "workbench.plain_yaml:parse_yaml",
            "workbench.cli.layouts:_refuse_plan",
        ),
    ),
    *(
        Target(
            name=f"layout-{notation}",
            make=partial(_layout, notation),
            readers=("workbench.job.notations.layout_file:content_of",),
        )
        for notation in Notation
    ),
)
