"""Plan files: strict, versioned JSON with a hash of everything that decides the execution."""

import hashlib
import json
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.data.sample import WHERE_SET, Item
from workbench.graph.layer import Operator
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, parse_action
from workbench.whole_file import write_text

FORMAT = "multimodal-workbench plan"
SCHEMA_VERSION = 1

TYPE_KEY = "op"  # tells the members of a union of dataclasses apart


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON. Costs and predictions are not part of a plan, nor of its hash.

    Kept with the plan object, like its look-up tables: encoding a model takes longer than simulating it.
    """
    kept = vars(plan)
    if "plan_hash" not in kept:
        kept["plan_hash"] = _digest(encode(plan))
    return str(kept["plan_hash"])


def dumps(plan: Plan) -> str:
    """The plan file's text; equal plans give equal text."""
    document = encode(plan)
    header = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "hash": _digest(document)}
    return json.dumps(header | {"plan": document}, indent=1) + "\n"


def loads(text: str) -> Plan:
    """The plan of a file's text.

    Raises:
        ValueError: not JSON, another format or version, unknown or missing keys, a value of the
            wrong type, or a hash that does not fit the content.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan file is not JSON (truncated?): {error}") from None
    except RecursionError:
        raise ValueError("not a plan file: nested too deeply") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a plan file: want a JSON object with format {FORMAT!r}")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"plan file has schema version {document.get('schema_version')}, want {SCHEMA_VERSION}"
        )
    _check_keys(document, {"format", "schema_version", "hash", "plan"}, set(), "plan file")
    if document["hash"] != _digest(document["plan"]):
        raise ValueError(f"plan file is corrupt: content does not have the hash {document['hash']!r:.20}...")
    plan = decode(Plan, document["plan"], "plan")
    assert isinstance(plan, Plan)
    return plan


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ValueError, or OSError when it cannot be read."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan file whole or not at all."""
    write_text(dumps(plan), path)


def _digest(document: object) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode(value: object) -> Any:
    """A frozen dataclass as JSON data: fields by name, tuples as lists, actions as text."""
    if isinstance(value, Action):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(member) for member in value]
    if is_dataclass(value) and not isinstance(value, type):
        tag = {TYPE_KEY: type(value).__name__} if _in_union(type(value)) else {}
        return tag | {f.name: encode(getattr(value, f.name)) for f in fields(value) if _stands(f, value)}
    return value


def _stands(field: Field[Any], value: object) -> bool:
    """Whether a plan file names a field: plans older than it keep their hash."""
    return WHERE_SET not in field.metadata or getattr(value, field.name) != field.default


def decode(kind: Any, data: Any, where: str) -> object:
    """JSON data as a value of that type; `where` names the place in error messages."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _decode_union(get_args(kind), data, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, where)
    if kind is Action or kind is Item:
        return _decode_short(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if data not in [member.value for member in kind]:
            raise ValueError(f"{where}: want one of {[member.value for member in kind]}, got {data!r}")
        return kind(data)
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    return _decode_scalar(kind, data, where)


def _decode_scalar(kind: Any, data: Any, where: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is not bool and isinstance(data, bool)):
        raise ValueError(f"{where}: want {kind.__name__}, got {data!r:.60}")
    return data


def _decode_short(kind: Any, data: Any, where: str) -> object:
    if kind is Action:
        if not isinstance(data, str):
            raise ValueError(f"{where}: want an action such as '2F0', got {data!r:.60}")
        return parse_action(data)
    if not (isinstance(data, list) and len(data) == 2 and all(type(n) is int for n in data)):
        raise ValueError(f"{where}: want an item [sample, k], got {data!r:.60}")
    return Item(*data)


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> object:
    if NoneType in members:
        if data is None:
            return None
        rest = tuple(member for member in members if member is not NoneType)
        return decode(rest[0], data, where) if len(rest) == 1 else _decode_union(rest, data, where)
    by_name = {member.__name__: member for member in members}
    if not isinstance(data, dict) or str(data.get(TYPE_KEY)) not in by_name:
        raise ValueError(
            f"{where}: want an object with {TYPE_KEY!r} one of {sorted(by_name)}, got {data!r:.60}"
        )
    rest_of = {key: value for key, value in data.items() if key != TYPE_KEY}
    return _decode_dataclass(by_name[data[TYPE_KEY]], rest_of, where)


def _decode_tuple(members: tuple[Any, ...], data: Any, where: str) -> tuple[object, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{where}: want a list, got {data!r:.60}")
    if len(members) == 2 and members[1] is Ellipsis:
        return tuple(decode(members[0], value, f"{where}[{i}]") for i, value in enumerate(data))
    if len(members) != len(data):
        raise ValueError(f"{where}: want {len(members)} values, got {len(data)}")
    pairs = enumerate(zip(members, data, strict=True))
    return tuple(decode(member, value, f"{where}[{i}]") for i, (member, value) in pairs)


def _decode_dataclass(kind: Any, data: Any, where: str) -> object:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: want an object ({kind.__name__}), got {data!r:.60}")
    known = {f.name for f in fields(kind)}
    _check_keys(data, known, {f.name for f in fields(kind) if not _required(f)}, where)
    hints = _hints(kind)
    try:
        return kind(**{name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _check_keys(data: dict[str, Any], known: set[str], optional: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown key {key!r}{hint}")
    missing = sorted(known - optional - set(data))
    if missing:
        raise ValueError(f"{where}: missing key {missing[0]!r}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _in_union(kind: type) -> bool:
    return kind in get_args(Operator)
