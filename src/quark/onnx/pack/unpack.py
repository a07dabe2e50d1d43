"""Unpack: restore a packed file, with every weight a float initializer of its own name at its old place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.onnx.file_graph import read_message
from quark.onnx.input_files import check_unchanged
from quark.onnx.large_tensors import PIECE_BYTES, ComputedTensor, MappedTensor, Message
from quark.onnx.pack.block_codes import BlockCodes, Geometry, obstacle
from quark.onnx.pack.editing import KEY, Editing, WeightRecord, read_record
from quark.onnx.pack.layouts import read_layout
from quark.onnx.pack.pack import FLOATS, UnpackFacts
from quark.onnx.pack.packed_forms import NATIVE, native_codes, native_obstacle, native_sizes
from quark.onnx.pack.unpacking import FUNCTION_DOMAIN, Unpacking
from quark.onnx.save import SaveOptions, check_output, together, write_model
from quark.ops.onnx_nodes import all_nodes


def unpack_model(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> UnpackFacts:
    """Write the model that a file was packed from; the input is never overwritten. Raises ModelError if the file is not
    packed, or was changed since."""
    path = check_output(target, source, has_report=False)
    message, size, files = read_message(source)
    unpacked, facts = unpack_message(message, os.fspath(source))
    with together(path):
        written = write_model(unpacked, path, SaveOptions())
        check_unchanged(files)
    return replace(facts, bytes_before=size, bytes_after=written.bytes)


def unpack_message(message: Message, name: str = "the model") -> tuple[Message, UnpackFacts]:
    """`unpack_model` in memory. Weights are computed when they are read or written, and not kept."""
    editing = Editing(message)
    record = read_record(editing.proto, name)
    before = sum(editing.tensor(constant).nbytes for constant in editing.order)
    restored = [_restored(editing, weight, name) for weight in record.weights]
    # remove the nodes that made the weights, the tensors that only they read, and all other traces of packing
    proto = editing.proto
    made = {value for weight in record.weights for value in weight.values} | set(record.values)
    kept = [node for node in editing.graph.node if not made.intersection(node.output)]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del editing.graph.node[:]
    editing.graph.node.extend(nodes)
    own = {plane for weight in record.weights for plane in weight.planes.values()} | set(record.values)
    read = {value for node in all_nodes(editing.graph.node) for value in node.input} | editing.outputs
    for plane in (own - read) & editing.constants.keys():
        editing.remove_constant(plane)
    for entry in [prop for prop in proto.metadata_props if prop.key == KEY]:
        proto.metadata_props.remove(entry)
    for function in [function for function in proto.functions if function.domain == FUNCTION_DOMAIN]:
        proto.functions.remove(function)
    for opset in [opset for opset in proto.opset_import if opset.domain == FUNCTION_DOMAIN]:
        proto.opset_import.remove(opset)
    if record.profile != NATIVE and 0 < record.ir_version <= proto.ir_version:
        proto.ir_version = record.ir_version
    for weight, (tensor, like) in sorted(zip(record.weights, restored, strict=True), key=lambda pair: pair[0].position):
        if weight.name in editing.constants:
            raise ModelError(
                f"weight '{weight.name}' is packed, and the file has a constant of that name: it was changed"
            )
        editing.add_constant(weight.name, tensor, like)
        editing.order.insert(min(weight.position, len(editing.order) - 1), editing.order.pop())
    after = sum(editing.tensor(constant).nbytes for constant in editing.order)
    return editing.message(), UnpackFacts(tuple(weight.name for weight in record.weights), before, after)


def _restored(editing: Editing, record: WeightRecord, name: str) -> tuple[ir.TensorProtocol, onnx.TensorProto]:
    """The weight, computed from its codes when it is read, and a tensor of the file with its documentation."""
    codes = _codes(editing, record, f"'{name}': weight '{record.name}'")
    dtype = ir.DataType(record.dtype)
    geometry = codes.geometry
    planes = [editing.tensor(plane) for plane in record.planes.values()]
    files = {plane.file for plane in planes if isinstance(plane, MappedTensor)}

    def compute() -> Iterator[NDArray[Any]]:
        # decode rows of the first axis at once, or blocks of one row
        row_bytes, rows, steps = geometry.length * geometry.inner * 4, 1, geometry.length
        if row_bytes <= PIECE_BYTES or geometry.outer > 1:
            rows = max(1, PIECE_BYTES // row_bytes)
        else:
            steps = max(1, PIECE_BYTES // (geometry.size * geometry.inner * 4)) * geometry.size
        for outer in range(0, geometry.outer, rows):
            for along in range(0, geometry.length, steps):
                part = (
                    slice(outer, min(geometry.outer, outer + rows)),
                    slice(along, min(geometry.length, along + steps)),
                )
                check_unchanged(files)  # the codes are views
                with np.errstate(over="ignore", invalid="ignore"):
                    yield codes.values(*part).astype(dtype.numpy(), copy=False)

    like = editing.constants[next(iter(record.planes.values()))]
    return ComputedTensor(compute, dtype, ir.Shape(record.shape), record.name), like


def _codes(editing: Editing, record: WeightRecord, label: str) -> BlockCodes:
    """The codes of a weight. Everything about them is checked first, sizes before memory is taken."""
    fmt = record.format
    problem = obstacle(fmt, record.shape)
    if not problem and ir.DataType(record.dtype) not in FLOATS:
        problem = f"type {record.dtype}"
    if record.layout == NATIVE:
        problem = problem or native_obstacle(fmt)
    missing = [plane for plane in record.planes.values() if plane not in editing.constants]
    if problem or missing or not record.planes:
        raise ModelError(f"{label}: {problem or f'its tensors {missing} are not in the file'}. It was changed since")
    geometry = Geometry.of(fmt, record.shape, record.axis)
    tensors = {role: editing.tensor(plane) for role, plane in record.planes.items()}
    unpacking = None
    if record.layout == NATIVE:
        sizes = native_sizes(fmt, geometry)
    else:
        unpacking = Unpacking(fmt, geometry, read_layout(record.layout, fmt.element), record.dtype)
        kinds = unpacking.sizes().items()
        sizes = {role: (ir.DataType.from_numpy(np.dtype(kind)), count) for role, (kind, count) in kinds}
    for role, expected in sizes.items():
        if role not in tensors or (tensors[role].dtype, tensors[role].size) != expected:
            raise ModelError(
                f"{label}: its tensor for {role} is not as its format needs it. The file was changed since"
            )
    if unpacking is None:
        return native_codes(fmt, geometry, tensors)
    return unpacking.codes({role: np.asarray(tensor.numpy()) for role, tensor in tensors.items()})
