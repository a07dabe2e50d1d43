"""Let a Conv do the padding that a Pad before it does.

    Conv(Pad(x, p), pads=q)   becomes   Conv(x, pads=p+q)

Applies when the Pad is constant, fills with zeros, pads nothing but spatial axes and takes nothing away, and when
everything that reads it is a Conv with explicit pads (`auto_pad` chooses by the size that it sees).
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import attribute, constant, input_value, nodes, rank, readers, remove_node, replace_input
from quark.onnx.optimize.rewrite import integers


class FusePadIntoConv:
    name: ClassVar[str] = "fuse_pad_into_conv"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_fuse(node) for node in nodes(model) if node.op_type == "Pad" and not node.domain)


def _fuse(pad: ir.Node) -> bool:
    source, output = input_value(pad, 0), pad.outputs[0]
    pads = _spatial_pads(pad)
    uses = readers(output)
    if pads is None or not uses or output.is_graph_output() or not all(_takes_pads(node, i) for node, i in uses):
        return False
    for conv, _ in uses:
        own = list(attribute(conv, "pads") or [0] * len(pads))
        conv.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, pads, strict=True)])
        conv.attributes.pop("auto_pad", None)
        replace_input(conv, 0, source)
    remove_node(pad)
    return True


def _takes_pads(node: ir.Node, index: int) -> bool:
    is_conv = node.op_type == "Conv" and not node.domain and index == 0
    return is_conv and attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _spatial_pads(pad: ir.Node) -> list[int] | None:
    """The pads of the axes from the third on, beginnings before ends, where a Conv can do the same."""
    given, size = integers(input_value(pad, 1)), rank(input_value(pad, 0))
    filling = constant(input_value(pad, 2))
    if attribute(pad, "mode", "constant") != "constant" or given is None or size is None or size < 3:
        return None
    if input_value(pad, 2) is not None and (filling is None or filling.any()):
        return None
    axes = list(range(size)) if input_value(pad, 3) is None else integers(input_value(pad, 3))
    if axes is None or len(given) != 2 * len(axes):
        return None
    pads = [0] * (2 * size)
    for position, axis in enumerate(axes):
        pads[axis % size] = given[position]
        pads[axis % size + size] = given[position + len(axes)]
    if any(each < 0 for each in pads) or any(pads[i] for i in (0, 1, size, size + 1)):
        return None
    return pads[2:size] + pads[size + 2 :]
