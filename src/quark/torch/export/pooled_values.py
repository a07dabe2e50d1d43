"""The quantizer behind a mean over an image goes on both sides of the Flatten that ONNX needs there.

torch's mean over two axes drops them; ONNX has GlobalAveragePool and then Flatten. Between the two would be a float
tensor, which no integer kernel and no NPU takes. The same quantizer before and behind changes no value.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from quark.plan import AffineChoice, QuantizationPlan, Reader, TensorChoice

_MOVING = ("Flatten", "Reshape", "Squeeze")


def choices_of_pools(
    model: ir.Model, plan: QuantizationPlan, of_torch: Collection[ir.Value]
) -> dict[str, TensorChoice]:
    """By tensor, the choices to add to the plan; what torch has as a tensor of its own is as it is there."""
    known = {each.tensor: each for each in plan}
    others = {str(each.name) for each in of_torch}
    found: dict[str, TensorChoice] = {}
    for node in model.graph:
        behind = known.get(str(node.outputs[0].name))
        source = node.inputs[0] if node.inputs else None
        if node.op_type not in _MOVING or behind is None or source is None:
            continue
        producer, name = source.producer(), str(source.name)
        is_pool = producer is not None and producer.op_type == "GlobalAveragePool"
        if is_pool and name not in known and name not in others and isinstance(behind.choice, AffineChoice):
            readers = (Reader(str(node.name), 0),)
            found[name] = TensorChoice(name, behind.role, behind.choice, readers, "as behind the Flatten")
    return found
