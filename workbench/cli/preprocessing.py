"""Commands for preprocessing outside the training processes: keys, serve, produce, run, status."""

import math
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from workbench.cli.console import print_result, show
from workbench.cli.job_reading import read_job
from workbench.cli.options import Json
from workbench.cli.table_format import with_format_flag
from workbench.plain_text import plain
from workbench.report.progress import ticking
from workbench.report.tables import milliseconds, titled
from workbench.termination import noting
from workbench.units import ms

if TYPE_CHECKING:
    from runtime.preprocess.images import Rule
    from runtime.preprocess.keys import ClientKeys
    from runtime.preprocess.server import ServerSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Preprocess images in processes separate from training.",
)

_Choice = TypeVar("_Choice", bound=StrEnum)

Address = Annotated[str, typer.Argument(help="tcp://HOST:PORT of the server", metavar="ADDRESS")]
ClientKeyFile = Annotated[Path | None, typer.Option("--keys", help="client keys, see `preprocess keys`")]
Timeout = Annotated[float, typer.Option(help="limit of every single wait in seconds")]


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="folder to write to", metavar="FOLDER")],
) -> None:
    """Write key files for server, producers, trainers and readers, readable only by their owner."""
    from runtime.preprocess.keys import write_keys

    show(*(f"written to {path}" for path in write_keys(folder)))


@app.command("serve")
def serve_command(
    data: Annotated[Path, typer.Argument(help="data folder with data.jsonl", metavar="DATA")],
    job: Annotated[Path | None, typer.Option(help="job file whose encoder determines the image size")] = None,
    image_px: Annotated[int | None, typer.Option(help="resize every image to a square of this side")] = None,
    patch_px: Annotated[int, typer.Option(help="side of a patch")] = 14,
    max_pixels: Annotated[
        int | None,
        typer.Option(help="pixel limit of Qwen2-VL's rule, the default without --job and --image-px"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="examples per batch")] = 8,
    microbatch: Annotated[int, typer.Option(help="examples per microbatch")] = 1,
    reorder: Annotated[
        str, typer.Option(help="reorder examples: none, within (groups) or both (groups and pipeline)")
    ] = "both",
    stages: Annotated[int, typer.Option(help="pipeline stages for which microbatches are ordered")] = 2,
    window: Annotated[int, typer.Option(help="batches prepared ahead of each trainer")] = 3,
    producers: Annotated[int, typer.Option(help="producer processes on this host")] = 1,
    malformed: Annotated[str, typer.Option(help="unreadable images: fatal or skip")] = "fatal",
    lease: Annotated[float, typer.Option(help="seconds that a producer has for one example")] = 60.0,
    host: Annotated[
        str, typer.Option(help="address to listen on; addresses beyond this machine need --keys")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: any free one")] = 0,
    keys: Annotated[
        Path | None, typer.Option(help="server keys, see `preprocess keys`; default: created for this run")
    ] = None,
    is_open: Annotated[
        bool, typer.Option("--open", help="no keys: every user of this machine may connect")
    ] = False,
    seconds: Annotated[float | None, typer.Option(help="seconds to run; default: until interrupted")] = None,
) -> None:
    """Serve batches to trainers. Processes on this host, and others that join, prepare the images."""
    _check_serving(seconds, keys, is_open=is_open)
    from runtime.preprocess.keys import SERVER_FILE, write_keys
    from runtime.preprocess.order import OrderSettings, Reordering
    from runtime.preprocess.server import ServerSettings
    from runtime.preprocess.server_socket import refuse_open_address
    from runtime.preprocess.stream import Malformed
    from runtime.world.scratch import ScratchFolder

    settings = ServerSettings(
        folder=data,
        rule=_image_rule(job, image_px, patch_px, max_pixels),
        batch_size=batch_size,
        window=window,
        order=OrderSettings(
            reordering=_parse_choice(Reordering, reorder, "--reorder"),
            microbatch=microbatch,
            num_stages=stages,
        ),
        malformed=_parse_choice(Malformed, malformed, "--malformed"),
        lease_s=lease,
        num_producers=producers,
        host=host,
        port=port,
    )
    refuse_open_address(host, has_keys=keys is not None)
    if keys is not None or is_open:
        _serve(settings, keys, seconds)
        return
    with ScratchFolder("preprocess-") as key_folder:
        write_keys(key_folder)
        _serve(settings, key_folder / SERVER_FILE, seconds, key_folder=key_folder)


def _check_serving(seconds: float | None, keys: Path | None, *, is_open: bool) -> None:
    """Raise ValueError for an invalid --seconds, or for keys together with --open."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"serve: --seconds must be > 0 and finite, got {seconds}")
    if is_open and keys is not None:
        raise ValueError("serve: --open and --keys exclude each other")


def _serve(
    settings: "ServerSettings", keys: Path | None, seconds: float | None, *, key_folder: Path | None = None
) -> None:
    """Serve batches until a time limit or a signal.

    Args:
        keys: file with the server's keys; None: every user of this machine may connect.
        seconds: time limit; None: until SIGINT or SIGTERM.
        key_folder: folder with keys that were created for this run, which is printed; None: no such folder.
    """
    from runtime.preprocess.keys import read_server_keys
    from runtime.preprocess.server import Server

    server = Server(settings, None if keys is None else read_server_keys(keys))
    # signals are recorded, not raised: a library's callback could swallow an exception
    with noting(signal.SIGINT, signal.SIGTERM) as signals:
        typer.echo(f"serving {settings.folder} at {server.address}")
        if key_folder is not None:
            typer.echo(f"keys for producers, trainers and readers, valid while it runs: {key_folder}")
        end_s = math.inf if seconds is None else time.monotonic() + seconds
        server.serve(lambda: bool(signals) or time.monotonic() >= end_s)


@app.command("produce")
def produce_command(
    address: Address,
    data: Annotated[Path, typer.Option(help="path of the server's data folder on this host")],
    keys: ClientKeyFile = None,
    silence: Annotated[
        float, typer.Option(help="end after this many seconds without a message from the server")
    ] = 30.0,
) -> None:
    """Prepare images for a server on this or another host until the server ends."""
    from runtime.preprocess.keys import read_client_keys
    from runtime.preprocess.producer import produce

    client = None if keys is None else read_client_keys(keys)
    num_prepared = produce(
        address,
        data,
        keys=client,
        name=None,
        silence_s=silence,
        on_silence=lambda: _tell_wait(address, client, silence),
    )
    show(f"{num_prepared} examples prepared")


@app.command("run")
@with_format_flag
def run_command(
    address: Address,
    batches: Annotated[int, typer.Option(help="number of batches")] = 10,
    step_ms: Annotated[float, typer.Option(help="idle wait per batch, in place of a training step")] = 0.0,
    name: Annotated[str, typer.Option(help="name of this trainer; a known name continues where it was")] = "",
    keys: ClientKeyFile = None,
    timeout: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Take batches like a trainer, and report how long it stalls for each."""
    from runtime.preprocess.keys import read_client_keys
    from runtime.preprocess.loader import ServedLoader, Subscription, stalls_of

    client = None if keys is None else read_client_keys(keys)
    loader = ServedLoader(
        Subscription(address=address, keys=client, name=name, timeout_s=timeout),
        on_silence=lambda: _tell_wait(address, client, timeout),
    )
    try:
        start = loader.position
        with ticking("taking batches", batches, quiet=as_json) as ticker:
            stalls = stalls_of(loader, batches, step_s=step_ms / 1000, on_batch=ticker.step)
        loader.finish()
    finally:
        loader.close()
    record = {
        "first_position": start,
        "batches": batches,
        "examples": stalls.num_examples,
        "skipped": [[example.id, example.path] for example in stalls.skipped],
        "stall_ms_p50": ms(stalls.quantile_s(0.5)),
        "stall_ms_p99": ms(stalls.quantile_s(0.99)),
    }
    table = titled(
        "batches", ("first", "batches", "examples", "left out", "stall, median", "99th percentile")
    )
    table.add_row(
        *(str(value) for value in (start, batches, stalls.num_examples, len(stalls.skipped))),
        milliseconds(stalls.quantile_s(0.5)),
        milliseconds(stalls.quantile_s(0.99)),
    )
    print_result(
        record, table, *(f"left out: {example.reason}" for example in stalls.skipped), as_json=as_json
    )


@app.command("status")
def status_command(
    address: Address, keys: ClientKeyFile = None, timeout: Timeout = 5.0, as_json: Json = False
) -> None:
    """Show the state of a server."""
    from runtime.preprocess.keys import read_client_keys
    from runtime.preprocess.loader import ServedLoader, Subscription

    client = None if keys is None else read_client_keys(keys)
    loader = ServedLoader(
        Subscription(address=address, keys=client, timeout_s=timeout),
        on_silence=lambda: _tell_wait(address, client, timeout),
    )
    try:
        status: dict[str, Any] = {k: v for k, v in loader.status().items() if k != "kind"}
    finally:
        loader.close()
    print_result(status, *(f"{key}: {value}" for key, value in status.items()), as_json=as_json)


def _tell_wait(address: str, keys: "ClientKeys | None", wait_s: float) -> None:
    """Print on stderr the server, the longest wait, and which servers never answer."""
    from runtime.preprocess.keys import key_hint

    sys.stderr.write(
        f"workbench: waiting for the server at {plain(address)}, at most {wait_s:g} s{key_hint(keys)}\n"
    )


def _parse_choice(kind: type[_Choice], value: str, option: str) -> _Choice:
    if value not in list(kind):
        raise ValueError(f"serve: {option} must be one of {', '.join(kind)}, got {value!r}")
    return kind(value)


def _image_rule(job: Path | None, image_px: int | None, patch_px: int, max_pixels: int | None) -> "Rule":
    from runtime.preprocess.images import QwenRule, SquareRule

    if sum(option is not None for option in (job, image_px, max_pixels)) > 1:
        raise ValueError("serve: --job, --image-px and --max-pixels exclude each other")
    if job is not None:
        from runtime.preprocess.source import rule_of

        return rule_of(read_job(job).model)
    if image_px is not None:
        return SquareRule(image_px=image_px, patch_px=patch_px)
    return (
        QwenRule(patch_px=patch_px)
        if max_pixels is None
        else QwenRule(patch_px=patch_px, max_pixels=max_pixels)
    )
