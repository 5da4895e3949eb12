"""Plan files: strict, versioned JSON with a hash of everything that decides the execution."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from workbench.bounded_file import read_bounded
from workbench.data.sample import Item
from workbench.frozen_json import FrozenJson, Shorthand, check_keys, parse_json
from workbench.json_schema import Schema, of_dataclass
from workbench.model.layer import Operator
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Plan
from workbench.schedule.action import NEWEST, SPELLINGS, Action, Spelling
from workbench.whole_file import write_text

FORMAT = "multimodal-workbench plan"
SCHEMA_VERSION = NEWEST
_MAKERS = ("strategy", "schedule")
UNNAMED_SINCE = 3  # version of plan and trace files; hashes of earlier ones cover the strategy's name


@cached_on_instance
def plan_hash(plan: Plan) -> str:
    """Return the SHA-256 of the canonical JSON of everything that decides the execution.

    The names of strategy and schedule decide nothing, so equal plans of two strategies have one hash. Costs
    and predictions are not part of a plan. Actions are hashed by their names of version 1. The hash is
    cached because encoding a model takes longer than simulating it.
    """
    content = _JSON[1].encode(plan)
    return _digest({key: content[key] for key in content if key not in _MAKERS})


def digest_of(value: object) -> str:
    """Return the SHA-256 of the canonical JSON of a frozen dataclass or a tuple of them."""
    return _digest(_JSON[1].encode(value))


@cached_on_instance
def named_hash(plan: Plan) -> str:
    """Return the hash that files before version 3 use for a plan: with the strategy's name."""
    return digest_of(plan)


def hash_of_version(plan: Plan, version: int) -> str:
    """Return the hash that plan and trace files of a version use for a plan."""
    return plan_hash(plan) if version >= UNNAMED_SINCE else named_hash(plan)


def is_hash_of(digest: str, plan: Plan) -> bool:
    """Whether this hash, from a file of any version, identifies this plan."""
    return digest == plan_hash(plan) or digest == named_hash(plan)


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def dumps(plan: Plan, version: int = SCHEMA_VERSION, *, profiles: Sequence[str] = ()) -> str:
    """Return the text of a plan file in a version of the format; equal plans give equal text.

    Args:
        plan: the plan.
        version: of the format.
        profiles: what it was planned with: the main one, then those of its other kinds of devices. They
            do not change execution and are not hashed.
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": version,
        "hash": hash_of_version(plan, version),
    }
    if profiles:
        header["profile"] = profiles[0] if len(profiles) == 1 else [*profiles]
    return json.dumps(header | {"plan": _JSON[version].encode(plan)}, indent=1) + "\n"


def loads(text: str) -> Plan:
    """Return the plan in the text of a plan file of any version.

    Raises:
        ValueError: not JSON, another format or version, unknown or missing keys, a value of the
            wrong type, or a hash that does not fit the content.
    """
    document = _document(text)
    plan = _plan_of(document)
    if document["hash"] != hash_of_version(plan, document["schema_version"]):
        raise ValueError(f"plan file is corrupt: content does not have the hash {document['hash']!r:.20}...")
    return plan


def planned_with(path: Path) -> tuple[str, ...]:
    """Return the profiles a plan file was made with: names, or paths relative to its folder.

    The main one first, then those of other kinds of devices; none where the file names none.

    Raises ValueError, or OSError when it cannot be read.
    """
    profile = _document(read_bounded(path)).get("profile")
    names = profile if isinstance(profile, list) else [] if profile is None else [profile]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: profile must be a name or a path, or a list of these, got {profile!r:.60}")
    return tuple(names)


def _document(text: str) -> dict[str, Any]:
    document = parse_json(text, "plan file")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a plan file: want a JSON object with format {FORMAT!r}")
    return document


def _plan_of(document: dict[str, Any]) -> Plan:
    version: Any = document.get("schema_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(f"plan file has schema version {version!r:.20}, want 1 to {SCHEMA_VERSION}")
    check_keys(document, {"format", "schema_version", "hash", "profile", "plan"}, {"profile"}, "plan file")
    plan = _JSON[version].decode(Plan, document["plan"], "plan")
    assert isinstance(plan, Plan)
    return plan


def read_plan(path: Path) -> Plan:
    """Return the plan in a file. Raises ValueError, or OSError when it cannot be read."""
    text = read_bounded(path)
    try:
        return loads(text)
    except ValueError as error:
        is_job = path.suffix in (".yaml", ".yml")
        reason = "a job file has no plan yet; want what `workbench plan` writes" if is_job else error
        raise ValueError(f"{path}: {reason}") from None


def write_plan(plan: Plan, path: Path, *, profiles: Sequence[str] = ()) -> None:
    """Write the plan file whole or not at all; `profiles` as in `dumps`."""
    write_text(dumps(plan, profiles=profiles), path)


def plan_schema() -> Schema:
    """Return the JSON Schema of a plan file of the newest version."""
    integer = {"type": "integer"}
    schema = of_dataclass(
        Plan,
        _JSON[SCHEMA_VERSION],
        {Action: {"type": "string"}, Item: {"type": "array", "items": integer, "minItems": 2, "maxItems": 2}},
    )
    text = {"type": "string"}
    properties = {
        "format": {"const": FORMAT},
        "schema_version": {"const": SCHEMA_VERSION},
        "hash": text | {"description": "SHA-256 of everything that decides the execution"},
        "profile": {
            "anyOf": [text, {"type": "array", "items": text}],
            "description": "what it was planned with: a name, or a path from the file's folder; a list where "
            "devices are of several kinds",
        },
        "plan": {"$ref": schema["$ref"]},
    }
    return {
        "$schema": schema["$schema"],
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name != "profile"],
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }


def _actions(spelling: Spelling) -> Shorthand:
    def read(data: Any, where: str) -> Action:
        if not isinstance(data, str):
            raise ValueError(f"{where}: want an action such as '2F0', got {data!r:.60}")
        return spelling.read(data)

    return Shorthand(spelling.write, read)


def _item(data: Any, where: str) -> Item:
    if not (isinstance(data, list) and len(data) == 2 and all(type(n) is int for n in data)):
        raise ValueError(f"{where}: want an item [sample, k], got {data!r:.60}")
    return Item(*data)


_JSON = {
    version: FrozenJson(
        shorthands={Action: _actions(spelling), Item: Shorthand(list, _item)}, tagged=get_args(Operator)
    )
    for version, spelling in SPELLINGS.items()
}
