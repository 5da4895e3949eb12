"""A producer: receives examples from the server one by one, preprocesses them, and sends them back.

It has no state, so it may die at any moment. `python -m runtime.preprocess.producer` reads its settings,
including keys, as JSON from standard input.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from runtime.data.records import Record
from runtime.preprocess.connection import Connection, Message
from runtime.preprocess.example import Buffer, example_frames, packed, preprocess
from runtime.preprocess.images import MalformedImageError, rule_from_json
from runtime.preprocess.keys import ClientKeys, key_hint
from workbench.supervised import end_with, from_arguments
from workbench.units import S_PER_DAY

KEPT_BYTES = 31 * 2**20  # with overhead below 32 MiB, which is glibc's maximum
READY_AGAIN_S = 3.0  # a restarted server does not know its producers


def produce(
    address: str,
    folder: Path,
    *,
    keys: ClientKeys | None,
    name: str | None,
    silence_s: float,
    on_silence: Callable[[], None] | None = None,
) -> int:
    """Work for the server at an address until it has been silent for `silence_s` seconds.

    An idle server still sends a message about once per second.

    Args:
        folder: the server's data folder, on this host.
        name: of this producer; None: the server assigns one.
        on_silence: see `Connection`.

    Returns:
        Number of preprocessed examples.

    Raises:
        ValueError: the folder is missing; the server never answers, refuses the key, or has stopped with an
            error.
    """
    if not folder.is_dir():
        raise ValueError(
            f"data folder {folder}: does not exist; want the path of the server's folder on this host"
        )
    if not 0 < silence_s <= S_PER_DAY:
        raise ValueError(f"silence must be > 0 s and at most a day, got {silence_s}")
    keep_freed_memory()
    connection = Connection(address, keys, None if name is None else name.encode(), on_silence)
    num_done = 0
    has_answer = False
    end_s = time.monotonic() + silence_s
    try:
        connection.send(packed("ready"))
        while (now_s := time.monotonic()) < end_s:
            message = connection.receive(min(READY_AGAIN_S, end_s - now_s))
            if message is None:
                connection.send(packed("ready"))
                continue
            has_answer = True
            if message.kind == "task":
                header, buffers = answer_to(message, folder)
                connection.send(header, buffers)
                num_done += 1
            end_s = time.monotonic() + silence_s
    finally:
        connection.close()
    if not has_answer:
        raise ValueError(f"no server at {address}: waited {silence_s:g} s for it{key_hint(keys)}")
    return num_done


def keep_freed_memory() -> None:
    """Have the allocator keep memory freed by one image for the next one, up to 62 MiB.

    Otherwise it is returned to the system and faulted in again, page by page: images of 512 px take a
    producer 1.3 times as long. glibc sets its threshold for mapping blocks to the largest mapped block that
    was freed, up to 32 MiB, and keeps twice that (mallopt(3), M_MMAP_THRESHOLD). Other allocators are
    unaffected.
    """
    bytes(KEPT_BYTES)


def answer_to(message: Message, folder: Path) -> tuple[bytes, list[Buffer]]:
    """A producer's answer to a task."""
    header = message.header
    record = Record(header["id"], tuple(header["segments"]))
    try:
        example = preprocess(record, folder, rule_from_json(header["rule"]))
    except MalformedImageError as error:
        return packed("malformed", task=header["task"], path=str(error.path), reason=str(error)), []
    described, buffers = example_frames(example)
    return packed("done", task=header["task"], example=described), buffers


def settings_text(address: str, folder: Path, *, keys: ClientKeys | None, name: str, silence_s: float) -> str:
    """The input of `main`."""
    given = None if keys is None else asdict(keys)
    return json.dumps(
        {"address": address, "folder": str(folder), "keys": given, "name": name, "silence_s": silence_s}
    )


def main(arguments: Sequence[str]) -> int:
    """Entry point of a local producer; it ends with its server."""
    end_with(from_arguments(arguments))
    settings = json.loads(sys.stdin.read())
    keys = None if settings["keys"] is None else ClientKeys(**settings["keys"])
    try:
        produce(
            settings["address"],
            Path(settings["folder"]),
            keys=keys,
            name=settings["name"],
            silence_s=settings["silence_s"],
        )
    except ValueError as error:
        sys.stderr.write(f"producer {settings['name']}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
