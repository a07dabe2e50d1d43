"""The nodes that stayed in float, and why: as the report beside the file says it, else as the file shows it."""

from __future__ import annotations

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.onnx.diagnose.operands import Constants, operands
from quark.onnx.diagnose.pair import Side
from quark.onnx.diagnose.sites import COMPUTING
from quark.plan import SkippedNode

NO_QUANTIZER = "no quantizer in the file"


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
    if path is None or not path.is_file():
        return None
    try:
        content = Fields(read_json(path, path.name, REPORT), path.name)
        if content.mapping("result").text("sha256") != side.facts.sha256:
            return None
        nodes = content.mapping("plan").mappings("skipped")
        return tuple(SkippedNode(each.text("node"), each.text("op_type"), each.text("reason")) for each in nodes)
    except InvalidValueError:
        return None  # some other file of that name
