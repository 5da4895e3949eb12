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
from workbench.schedule.action import NEWEST, SPELLINGS, Action, Spelling
from workbench.whole_file import write_text

FORMAT = "multimodal-workbench plan"
SCHEMA_VERSION = NEWEST  # versions differ in the names of actions alone


@kept
def plan_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON. Costs and predictions are not part of a plan, nor of its hash.

    Actions are hashed by their names of version 1: what was stored of a plan is of it in any version.
    Kept, as encoding a model takes longer than simulating it.
    """
    canonical = json.dumps(_JSON[1].encode(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def dumps(plan: Plan, version: int = SCHEMA_VERSION) -> str:
    """The plan file's text in a version of the format; equal plans give equal text."""
    header = {"format": FORMAT, "schema_version": version, "hash": plan_hash(plan)}
    return json.dumps(header | {"plan": _JSON[version].encode(plan)}, indent=1) + "\n"


def loads(text: str) -> Plan:
    """The plan of a file's text, of any version.

    Raises:
        ValueError: not JSON, another format or version, unknown or missing keys, a value of the
            wrong type, or a hash that does not fit the content.
    """
    document = parse_json(text, "plan file")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a plan file: want a JSON object with format {FORMAT!r}")
    plan = _plan_of(document)
    if document["hash"] != plan_hash(plan):
        raise ValueError(f"plan file is corrupt: content does not have the hash {document['hash']!r:.20}...")
    return plan


def _plan_of(document: dict[str, Any]) -> Plan:
    version: Any = document.get("schema_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(f"plan file has schema version {version!r:.20}, want 1 to {SCHEMA_VERSION}")
    check_keys(document, {"format", "schema_version", "hash", "plan"}, set(), "plan file")
    plan = _JSON[version].decode(Plan, document["plan"], "plan")
    assert isinstance(plan, Plan)
    return plan


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ValueError, or OSError when it cannot be read."""
    text = read_bounded(path)
    try:
        return loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan file whole or not at all."""
    write_text(dumps(plan), path)


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
