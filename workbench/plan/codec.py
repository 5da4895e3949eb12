"""Plan files: strict, versioned JSON with a hash of everything that decides the execution."""

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

from workbench.bounded_file import read_bounded
from workbench.data.sample import Item
from workbench.frozen_json import FrozenJson, Shorthand, check_keys, parse_json
from workbench.model.layer import Operator
from workbench.plan.kept import kept
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, parse_action
from workbench.whole_file import write_text

FORMAT = "multimodal-workbench plan"
SCHEMA_VERSION = 1


@kept
def plan_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON. Costs and predictions are not part of a plan, nor of its hash.

    Kept, as encoding a model takes longer than simulating it.
    """
    return _digest(_JSON.encode(plan))


def dumps(plan: Plan) -> str:
    """The plan file's text; equal plans give equal text."""
    document = _JSON.encode(plan)
    header = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "hash": _digest(document)}
    return json.dumps(header | {"plan": document}, indent=1) + "\n"


def loads(text: str) -> Plan:
    """The plan of a file's text.

    Raises:
        ValueError: not JSON, another format or version, unknown or missing keys, a value of the
            wrong type, or a hash that does not fit the content.
    """
    document = parse_json(text, "plan file")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a plan file: want a JSON object with format {FORMAT!r}")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"plan file has schema version {document.get('schema_version')}, want {SCHEMA_VERSION}"
        )
    check_keys(document, {"format", "schema_version", "hash", "plan"}, set(), "plan file")
    if document["hash"] != _digest(document["plan"]):
        raise ValueError(f"plan file is corrupt: content does not have the hash {document['hash']!r:.20}...")
    plan = _JSON.decode(Plan, document["plan"], "plan")
    assert isinstance(plan, Plan)
    return plan


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ValueError, or OSError when it cannot be read."""
    try:
        return loads(read_bounded(path))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan file whole or not at all."""
    write_text(dumps(plan), path)


def _digest(document: object) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _action(data: Any, where: str) -> Action:
    if not isinstance(data, str):
        raise ValueError(f"{where}: want an action such as '2F0', got {data!r:.60}")
    return parse_action(data)


def _item(data: Any, where: str) -> Item:
    if not (isinstance(data, list) and len(data) == 2 and all(type(n) is int for n in data)):
        raise ValueError(f"{where}: want an item [sample, k], got {data!r:.60}")
    return Item(*data)


_JSON = FrozenJson(
    shorthands={Action: Shorthand(str, _action), Item: Shorthand(list, _item)}, tagged=get_args(Operator)
)
