"""Reads a folder of execution traces with mlc-chakra's schema; runs where that is installed."""

import json
import sys
from pathlib import Path
from typing import Any

from chakra.schema.protobuf import et_def_pb2 as schema
from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd
from google.protobuf.json_format import MessageToDict


def main() -> int:
    """Print every file's version and nodes, as one JSON object by file name."""
    print(json.dumps({path.name: _read(path) for path in sorted(Path(sys.argv[1]).glob("*.et"))}))
    return 0


def _read(path: Path) -> dict[str, Any]:
    metadata, nodes = schema.GlobalMetadata(), []
    with openFileRd(str(path)) as file:
        decodeMessage(file, metadata)
        while decodeMessage(file, node := schema.Node()):
            nodes.append(MessageToDict(node, preserving_proto_field_name=True))
        remaining = file.read()
    return {"version": metadata.version, "nodes": nodes, "rest_bytes": len(remaining)}


if __name__ == "__main__":
    sys.exit(main())
