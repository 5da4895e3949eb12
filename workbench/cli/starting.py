"""The command that writes a first job file for a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from workbench.cli.console import emit_json, show, warn
from workbench.cli.job_reading import warn_of_batch, warn_of_misspelt_keys
from workbench.cli.options import Json
from workbench.cost.products import ProductFormat
from workbench.job.draft import (
    LARGEST_IMAGE_PX,
    Draft,
    Train,
    draft,
    frozen_mergers,
    machines_of,
)
from workbench.job.drafted_batch import USUAL_TEXT_TOKENS, WantedBatch
from workbench.job.first_rows import sizes_of
from workbench.job.job import load_job
from workbench.job.packed_rows import MOST_STEP_TOKENS
from workbench.model.model_graph import ModelGraph
from workbench.plan.plan import ModuleSettings
from workbench.plan.runnable import check_family, check_settings
from workbench.report.packed_rows import packed_line, packed_record
from workbench.report.tables import listed
from workbench.whole_file import check_writable, write_text


def init_command(
    model: Annotated[
        str,
        typer.Argument(help="config.json, checkpoint folder, or name of a zoo model", metavar="MODEL"),
    ],
    gpus: Annotated[str, typer.Option(help="number and kind of GPUs, such as 16xH100")],
    output: Annotated[Path, typer.Option("-o", "--output", help="job file to write")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="number of nodes; default: eight GPUs per node")
    ] = None,
    train: Annotated[
        Train, typer.Option(help="what to train; lora: projectors, and adapters of the LLM")
    ] = Train.LLM,
    text_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help=f"text tokens per sample; default: {USUAL_TEXT_TOKENS}"),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH in pixels for variable-size encoders; default: 448x448")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="file with the sizes of your samples, as for `plan --sizes`, from which the job reads them"
        ),
    ] = None,
    pack: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEP_TOKENS,
            help="tokens of a row: samples of --data are packed into rows of at most so many tokens, which "
            "are the samples of the step",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="samples of a step, over all replicas; default: four microbatches for each stage, at least "
            "eight",
        ),
    ] = None,
    products: Annotated[
        ProductFormat, typer.Option(help="format of the products of the LLM's blocks; same: bfloat16")
    ] = ProductFormat.SAME,
    as_json: Json = False,
) -> None:
    """Write a job file for a model. A composite model is split into encoders, projectors and LLM."""
    check_writable(output, model, data)
    machines = machines_of(gpus, nodes, products)
    job_draft = draft(
        model,
        machines,
        train=train,
        wanted=WantedBatch(
            text_tokens=text_tokens,
            image_px=_parse_image_size(image),
            data=data,
            samples=samples,
            pack_tokens=pack,
        ),
        folder=output.parent,
    )
    _warn_of_edits(output, job_draft.text)
    write_text(job_draft.text, output)
    warn_of_misspelt_keys(job_draft.model)
    packed: tuple[str, ...] = ()
    if data is not None:
        job = load_job(output)
        warn_of_batch(job, sizes_of(output))
        packed = () if pack is None else (packed_line(packed_record(job.batch, pack)),)
    for refusal in _run_refusals(job_draft.model, products):
        warn(f"plans of this job can be simulated, not run: {refusal}")
    for note in frozen_mergers(job_draft.model):
        warn(note)
    if as_json:
        emit_json({"job": str(output), **_record(job_draft, products)})
        return
    if job_draft.missing:
        count, first = len(job_draft.missing), job_draft.missing[0]
        show(f"{count} weight files are missing ({first}, ...); planning does not need them")
    rule = (job_draft.microbatch_rule,) if job_draft.microbatch_rule else ()
    table = _table(f"{model} on {gpus}", job_draft.model)
    show(table, *rule, *packed, f"written to {output}; next: workbench search {output}")


def _table(title: str, model: ModelGraph) -> Table:
    return listed(
        title,
        model.modules,
        ("module", lambda module: module.name),
        ("modality", lambda module: module.modality),
        ("layers", lambda module: str(len(module.layers))),
        ("weights", lambda module: f"{module.num_parameters:,}"),
        ("trainable", lambda module: f"{module.num_trained:,}"),
        key="modules",
    )


def _warn_of_edits(output: Path, text: str) -> None:
    """Warn of a file with other content: it is replaced as every output is, but people edit job files."""
    if output.is_file() and output.read_bytes() != text.encode("utf-8"):
        warn(f"{output} had other content, which is replaced; edits of a job want a file of their own")


def _run_refusals(model: ModelGraph, products: ProductFormat) -> Iterator[str]:
    """One text per module that the runtime cannot run in any layout, with the LLM's format of products."""
    for module in model.modules:
        own = products if module is model.llm else ProductFormat.SAME
        try:
            check_family(module)
            check_settings(module.name, ModuleSettings(module=module.name, products=own))
        except ValueError as error:
            yield str(error)


def _record(job_draft: Draft, products: ProductFormat) -> dict[str, Any]:
    modules = {
        module.name: {
            "modality": module.modality,
            "layers": len(module.layers),
            "weights": module.num_parameters,
            "trainable": module.num_trained,
        }
        for module in job_draft.model.modules
    }
    record = {
        "modules": modules,
        "missing": list(job_draft.missing),
        "microbatch_rule": job_draft.microbatch_rule or None,
        "run_refusals": list(_run_refusals(job_draft.model, products)),
    }
    if job_draft.parts is None:
        return record
    return {
        **record,
        "token_ids": dict(job_draft.parts.token_ids),
        "dropped": {dropped.weights: dropped.what for dropped in job_draft.parts.dropped},
        "notes": list(job_draft.parts.notes),
    }


def _parse_image_size(image: str | None) -> tuple[int, int] | None:
    if image is None:
        return None
    height, _, width = image.partition("x")
    sides = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in (height, width)]
    if not all(1 <= side <= LARGEST_IMAGE_PX for side in sides):
        raise ValueError(f"--image: want HEIGHTxWIDTH in pixels, got {image!r}; nearest: 448x448")
    return sides[0], sides[1]
