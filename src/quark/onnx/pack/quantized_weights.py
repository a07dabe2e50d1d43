"""Float weights behind a quantizer become what the quantizer makes of them, as other tools' files have them.

    MX-, BFPQuantizeDequantize of a constant     the constant is rounded, the node becomes our mark: what is in the
                                                 file then is what every run computed
    QuantizeLinear of a constant                 the codes are computed by ONNX Runtime itself and stored in the place
                                                 of node and weight; so for ExtendedQuantizeLinear

A constant that something else reads in float stays, and its quantizer with it: two copies would make no smaller file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from quark.errors import QuarkError
from quark.onnx.large_tensors import ComputedTensor
from quark.onnx.pack.editing import Editing
from quark.onnx.pack.facts import LeftWeight
from quark.ops.constant_marks import CONSTANT_DOMAIN, define_constant_marks
from quark.ops.onnx_nodes import node_attributes
from quark.ops.schema import DOMAIN, VERSION, quantizer_of
from quark.plan import BlockChoice
from quark.rounded import block_values

BLOCK = ("MXQuantizeDequantize", "BFPQuantizeDequantize")
LINEAR = {("", "QuantizeLinear"), ("com.microsoft", "QuantizeLinear"), (DOMAIN, "ExtendedQuantizeLinear")}
ROUNDED = "was in float behind {}: rounded first, the float numbers are not kept"
CODE_TYPES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)

IsOne: TypeAlias = Callable[[onnx.NodeProto], bool]


def is_block_quantizer(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in BLOCK


def round_block_weights(editing: Editing) -> tuple[dict[str, str], list[LeftWeight]]:
    """Round what block quantizers read: the names of the new constants, each with a note; and what was left."""
    notes: dict[str, str] = {}
    left: list[LeftWeight] = []
    for name, nodes in _behind(editing, is_block_quantizer):
        reason = _obstacle(editing, name, is_block_quantizer) or _round(editing, name, nodes, notes)
        if reason:
            left.append(LeftWeight(name, editing.tensor(name).nbytes, reason))
    if notes:
        editing.import_domain(CONSTANT_DOMAIN, VERSION)
        define_constant_marks(editing.proto)
    return notes, left


def store_integer_codes(editing: Editing) -> tuple[dict[str, tuple[int, ir.TensorProtocol]], list[LeftWeight]]:
    """Compute what QuantizeLinear makes of constants: the new ones, each with the bytes of the float weight."""
    made: dict[str, tuple[int, ir.TensorProtocol]] = {}
    left: list[LeftWeight] = []
    for name, nodes in _behind(editing, _is_linear):
        reason = _obstacle(editing, name, _is_linear) or _linear_obstacle(editing, nodes)
        size = editing.tensor(name).nbytes
        if reason:
            left.append(LeftWeight(name, size, reason))
            continue
        for node in nodes:
            codes = _codes(editing, node)
            made[node.output[0]] = (size, codes)
            editing.add_constant(node.output[0], codes, editing.constants[name])
            editing.graph.node.remove(node)
        editing.remove_constant(name)
    return made, left


def _behind(editing: Editing, is_one: IsOne) -> list[tuple[str, list[onnx.NodeProto]]]:
    """The constants that such nodes of the main graph read first, in their order."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in editing.graph.node:
        if is_one(node) and node.input[0] in editing.constants:
            found.setdefault(node.input[0], []).append(node)
    return [(name, found[name]) for name in editing.order if name in found]


def _is_linear(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) in LINEAR


def _obstacle(editing: Editing, name: str, is_one: IsOne) -> str:
    """Why the float numbers have to stay; empty if they need not."""
    if name in editing.inputs:
        return "it is an input of the graph as well: whoever runs the model may give another"
    if name in editing.outputs:
        return "it is an output of the graph"
    main = {id(node) for node in editing.graph.node}
    for node in editing.readers(name):
        if not (is_one(node) and id(node) in main and list(node.input).count(name) == 1):
            return f"{node.op_type} '{node.name or node.output[0]}' reads it in float as well"
    return ""


def _linear_obstacle(editing: Editing, nodes: list[onnx.NodeProto]) -> str:
    if not all(each in editing.constants for node in nodes for each in node.input if each):
        return "its scale or zero point is computed at run time"
    zero_points = [node.input[2] for node in nodes if len(node.input) > 2 and node.input[2]]
    types = {editing.tensor(each).dtype for each in zero_points} - set(CODE_TYPES)
    return f"its codes are of type {types.pop().name.lower()}, which is not packed" if types else ""


def _round(editing: Editing, name: str, nodes: list[onnx.NodeProto], notes: dict[str, str]) -> str:
    tensor = editing.tensor(name)
    if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return f"it is of type {tensor.dtype.name.lower()}"
    try:
        quantizers = [quantizer_of(node.op_type, node_attributes(node)) for node in nodes]
    except QuarkError as error:
        return str(error)
    for node, quantizer in zip(nodes, quantizers, strict=True):
        choice = BlockChoice(*quantizer)
        new = editing.fresh(f"{name}_{choice.format}")
        editing.add_constant(new, _rounded(tensor, choice, new), editing.constants[name])
        node.domain = CONSTANT_DOMAIN
        node.input[0] = new
        notes[new] = ROUNDED.format(node.op_type)
    editing.remove_constant(name)
    return ""


def _rounded(tensor: ir.TensorProtocol, choice: BlockChoice, name: str) -> ir.TensorProtocol:
    """The weight as its quantizer leaves it; computed when it is read, so that not all of them are held."""

    def compute() -> Iterator[NDArray[Any]]:
        yield block_values(np.require(tensor.numpy(), requirements=["C", "A"]), choice)

    return ComputedTensor(compute, tensor.dtype, ir.Shape(tensor.shape.numpy()), name)


def _codes(editing: Editing, node: onnx.NodeProto) -> ir.TensorProtocol:
    """What ONNX Runtime, with our library, computes for the node."""
    from quark.onnx.session import open_session

    inputs = [name for name in node.input if name]
    tensors = [ir.serde.serialize_tensor(editing.tensor(name)) for name in inputs]
    for name, tensor in zip(inputs, tensors, strict=True):
        tensor.name = name
    # as an input, so that the runtime computes it once, and not twice when it folds constants
    first = helper.make_tensor_value_info(node.input[0], tensors[0].data_type, tensors[0].dims)
    result = helper.make_empty_tensor_value_info(node.output[0])
    graph = helper.make_graph([node], "codes", [first], [result], tensors[1:])
    model = helper.make_model(graph, opset_imports=editing.proto.opset_import, ir_version=editing.proto.ir_version)
    array = np.ascontiguousarray(editing.tensor(node.input[0]).numpy())
    codes = open_session(model.SerializeToString(), threads=1).run(None, {node.input[0]: array})[0]
    return ir.Tensor(codes, name=node.output[0])
