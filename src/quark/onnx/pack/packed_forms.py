"""The storage and unpacking of a packed weight, by profile: one class each.

The profile native uses ONNX's own small types, behind DequantizeLinear with a scale for each block:

    FP4, FP8, FP6      FLOAT4E2M1, FLOAT8E4M3FN, FLOAT8E5M2, FLOAT6E2M3, FLOAT6E3M2
    MXINT8, BFP16      INT8; the scale counts in units of the last bit: 2^(e - 6)
    scales             FLOAT8E8M0, the tensor's shape with blocks for elements along its axis

ONNX takes scales of that type from opset 24 on, and 6-bit floats from opset 28 on. There is no type for microexponents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, version_converter

from quark.errors import ModelError
from quark.formats.packing import encode_elements, pack_bits, unpack_bits
from quark.formats.spec import BlockFormat, IntFormat
from quark.onnx.pack.block_codes import BlockCodes, Geometry, integers
from quark.onnx.pack.editing import Editing
from quark.onnx.pack.layouts import Shared, layout_of
from quark.onnx.pack.unpacking import (
    EXPONENTS,
    FUNCTION_DOMAIN,
    FUNCTION_VERSION,
    Functions,
    Unpacking,
    portable_nodes,
)
from quark.ops.onnx_nodes import MIN_IR_VERSION, define_constant_marks
from quark.ops.portable_functions import define_portable_functions
from quark.ops.schema import DOMAIN

NATIVE = "native"
CODES = "codes"
SCALE_OPSET = 24
OPSETS = {"FLOAT6E2M3": 28, "FLOAT6E3M2": 28}
IR_VERSIONS = {24: 12, 28: 14}  # the first that came with the opset
NOT_RUN = "ONNX Runtime 1.31 does not run it on a CPU: its DequantizeLinear takes no scales of FLOAT8E8M0"
TYPES = {
    "fp4_e2m1": "FLOAT4E2M1",
    "fp6_e2m3": "FLOAT6E2M3",
    "fp6_e3m2": "FLOAT6E3M2",
    "fp8_e4m3": "FLOAT8E4M3FN",
    "fp8_e5m2": "FLOAT8E5M2",
    "int8": "INT8",
    "int8sym": "INT8",
}


@dataclass(frozen=True)
class Stored:
    """The stored form of a weight: tensors by role, and the values that unpacking makes."""

    layout: str
    planes: dict[str, str]
    values: tuple[str, ...]


class Form(ABC):
    """A profile at work on one model."""

    remarks: tuple[str, ...] = ()

    def __init__(self, editing: Editing) -> None:
        self._editing = editing
        self._nodes: list[onnx.NodeProto] = []

    def obstacle(self, fmt: BlockFormat) -> str:
        """The reason why weights of that format are not supported; empty if they are."""
        return ""

    @abstractmethod
    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        """Put the weight's tensors in its place, or say why not."""

    @abstractmethod
    def finish(self) -> tuple[str, ...]:
        """Put the nodes into the graph. Return the values that several weights read."""

    def _replace(self, name: str, tensors: dict[str, ir.TensorProtocol]) -> dict[str, str]:
        """Put the tensors in the place of a weight. Return their names by role."""
        editing = self._editing
        like = editing.constants[name]
        editing.remove_constant(name)
        planes = {role: editing.fresh(f"{name}.{role}") for role in tensors}
        for role, tensor in tensors.items():
            tensor.name = planes[role]
            editing.add_constant(planes[role], tensor, like)
        return planes


class PortableForm(Form):
    """Standard operators."""

    def __init__(self, editing: Editing) -> None:
        super().__init__(editing)
        self._shared = Shared(editing.fresh)

    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        layout = layout_of(codes, self._editing.opset)
        unpacking = Unpacking(codes.format, codes.geometry, layout, int(tensor.dtype))
        planes = self._replace(name, {role: ir.Tensor(array) for role, array in unpacking.planes(codes).items()})
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


class NativeForm(Form):
    """ONNX's own types behind DequantizeLinear."""

    def __init__(self, editing: Editing) -> None:
        super().__init__(editing)
        self._formats: dict[str, BlockFormat] = {}

    def obstacle(self, fmt: BlockFormat) -> str:
        return native_obstacle(fmt)

    def store(self, name: str, codes: BlockCodes, tensor: ir.TensorProtocol) -> Stored | str:
        element, geometry = codes.format.element, codes.geometry
        if codes.has_minus_zero:
            return "it holds -0, which INT8 has none of"
        fraction_bits = element.fraction_bits if isinstance(element, IntFormat) else 0
        exponents = codes.exponents.astype(np.int16) - fraction_bits
        if (exponents < 0).any():
            return "some of its blocks are smaller than the scales of ONNX go"
        scale_shape = list(geometry.shape)
        scale_shape[geometry.axis] = geometry.blocks
        scales = exponents.astype(np.uint8).reshape(scale_shape).view(ml_dtypes.float8_e8m0fnu)
        tensors = {CODES: _codes_tensor(codes), EXPONENTS: ir.Tensor(scales, ir.DataType.FLOAT8E8M0)}
        planes = self._replace(name, tensors)
        self._nodes.append(
            helper.make_node(
                "DequantizeLinear",
                [planes[CODES], planes[EXPONENTS]],
                [name],
                name=self._editing.fresh(f"{name}.DequantizeLinear"),
                axis=geometry.axis,
                block_size=geometry.size,
                output_dtype=int(tensor.dtype),
            )
        )
        self._formats[str(codes.format)] = codes.format
        return Stored(NATIVE, planes, (name,))

    def finish(self) -> tuple[str, ...]:
        """Raise the model to the opset that the types need, with the functions in it."""
        editing, proto = self._editing, self._editing.proto
        self.remarks = (
            f"this file is for runtimes that take {', '.join(self._formats)} in ONNX's own types. {NOT_RUN}",
        )
        before, opset = editing.opset, max(_opset_of(fmt) for fmt in self._formats.values())
        if before < opset:
            _raise_opset(editing, opset)
            self.remarks += (f"the opset was raised from {before} to {opset}, which these types need",)
            has_portable = any(function.domain == DOMAIN for function in proto.functions)
            define_constant_marks(proto)
            if has_portable:
                define_portable_functions(proto)
        versions = [version for first, version in IR_VERSIONS.items() if first <= max(before, opset)]
        proto.ir_version = max(proto.ir_version, *versions)
        editing.put_first(self._nodes)
        # ONNX's reference evaluator takes no defaults from a function: write them at the nodes that leave them out
        defaults = {(function.domain, function.name): function.attribute_proto for function in proto.functions}
        for node in proto.graph.node:
            given, known = {attr.name for attr in node.attribute}, defaults.get((node.domain, node.op_type), ())
            node.attribute.extend(attr for attr in known if attr.name not in given)
        return ()


def native_obstacle(fmt: BlockFormat) -> str:
    """The reason why ONNX, or the installed version, has no type for weights of that format; empty if there is one."""
    if fmt.sub_blocks is not None:
        return f"ONNX has no type for the microexponents of '{fmt}'; the profiles portable and custom take it"
    if fmt.scale is not None:
        return f"ONNX's DequantizeLinear takes no scales of {fmt.scale}; the profiles portable and custom take '{fmt}'"
    kind = TYPES.get(str(fmt.element))
    if kind is None:
        return f"ONNX has no type for the elements of '{fmt}'; the profiles portable and custom take it"
    if kind not in ir.DataType.__members__ or not hasattr(onnx.TensorProto, kind):
        return f"the installed onnx has no type {kind}: a newer one has it"
    if _opset_of(fmt) > onnx.defs.onnx_opset_version():
        return f"{kind} needs opset {_opset_of(fmt)}, and the installed onnx has {onnx.defs.onnx_opset_version()}"
    return ""


def native_sizes(fmt: BlockFormat, geometry: Geometry) -> dict[str, tuple[ir.DataType, int]]:
    """The type and the number of elements of each tensor."""
    blocks = geometry.outer * geometry.blocks * geometry.inner
    codes = ir.DataType[TYPES[str(fmt.element)]]
    return {CODES: (codes, geometry.count), EXPONENTS: (ir.DataType.FLOAT8E8M0, blocks)}


def native_codes(fmt: BlockFormat, geometry: Geometry, planes: dict[str, ir.TensorProtocol]) -> BlockCodes:
    """The codes of a weight that `NativeForm` stored."""
    element = fmt.element
    exponents = np.frombuffer(planes[EXPONENTS].tobytes(), np.uint8)
    if isinstance(element, IntFormat):
        numbers = planes[CODES].numpy().astype(np.float32) * np.float32(2.0**-element.fraction_bits)
        elements = encode_elements(element, numbers).astype(np.uint8)
        exponents = np.minimum(exponents.astype(np.int16) + element.fraction_bits, 254).astype(np.uint8)
    else:
        packed = np.frombuffer(planes[CODES].tobytes(), np.uint8)
        elements = unpack_bits(packed, element.bits, geometry.count).astype(np.uint8)
    outer, inner = geometry.outer, geometry.inner
    elements = elements.reshape(outer, geometry.length, inner)
    return BlockCodes(fmt, geometry, elements, exponents.reshape(outer, geometry.blocks, inner))


def _opset_of(fmt: BlockFormat) -> int:
    return OPSETS.get(TYPES[str(fmt.element)], SCALE_OPSET)


def _codes_tensor(codes: BlockCodes) -> ir.TensorProtocol:
    element, shape = codes.format.element, codes.geometry.shape
    kind = ir.DataType[TYPES[str(element)]]
    if isinstance(element, IntFormat):
        return ir.Tensor(integers(element)[codes.elements].reshape(shape), kind)
    if element.bits == 8:
        return ir.Tensor(codes.elements.reshape(shape).view(kind.numpy()), kind)
    packed = pack_bits(codes.elements.reshape(-1), element.bits)
    return ir.PackedTensor(packed, kind, shape=ir.Shape(shape))


def _raise_opset(editing: Editing, opset: int) -> None:
    """Convert the nodes of the graph to the opset. Raises ModelError if ONNX's converter fails.

    Weights do not go through the converter: to it they are inputs. Nor do functions, which are written again.
    """
    slim = onnx.ModelProto()
    slim.CopyFrom(editing.proto)
    own = [info for info in slim.graph.input if info.name not in editing.constants]
    del slim.functions[:], slim.graph.initializer[:], slim.graph.input[:]
    slim.graph.input.extend(own)
    read = {name for node in slim.graph.node for name in node.input}
    made = {name for node in slim.graph.node for name in node.output} | {info.name for info in own}
    for name in sorted(read - made - {""}):
        tensor = editing.constants.get(name)
        if tensor is None or name in editing.weights:
            kind = onnx.TensorProto.FLOAT if tensor is None else tensor.data_type
            slim.graph.input.append(helper.make_tensor_value_info(name, kind, None if tensor is None else tensor.dims))
        else:
            slim.graph.initializer.append(tensor)
    try:
        converted = version_converter.convert_version(slim, opset)
    except Exception as error:  # whatever its C++ side threw
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the profile native needs opset {opset}, the model has {editing.opset}, and ONNX's converter cannot raise "
            f"it: {reason}. Use the profile portable, or export the model for that opset"
        ) from error
    for tensor in converted.graph.initializer:
        if tensor.name not in editing.constants:
            editing.constants[tensor.name] = tensor
            editing.order.append(tensor.name)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in converted.graph.node]
    del editing.graph.node[:]
    editing.graph.node.extend(nodes)
    for entry in editing.proto.opset_import:
        if not entry.domain:
            entry.version = next(imported.version for imported in converted.opset_import if not imported.domain)
