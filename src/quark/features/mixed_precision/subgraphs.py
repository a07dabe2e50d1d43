"""Layers that are mixed together, as a file names them:

    {"num_subgraphs": 1, "subgraphs": [{"name": "stem", "start_nodes": ["conv1"], "end_nodes": ["relu1"]}]}

A subgraph has all nodes that its first ones lead to, up to its last ones. Nodes that are in several belong to the first
of them, and those in none form the subgraph `UNGROUPED`. Names are those of the float model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import SETTINGS, Fields, read_json

UNGROUPED = "__ungrouped__"


def read_subgraphs(path: Path, model: ir.Model) -> dict[str, frozenset[str]]:
    """The nodes of each subgraph of a file, by its name, in the order of the file."""
    label = f"AutoMixprecision.SubgraphJson '{path}'"
    if not path.is_file():
        raise InvalidValueError(f"{label}: there is no such file")
    content = Fields(read_json(path, label, SETTINGS), label)
    entries = content.mappings("subgraphs")
    if content.has("num_subgraphs") and content.integer("num_subgraphs") != len(entries):
        raise InvalidValueError(
            f"{label}: num_subgraphs is {content.integer('num_subgraphs')}, and it has {len(entries)} subgraphs"
        )
    nodes = {str(node.name): node for node in model.graph}
    subgraphs: dict[str, frozenset[str]] = {}
    taken: set[str] = set()
    for entry in entries:
        name, first, last = entry.text("name"), entry.texts("start_nodes"), entry.texts("end_nodes")
        if name in subgraphs or name == UNGROUPED:
            raise InvalidValueError(f"{label}: the name '{name}' is taken: expected another one for each subgraph")
        for node in (*first, *last):
            if node not in nodes:
                raise unknown_name(f"node of subgraph '{name}' ({label})", node, nodes)
        subgraphs[name] = frozenset(_between(nodes, first, last) - taken)
        taken |= subgraphs[name]
    return subgraphs


def _between(nodes: dict[str, ir.Node], first: Sequence[str], last: Sequence[str]) -> set[str]:
    """The nodes that the first ones lead to, not beyond the last ones."""
    seen: set[str] = set()
    pending = deque(first)
    while pending:
        name = pending.popleft()
        if name in seen:
            continue
        seen.add(name)
        if name not in last:
            pending.extend(str(user.name) for value in nodes[name].outputs for user, _ in value.uses())
    return seen & nodes.keys()
