"""CURVE keys, by which preprocessing servers and their clients authenticate each other."""

import json
import os
import stat
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from runtime.preprocess.messages import Role
from workbench.plain_text import plain
from workbench.strict_json import parse_strict
from workbench.whole_file import naming

KEY_CHARACTERS = 40  # of a key of 32 bytes in Z85
PRIVATE = 0o600
OTHERS = 0o077
SERVER_FILE = "server.json"
MOST_FILE_BYTES = 2**20
LISTS = {Role.PRODUCER: "producers", Role.TRAINER: "trainers", Role.READER: "readers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """The server's own pair, and the public keys of permitted clients with their roles."""

    public: str
    secret: str
    roles: tuple[tuple[str, Role], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """A trainer's or producer's own pair and the server's public key."""

    public: str
    secret: str
    server: str


def make_keys() -> tuple[ServerKeys, dict[Role, ClientKeys]]:
    """New keys of a server and of one client of each role, from the system's random source."""
    public, secret = client_pair()
    clients = {}
    for role in Role:
        own, own_secret = client_pair()
        clients[role] = ClientKeys(public=own, secret=own_secret, server=public)
    roles = tuple((keys.public, role) for role, keys in clients.items())
    return ServerKeys(public=public, secret=secret, roles=roles), clients


def client_pair() -> tuple[str, str]:
    """A new (public, secret) pair in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def write_keys(folder: Path) -> tuple[Path, ...]:
    """Write `server.json`, `producer.json`, `trainer.json`, `reader.json`, readable only by their owner.

    Raises:
        ValueError: one of them exists already; keys are never replaced.
        OSError: one cannot be written; names it, and none is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server, clients = make_keys()
    contents = {folder / SERVER_FILE: _server_file(server)}
    contents |= {folder / f"{role}.json": asdict(keys) for role, keys in clients.items()}
    for path in contents:
        if path.exists():
            raise ValueError(f"keys {path}: exists already; give another folder")
    with ExitStack() as unfinished:
        for path, content in contents.items():
            path.touch(mode=PRIVATE, exist_ok=False)
            unfinished.callback(path.unlink)
            with naming(path):
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.pop_all()
    return tuple(contents)


def _server_file(keys: ServerKeys) -> dict[str, Any]:
    lists = {name: [key for key, key_role in keys.roles if key_role is role] for role, name in LISTS.items()}
    return {"public": keys.public, "secret": keys.secret, **lists}


def read_server_keys(path: Path) -> ServerKeys:
    """Read a server's keys; ValueError where the file is invalid, or others can read it."""
    data = _read(path, {"public", "secret", *LISTS.values()})
    roles: list[tuple[Any, Role]] = []
    for role, name in LISTS.items():
        keys = data[name] if isinstance(data[name], list) else [None]
        roles += [(key, role) for key in keys]
    _check(path, data["public"], data["secret"], *(key for key, _ in roles))
    if len(dict(roles)) != len(roles):
        raise ValueError(f"keys {path}: a client's key stands twice; want one role for each")
    return ServerKeys(public=data["public"], secret=data["secret"], roles=tuple(roles))


def read_client_keys(path: Path) -> ClientKeys:
    """Read a client's keys; ValueError where the file is invalid, or others can read it."""
    data = _read(path, {"public", "secret", "server"})
    _check(path, *data.values())
    return ClientKeys(**data)


def _read(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_FILE_BYTES + 1)
        data = parse_strict(content, most_bytes=MOST_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"keys {path}: no JSON object: {error}") from None
    if stat.S_ISREG(mode) and mode & OTHERS:
        raise ValueError(f"keys {path}: others can read it; want it readable by its owner alone: chmod 600")
    if not isinstance(data, dict) or set(data) != names:
        got = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"keys {path}: want {', '.join(sorted(names))}, got {plain(got, 80)}")
    return data


def _check(path: Path, *keys: object) -> None:
    for key in keys:
        if not isinstance(key, str) or len(key) != KEY_CHARACTERS:
            raise ValueError(f"keys {path}: a key has {KEY_CHARACTERS} characters in Z85")


def key_hint(keys: ClientKeys | None) -> str:
    """A hint about servers that do not answer: with other keys, encryption looks like silence."""
    if keys is None:
        return "; a server with keys answers nobody without --keys"
    return "; a server with other keys, or without any, does not answer these"
