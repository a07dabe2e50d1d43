"""Weight-only products: com.microsoft's MatMulNBits, which keeps a weight of 2, 4 or 8 bits in groups.

The weight of shape [K, N] becomes, for each of its N columns, blocks of `group_size` codes along K, packed from the
lowest bits of a byte up, with one scale a block. Codes are unsigned; without zero points the middle code is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.affine import quantize_affine
from quark.onnx.graph import add_initializer, add_node, attribute, constant, replace_value
from quark.onnx.insert.constants import parameters_of
from quark.onnx.insert.options import NBitsOptions
from quark.onnx.insert.pairs import MICROSOFT
from quark.plan import AffineChoice, QuantizationPlan, Role

Array = NDArray[Any]


def insert_matmul_nbits(
    model: ir.Model, nodes: Mapping[str, ir.Node], plan: QuantizationPlan, options: NBitsOptions
) -> None:
    """Replace every product whose weight the plan quantizes in groups."""
    for each in plan:
        if each.role is Role.WEIGHT and isinstance(each.choice, AffineChoice) and each.choice.group_size is not None:
            for reader in each.readers:
                _replace(model, nodes[reader.node], each.choice, options)


def _replace(model: ir.Model, node: ir.Node, choice: AffineChoice, options: NBitsOptions) -> None:
    weight = constant(node.inputs[1])
    assert weight is not None, node.name
    is_turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    codes, scale, zero_point = _columns(weight, choice, options.bits)
    if is_turned:
        codes, scale, zero_point = codes.T, scale.T, zero_point.T
    k, n = codes.shape
    name = str(node.inputs[1].name)  # type: ignore[union-attr]
    inputs: list[ir.Value | None] = [
        node.inputs[0],
        add_initializer(model, f"{name}_packed", pack_columns(codes, options.bits, choice.group_size or k)),
        add_initializer(model, f"{name}_scales", np.ascontiguousarray(scale.T).astype(weight.dtype).ravel()),
    ]
    if not options.is_symmetric:
        packed = pack_columns(zero_point, options.bits, 8 // options.bits).reshape(-1)
        inputs.append(add_initializer(model, f"{name}_zero_points", packed))
    attributes = {"K": k, "N": n, "bits": options.bits, "block_size": choice.group_size}
    attributes["accuracy_level"] = options.accuracy_level
    model.opset_imports.setdefault(MICROSOFT, 1)
    product = add_node(
        model, "MatMulNBits", inputs, before=node, name=f"{node.name}_nbits", domain=MICROSOFT, attributes=attributes
    )
    result = product.outputs[0]
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if bias is not None:
        result = add_node(model, "Add", [result, bias], before=node, name=f"{node.name}_bias").outputs[0]
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    replace_value(node.outputs[0], result)
    model.graph.remove(node, safe=True)


def _columns(weight: Array, choice: AffineChoice, bits: int) -> tuple[Array, Array, Array]:
    """Unsigned codes in the shape of the weight; scales and zero points in the shape of the groups."""
    parameters = parameters_of(choice, weight.shape)
    codes = np.asarray(quantize_affine(weight.astype(np.float32), parameters)).astype(np.int16)
    offset = (1 << (bits - 1)) if parameters.format.signed else 0
    zero_point = np.asarray(parameters.zero_point).astype(np.int16) + offset
    return codes + offset, np.asarray(parameters.scale), zero_point


def pack_columns(codes: Array, bits: int, group_size: int) -> Array:
    """[K, N] codes to [N, blocks, bytes], the last block filled up with the middle code.

    >>> pack_columns(np.array([[1], [2], [3]]), bits=4, group_size=4).tolist()
    [[[33, 131]]]
    """
    if bits not in (2, 4, 8):
        raise InvalidValueError(f"MatMulNBits of {bits} bits: expected 2, 4 or 8")
    k, n = codes.shape
    blocks = -(-k // group_size)
    full = np.full((n, blocks * group_size), 1 << (bits - 1), np.uint8)
    full[:, :k] = codes.T
    per_byte = 8 // bits
    parts = full.reshape(n, blocks, -1, per_byte)
    shifts = (np.arange(per_byte) * bits).astype(np.uint8)
    return np.asarray(np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint8))
