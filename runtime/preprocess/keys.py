"""CURVE keys: who may connect to a preprocessing server, and which server is the right one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

KEY_CHARACTERS = 40  # of a key of 32 bytes in Z85
PRIVATE = 0o600
SERVER_FILE, CLIENT_FILE = "server.json", "client.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """The server's own pair and the public keys of everyone who may connect."""

    public: str
    secret: str
    clients: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """A trainer's or producer's own pair and the server's public key."""

    public: str
    secret: str
    server: str


def make_keys() -> tuple[ServerKeys, ClientKeys]:
    """A server's keys and those of its only client, fresh from the system's random source."""
    server, client = client_pair(), client_pair()
    return (
        ServerKeys(public=server[0], secret=server[1], clients=(client[0],)),
        ClientKeys(public=client[0], secret=client[1], server=server[0]),
    )


def client_pair() -> tuple[str, str]:
    """(public, secret) in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def write_keys(folder: Path) -> tuple[Path, Path]:
    """`server.json` and `client.json`, readable by their owner alone.

    Raises:
        ValueError: one of them is there already; keys are never replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / SERVER_FILE, folder / CLIENT_FILE)
    for path in paths:
        if path.exists():
            raise ValueError(f"keys {path}: there already; give another folder")
    server, client = make_keys()
    for path, content in zip(paths, (asdict(server), asdict(client)), strict=True):
        path.touch(mode=PRIVATE, exist_ok=False)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return paths


def read_server_keys(path: Path) -> ServerKeys:
    """ValueError where the file holds no server's keys."""
    data = _read(path, {"public", "secret", "clients"})
    clients: list[Any] = data["clients"] if isinstance(data["clients"], list) else [None]
    _check(path, data["public"], data["secret"], *clients)
    return ServerKeys(public=data["public"], secret=data["secret"], clients=tuple(clients))


def read_client_keys(path: Path) -> ClientKeys:
    """ValueError where the file holds no client's keys."""
    data = _read(path, {"public", "secret", "server"})
    _check(path, *data.values())
    return ClientKeys(**data)


def _read(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"keys {path}: no JSON object: {error}") from None
    if not isinstance(data, dict) or set(data) != names:
        found = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"keys {path}: want {', '.join(sorted(names))}, got {found}")
    return data


def _check(path: Path, *keys: object) -> None:
    for key in keys:
        if not isinstance(key, str) or len(key) != KEY_CHARACTERS:
            raise ValueError(f"keys {path}: a key has {KEY_CHARACTERS} characters in Z85")


def key_hint(keys: ClientKeys | None) -> str:
    """What a server that does not answer may be: encrypted talk under other keys looks like silence."""
    if keys is None:
        return "; a server with keys answers nobody without --keys"
    return "; a server with other keys, or without any, does not answer these"
