"""Weights in ONNX's own small types, behind DequantizeLinear with a scale for each block.

    FP4, FP8, FP6      FLOAT4E2M1, FLOAT8E4M3FN, FLOAT8E5M2, FLOAT6E2M3, FLOAT6E3M2
    MXINT8, BFP16      INT8; the scale counts in units of the last bit: 2^(e - 6)
    scales             FLOAT8E8M0, the tensor's shape with blocks for elements along its axis

ONNX takes scales of that type from opset 24 on, and 6-bit floats from opset 28 on. Microexponents have no type.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from quark.errors import ModelError
from quark.formats.element_codes import decode_elements, encode_elements, pack_bits, unpack_bits
from quark.formats.spec import BlockFormat, ElementFormat, IntFormat
from quark.onnx.pack.block_codes import BlockCodes, Geometry
from quark.onnx.pack.editing import Editing
from quark.onnx.pack.lift import lifted_nodes
from quark.onnx.pack.unpacking import EXPONENTS
from quark.ops.constant_marks import define_constant_marks
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


def native_obstacle(fmt: BlockFormat) -> str:
    """Why ONNX has no type for weights of that format, or the installed one does not; empty if there is one."""
    if fmt.sub_blocks is not None:
        return f"ONNX has no type for the microexponents of '{fmt}'; the profiles portable and custom take it"
    kind = TYPES.get(str(fmt.element))
    if kind is None:
        return f"ONNX has no type for the elements of '{fmt}'; the profiles portable and custom take it"
    if kind not in ir.DataType.__members__ or not hasattr(onnx.TensorProto, kind):
        return f"the installed onnx has no type {kind}: a newer one has it"
    if native_opset(fmt) > onnx.defs.onnx_opset_version():
        return f"{kind} needs opset {native_opset(fmt)}, and the installed onnx has {onnx.defs.onnx_opset_version()}"
    return ""


def native_opset(fmt: BlockFormat) -> int:
    return OPSETS.get(TYPES[str(fmt.element)], SCALE_OPSET)


def native_planes(codes: BlockCodes) -> dict[str, ir.TensorProtocol] | str:
    """The tensors of a weight by role, or why it has none."""
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
    return {CODES: _codes_tensor(codes), EXPONENTS: ir.Tensor(scales, ir.DataType.FLOAT8E8M0)}


def native_node(codes: BlockCodes, dtype: int, planes: dict[str, str], weight: str, name: str) -> onnx.NodeProto:
    inputs = [planes[CODES], planes[EXPONENTS]]
    return helper.make_node(
        "DequantizeLinear",
        inputs,
        [weight],
        name=name,
        axis=codes.geometry.axis,
        block_size=codes.geometry.size,
        output_dtype=dtype,
    )


def native_sizes(fmt: BlockFormat, geometry: Geometry) -> dict[str, tuple[ir.DataType, int]]:
    """The type and the number of elements of each tensor."""
    blocks = geometry.outer * geometry.blocks * geometry.inner
    codes = ir.DataType[TYPES[str(fmt.element)]]
    return {CODES: (codes, geometry.count), EXPONENTS: (ir.DataType.FLOAT8E8M0, blocks)}


def native_codes(fmt: BlockFormat, geometry: Geometry, planes: dict[str, ir.TensorProtocol]) -> BlockCodes:
    """The codes of a weight that `native_planes` stored."""
    element = fmt.element
    if isinstance(element, IntFormat):
        integers = planes[CODES].numpy().astype(np.float32) * np.float32(2.0**-element.fraction_bits)
        elements = encode_elements(element, integers).astype(np.uint8)
        raised = np.frombuffer(planes[EXPONENTS].tobytes(), np.uint8).astype(np.int16) + element.fraction_bits
        exponents = np.minimum(raised, 254).astype(np.uint8)
    else:
        packed = np.frombuffer(planes[CODES].tobytes(), np.uint8)
        elements = unpack_bits(packed, element.bits, geometry.count).astype(np.uint8)
        exponents = np.frombuffer(planes[EXPONENTS].tobytes(), np.uint8)
    outer, inner = geometry.outer, geometry.inner
    elements = elements.reshape(outer, geometry.length, inner)
    return BlockCodes(fmt, geometry, elements, exponents.reshape(outer, geometry.blocks, inner))


def lift(editing: Editing, opset: int, formats: list[str]) -> tuple[str, ...]:
    """Raise the model to the opset, with the functions in it; what a user must know."""
    names = ", ".join(formats)
    remarks = [f"this file is for runtimes that take {names} in ONNX's own types. {NOT_RUN}"]
    before = editing.opset
    if before < opset:
        lifted_nodes(editing, opset)
        remarks.append(f"the opset was raised from {before} to {opset}, which these types need")
        has_portable = any(function.domain == DOMAIN for function in editing.proto.functions)
        define_constant_marks(editing.proto)
        if has_portable:
            define_portable_functions(editing.proto)
    versions = [version for first, version in IR_VERSIONS.items() if first <= max(before, opset)]
    editing.proto.ir_version = max(editing.proto.ir_version, *versions)
    return tuple(remarks)


def _codes_tensor(codes: BlockCodes) -> ir.TensorProtocol:
    element, shape = codes.format.element, codes.geometry.shape
    kind = ir.DataType[TYPES[str(element)]]
    if kind == ir.DataType.INT8:
        return ir.Tensor(_integers(element, codes.elements).reshape(shape), kind)
    if element.bits == 8:
        return ir.Tensor(codes.elements.reshape(shape).view(kind.numpy()), kind)
    packed = pack_bits(codes.elements.reshape(-1), element.bits)
    return ir.PackedTensor(packed, kind, shape=ir.Shape(shape))


def _integers(element: ElementFormat, codes: Any) -> Any:
    if not isinstance(element, IntFormat):
        raise ModelError(f"'{element}' is no integer")
    table = decode_elements(element, np.arange(256, dtype=np.uint8), np.dtype(np.float32))
    return (table * np.float32(2.0**element.fraction_bits)).astype(np.int8)[codes]
