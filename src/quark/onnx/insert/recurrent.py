"""LSTM computed from integers: com.microsoft's DynamicQuantizeLSTM.

Its kernel finds the scales of data and state at run time. Weights are codes with gates on the last axis:

    LSTM                   W [directions, 4 * hidden, input], R [directions, 4 * hidden, hidden]
    DynamicQuantizeLSTM    W [directions, input, 4 * hidden], R [directions, hidden, 4 * hidden], both with scales and
                           zero points of shape [directions] or [directions, 4 * hidden]

Zero points for gates have to be equal: 0 for int8, any for uint8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.onnx.graph import add_initializer, add_node, input_value, is_constant, replace_value
from quark.onnx.insert.dynamic import Shared
from quark.onnx.insert.pairs import MICROSOFT, codes, storage_type, stored
from quark.onnx.large_tensors import ComputedTensor
from quark.plan import AffineChoice, TensorChoice

INPUTS = 8  # inputs of LSTM: X, W, R, B, sequence_lens, initial_h, initial_c, P


def insert_dynamic_lstm(model: ir.Model, node: ir.Node, choices: Mapping[int, TensorChoice], shared: Shared) -> None:
    """Replace an LSTM by DynamicQuantizeLSTM. Layers with the same weights share the codes."""
    operands = [input_value(node, index) for index in range(INPUTS)]
    parameters: list[ir.Value | None] = []
    for index in (1, 2):
        operands[index], scale, zero_point = _weight(model, node, index, choices, shared)
        parameters += [scale, zero_point]
    model.opset_imports.setdefault(MICROSOFT, 1)
    result = add_node(
        model,
        "DynamicQuantizeLSTM",
        [*operands, *parameters],
        before=node,
        name=f"{node.name}_DynamicQuantizeLSTM",
        domain=MICROSOFT,
        attributes={key: attr.value for key, attr in node.attributes.items() if key != "layout"},
        outputs=len(node.outputs),
    )
    for old, new in zip(node.outputs, result.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        if not replace_value(old, new):
            raise ModelError(f"node '{node.name}' (LSTM): its output '{old.name}' cannot be replaced")
    names = [str(old.name) for old in node.outputs]
    model.graph.remove(node, safe=True)
    for name, new in zip(names, result.outputs, strict=True):
        if not new.is_graph_output():
            new.name = name  # as in every quantized form, so that the two networks can be compared


def _weight(
    model: ir.Model, node: ir.Node, index: int, choices: Mapping[int, TensorChoice], shared: Shared
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Codes, scale and zero point of a weight."""
    value, choice = input_value(node, index), choices[index].choice if index in choices else None
    source = value.const_value if value is not None and is_constant(value) else None
    if not isinstance(choice, AffineChoice) or value is None or source is None or len(source.shape) != 3:
        raise ModelError(f"node '{node.name}' (LSTM): dynamic quantization needs constant weights with three axes")
    if choice.axis not in (None, 1) or choice.group_size is not None or len(set(choice.zero_point)) > 1:
        raise ModelError(
            f"node '{node.name}' (LSTM): DynamicQuantizeLSTM takes one scale or one for each gate, and one zero point; "
            f"'{value.name}' is {choice}, axis {choice.axis}"
        )
    directions, gates, _ = source.shape.numpy()
    shape = (directions,) if choice.axis is None else (directions, gates)
    keys = [(value, choice, name) for name in ("quantized", "scale", "zero_point")]
    if keys[0] not in shared:
        zero_point = np.array(choice.zero_point).astype(storage_type(choice.format))
        contents: list[Any] = [
            stored(model, _turned(source, choice)),
            np.broadcast_to(np.array(choice.scale, np.float32), shape).copy(),
            np.broadcast_to(zero_point, shape).copy(),
        ]
        for key, content in zip(keys, contents, strict=True):
            shared[key] = add_initializer(model, f"{value.name}_{key[-1]}", content)
    return shared[keys[0]], shared[keys[1]], shared[keys[2]]


def _turned(source: ir.TensorProtocol, choice: AffineChoice) -> ComputedTensor:
    """The codes with the last two axes exchanged, computed as a whole: they take a quarter of the weight's size."""
    integers = codes(source, choice, has_float32_scale=True)
    first, second, third = source.shape.numpy()

    def compute() -> Iterator[NDArray[Any]]:
        yield np.ascontiguousarray(integers.numpy().transpose(0, 2, 1))

    return ComputedTensor(compute, integers.dtype, ir.Shape([first, third, second]))
