"""Activations of 2 to 7 bits as codes of 8 bits that are clipped before.

    Q4(x)   =   Q8(clip(x, (qmin - z) s, (qmax - z) s)),     both with scale s and zero point z

ONNX has types of 4 bits and none of 3 or 6, and ONNX Runtime refuses a file in which a Relu stands before a
QuantizeLinear of 4 bits. Constants are not concerned: their codes are stored, not computed. Nor is what was clipped
already and only moved since: ONNX Runtime breaks files in which a Clip keeps a QuantizeLinear from a Reshape.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.formats.affine import integer_format
from quark.onnx.graph import add_initializer, add_node, replace_input
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.torch.export.names import rename

_MOVES = frozenset({"Concat", "Flatten", "MaxPool", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})


def clip_narrow_codes(model: ir.Model, plan: QuantizationPlan) -> QuantizationPlan:
    """Put the clips into the model, in place; the plan for what comes out of them."""
    clipped: dict[str, AffineChoice] = {}  # the narrow codes that a value is known to have
    return replace(plan, tensors=tuple(_clipped(model, each, clipped) if _is_narrow(each) else each for each in plan))


def _is_narrow(each: TensorChoice) -> bool:
    choice = each.choice
    is_computed = each.role is Role.ACTIVATION and isinstance(choice, AffineChoice) and choice.axis is None
    return is_computed and integer_format(choice.format).bits < 8


def _clipped(model: ir.Model, each: TensorChoice, clipped: dict[str, AffineChoice]) -> TensorChoice:
    choice = each.choice
    assert isinstance(choice, AffineChoice)
    fmt, value = integer_format(choice.format), _value(model, each.tensor)
    wide = replace(choice, format="int8" if fmt.signed else "uint8")
    if _is_moved(value, choice, clipped):
        clipped[each.tensor] = choice
        return replace(each, choice=wide)
    dtype = np.float16 if value.dtype is ir.DataType.FLOAT16 else np.float32
    scale, zero_point = np.float32(choice.scale[0]), choice.zero_point[0]
    bounds = [
        add_initializer(model, f"{each.tensor}_{name}", np.array((code - zero_point) * scale, dtype))
        for name, code in (("lowest", fmt.qmin), ("highest", fmt.qmax))
    ]
    first = next(iter(model.graph)) if value.producer() is None else None
    name = f"{each.tensor}_{choice.format}"
    clip = add_node(model, "Clip", [value, *bounds], before=first, after=value.producer(), name=name).outputs[0]
    clip.shape = value.shape
    for reader in each.readers:
        _read_instead(model, reader, clip)
    clipped[str(clip.name)] = choice
    reason = f"{each.reason}; {choice.format}, clipped".removeprefix("; ")
    return replace(each, tensor=str(clip.name), choice=wide, reason=reason)


def _is_moved(value: ir.Value, choice: AffineChoice, clipped: dict[str, AffineChoice]) -> bool:
    """That all of the value had these codes before an operator that only moves."""
    producer = value.producer()
    if producer is None or producer.domain or producer.op_type not in _MOVES:
        return False
    moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
    return all(each is not None and clipped.get(str(each.name)) == choice for each in moved)


def _read_instead(model: ir.Model, reader: Reader, value: ir.Value) -> None:
    if not reader.is_graph_output:
        node = next(node for node in model.graph if node.name == reader.node)
        replace_input(node, reader.index, value)
        return
    old = model.graph.outputs[reader.index]
    name, old.name = str(old.name), f"{old.name}_unclipped"
    rename(model, value, name)
    model.graph.outputs[reader.index] = value


def _value(model: ir.Model, name: str) -> ir.Value:
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    return next(value for value in values if value.name == name)
