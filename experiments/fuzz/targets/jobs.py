"""Job files, and layouts in every notation."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import CORPUS, YAML, Form, folder_in, json_bytes, reading
from workbench.cli.layouts import layout_command
from workbench.cli.planning import plan_command
from workbench.job.job import load_job
from workbench.job.notations.job_layouts import Notation, write_layouts
from workbench.strategies.encoder_placement import with_layout_file


def job_trees() -> list[Any]:
    """Trees of the small jobs of the corpus."""
    return [YAML.parse(path.read_bytes()) for path in sorted(CORPUS.glob("job*.yaml"))]


def _job(folder: Path) -> Ready:
    out, path = folder_in(folder), folder / "job.yaml"

    def use(job: object) -> None:
        del job
        layout_command(path, None, Notation.JOB, as_json=True)
        plan_command(job=path, output=out / "plan.json", as_json=True)

    return reading(YAML, path, job_trees(), load_job, use, out=out)


def _layout(notation: Notation, folder: Path) -> Ready:
    job_file = folder / "job.yaml"
    job_file.write_bytes((CORPUS / "job.yaml").read_bytes())
    job, path = load_job(job_file), folder / "layout.yaml"

    def use(changed: object) -> None:
        del changed
        layout_command(job_file, path, Notation.JOB, as_json=True)

    seeds = _MORE.get(notation) or [write_layouts(job, notation)]
    form = YAML if notation is not Notation.TORCHTITAN else Form(json_bytes, YAML.parse)
    return reading(form, path, seeds, lambda path: with_layout_file(job, path), use)


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
