"""Turn Clip(x, 0, 6) into Relu(x), so that channels in front of it can be rescaled freely. Not exact.

    Clip(x, 0, 6) = Relu(x)   where x <= 6, and only there

The one rewrite that changes the function: it must be asked for. Networks that were trained with the bound lose by it,
some of them much; equalization that keeps the bound is the better choice for most.

Applies to float tensors with constant bounds of 0 and 6.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import become, input_value, is_float, nodes
from quark.onnx.optimize.rewrite import scalar


class ReplaceClip6Relu:
    name: ClassVar[str] = "replace_clip6_relu"
    is_default: ClassVar[bool] = False

    def apply(self, model: ir.Model) -> int:
        found = [node for node in nodes(model) if node.op_type == "Clip" and not node.domain and _is_relu6(node)]
        for node in found:
            become(node, "Relu", [input_value(node, 0)])
        return len(found)


def _is_relu6(clip: ir.Node) -> bool:
    bounds = scalar(input_value(clip, 1)), scalar(input_value(clip, 2))
    return is_float(input_value(clip, 0)) and bounds == (0, 6)
