"""A preprocessing server in a thread of the test, with its producers as processes."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from PIL import Image

from runtime.data.records import INDEX
from runtime.preprocess.images import SquareRule
from runtime.preprocess.keys import ServerKeys
from runtime.preprocess.loader import ServedLoader, Subscription
from runtime.preprocess.server import Server, ServerSettings
from tests.waiting import PATIENCE_S

RULE = SquareRule(image_px=32, patch_px=8)
WAIT_S = PATIENCE_S


class Running:
    """A server at work; `failure` is what ended it."""

    def __init__(self, server: Server) -> None:
        self.address = server.address
        self.failure: ValueError | None = None
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.serve(self._stop.is_set)
        except ValueError as error:
            self.failure = error

    def stop(self) -> None:
        self._stop.set()
        self.ended()

    def ended(self) -> None:
        """Wait for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextmanager
def serving(folder: Path, *, keys: ServerKeys | None = None, **settings: object) -> Iterator[Running]:
    """A server on a free port of this machine."""
    chosen = {"rule": RULE, "batch_size": 4, "num_producers": 1, "silence_s": WAIT_S} | settings
    running = Running(Server(ServerSettings(folder=folder, **chosen), keys))  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def loading(server: Running, **settings: object) -> Iterator[ServedLoader]:
    """A trainer's end."""
    chosen = {"timeout_s": WAIT_S} | settings
    with closing(ServedLoader(Subscription(address=server.address, **chosen))) as loader:  # type: ignore[arg-type]
        yield loader


def break_image(folder: Path, example: int) -> Path:
    """Cut the example's first image in the middle."""
    path = folder / "images" / f"{example:05d}-0.png"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def folder_of_images(folder: Path, sizes: list[tuple[int, int]], kind: str = "jpg") -> Path:
    """One example per image of (height, width), with a colour of its own."""
    folder.mkdir()
    lines = []
    for number, (height, width) in enumerate(sizes):
        name = f"{number}.{kind}"
        Image.new("RGB", (width, height), (number % 256, 90, 30)).save(folder / name)
        lines.append(f'{{"id": {number}, "segments": [{{"image": "{name}"}}, {{"text": "n{number}"}}]}}')
    (folder / INDEX).write_text("\n".join(lines) + "\n")
    return folder
