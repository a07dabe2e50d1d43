"""How a packed weight is stored and unpacked, by profile: one class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import onnx
import onnx_ir as ir

from quark.formats.spec import BlockFormat
from quark.onnx.pack.block_codes import BlockCodes
from quark.onnx.pack.editing import Editing
from quark.onnx.pack.layouts import layout_of
from quark.onnx.pack.native_types import NATIVE, lift, native_node, native_obstacle, native_opset, native_planes
from quark.onnx.pack.unpacking import Unpacking
from quark.onnx.pack.writers import FUNCTION_DOMAIN, FUNCTION_VERSION, Functions, Shared, portable_nodes
from quark.ops.constant_marks import MIN_IR_VERSION


@dataclass(frozen=True)
class Stored:
    """Where a weight went: tensors by role, and the values that unpacking makes."""

    layout: str
    planes: dict[str, str]
    values: tuple[str, ...]


class Form(Protocol):
    """A profile at work on one model."""

    remarks: tuple[str, ...]

    def obstacle(self, fmt: BlockFormat) -> str:
        """Why weights of that format are not taken; empty if they are."""
        ...

    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        """Put the weight's tensors in its place, or say why not."""
        ...

    def finish(self) -> tuple[str, ...]:
        """Put the nodes into the graph; the values that several weights read."""
        ...


class PortableForm:
    """Standard operators."""

    remarks: tuple[str, ...] = ()

    def __init__(self, editing: Editing) -> None:
        self._editing = editing
        self._shared = Shared(editing.fresh)
        self._nodes: list[onnx.NodeProto] = []

    def obstacle(self, fmt: BlockFormat) -> str:
        return ""

    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        editing = self._editing
        layout = layout_of(codes, editing.opset)
        unpacking = Unpacking(codes.format, codes.geometry, layout, int(tensor.dtype))
        arrays = unpacking.planes(codes)
        like = editing.constants[name]
        editing.remove_constant(name)
        planes = {role: editing.fresh(f"{name}.{role}") for role in arrays}
        for role, array in arrays.items():
            editing.add_constant(planes[role], ir.Tensor(array, name=planes[role]), like)
        nodes = self._nodes_of(unpacking, name, planes)
        self._nodes += nodes
        return Stored(layout.name, planes, tuple(node.output[0] for node in nodes))

    def finish(self) -> tuple[str, ...]:
        editing = self._editing
        for tensor in self._shared.constants:
            editing.add_constant(tensor.name, ir.serde.deserialize_tensor(tensor))
        editing.put_first([*self._shared.nodes, *self._nodes])
        shared = [tensor.name for tensor in self._shared.constants]
        return (*shared, *(node.output[0] for node in self._shared.nodes))

    def _nodes_of(self, unpacking: Unpacking, name: str, planes: dict[str, str]) -> list[onnx.NodeProto]:
        return portable_nodes(unpacking, name, planes, self._shared)


class CustomForm(PortableForm):
    """One node for each weight: a call of a function of the same operators."""

    def __init__(self, editing: Editing) -> None:
        super().__init__(editing)
        self._functions = Functions(editing.opset)

    def finish(self) -> tuple[str, ...]:
        editing = self._editing
        values = super().finish()
        editing.import_domain(FUNCTION_DOMAIN, FUNCTION_VERSION)
        editing.proto.functions.extend(self._functions.defined.values())
        editing.proto.ir_version = max(editing.proto.ir_version, MIN_IR_VERSION)
        return values

    def _nodes_of(self, unpacking: Unpacking, name: str, planes: dict[str, str]) -> list[onnx.NodeProto]:
        return [self._functions.node(unpacking, name, planes, self._shared)]


class NativeForm:
    """ONNX's own types behind DequantizeLinear."""

    def __init__(self, editing: Editing) -> None:
        self._editing = editing
        self._nodes: list[onnx.NodeProto] = []
        self._formats: dict[str, BlockFormat] = {}
        self.remarks: tuple[str, ...] = ()

    def obstacle(self, fmt: BlockFormat) -> str:
        return native_obstacle(fmt)

    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        editing = self._editing
        arrays = native_planes(codes)
        if isinstance(arrays, str):
            return arrays
        like = editing.constants[name]
        editing.remove_constant(name)
        planes = {role: editing.fresh(f"{name}.{role}") for role in arrays}
        for role, stored in arrays.items():
            stored.name = planes[role]
            editing.add_constant(planes[role], stored, like)
        label = editing.fresh(f"{name}.DequantizeLinear")
        self._nodes.append(native_node(codes, int(tensor.dtype), planes, name, label))
        self._formats[str(codes.format)] = codes.format
        return Stored(NATIVE, planes, (name,))

    def finish(self) -> tuple[str, ...]:
        opset = max(native_opset(fmt) for fmt in self._formats.values())
        self.remarks = lift(self._editing, opset, list(self._formats))
        self._editing.put_first(self._nodes)
        _spell_out(self._editing.proto)
        return ()


def _spell_out(proto: onnx.ModelProto) -> None:
    """Write the defaults of functions' attributes at the nodes that leave them out: ONNX's reference evaluator takes
    none from the function."""
    defaults = {(each.domain, each.name): each.attribute_proto for each in proto.functions}
    for node in proto.graph.node:
        given = {each.name for each in node.attribute}
        node.attribute.extend(each for each in defaults.get((node.domain, node.op_type), ()) if each.name not in given)
