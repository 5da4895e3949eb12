"""JSON Schemas, for editors, of the files that `FrozenJson` reads."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.docstrings import fields_of, summary_of
from workbench.frozen_json import TYPE_KEY, FrozenJson, is_required

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_SCALARS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    NoneType: "null",
}


def of_dataclass(kind: type, form: FrozenJson, shorthands: Mapping[type, Schema]) -> Schema:
    """The JSON Schema of a frozen dataclass.

    Args:
        shorthands: schemas of the types for which the form has a custom notation.
    """
    schemas = _Schemas(form, shorthands)
    root = schemas.of(kind)
    return {"$schema": DIALECT, **root, "$defs": schemas.definitions}


def describe(schema: Schema, kind: type) -> None:
    """Add the descriptions of a class and its fields, from its docstring, to its schema."""
    schema["description"] = summary_of(kind).partition("\n\n")[0]
    descriptions = fields_of(kind)
    for name, field_schema in schema.get("properties", {}).items():
        if name in descriptions:
            field_schema["description"] = descriptions[name]


class _Schemas:
    """Builds schemas of types; those of dataclasses become definitions by name."""

    def __init__(self, form: FrozenJson, shorthands: Mapping[type, Schema]) -> None:
        self._form, self._shorthands = form, shorthands
        self.definitions: dict[str, Schema] = {}

    def of(self, kind: Any) -> Schema:
        origin, members = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return {"anyOf": [self.of(member) for member in members]}
        if origin is tuple:
            return self._of_tuple(members)
        if kind in self._shorthands:
            return self._shorthands[kind]
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [member.value for member in kind]}
        if is_dataclass(kind):
            return self._of_dataclass(kind)
        return {"type": _SCALARS[kind]}

    def _of_tuple(self, members: tuple[Any, ...]) -> Schema:
        if len(members) == 2 and members[1] is Ellipsis:
            return {"type": "array", "items": self.of(members[0])}
        items = [self.of(member) for member in members]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}

    def _of_dataclass(self, kind: Any) -> Schema:
        name = kind.__name__
        if name not in self.definitions:
            self.definitions[name] = {}  # for recursive types
            hints = get_type_hints(kind)
            schema: Schema = {
                "type": "object",
                "properties": {field.name: dict(self.of(hints[field.name])) for field in fields(kind)},
                "required": [field.name for field in fields(kind) if is_required(field)],
                "additionalProperties": False,
            }
            describe(schema, kind)
            if kind in self._form.tagged:
                schema["properties"][TYPE_KEY] = {"const": name}
                schema["required"].append(TYPE_KEY)
            self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}
