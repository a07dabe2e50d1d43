"""The nodes that stayed in float, and why: as the report beside the file says it, else as the file shows it."""

from __future__ import annotations

import json

from quark.onnx.diagnose.operands import Constants, operands
from quark.onnx.diagnose.pair import Side
from quark.onnx.diagnose.sites import COMPUTING
from quark.plan import SkippedNode

NO_QUANTIZER = "no quantizer in the file"
MOST_BYTES = 256 << 20  # of a report


def find_skipped(side: Side) -> tuple[SkippedNode, ...]:
    """From MODEL.json beside MODEL.onnx where that is of this very file."""
    told = _told(side)
    if told is not None:
        return told
    constants = Constants()
    return tuple(
        SkippedNode(str(node.name), node.op_type, NO_QUANTIZER)
        for node in side.model.graph
        if node.op_type in COMPUTING and not operands(node, constants)
    )


def _told(side: Side) -> tuple[SkippedNode, ...] | None:
    path = None if side.path is None else side.path.with_suffix(".json")
    try:
        if path is None or not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["result"]["sha256"] != side.facts.sha256:
            return None
        return tuple(
            SkippedNode(str(e["node"]), str(e["op_type"]), str(e["reason"])) for e in content["plan"]["skipped"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # some other file of that name
