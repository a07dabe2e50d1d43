"""Weight-only products: com.microsoft's MatMulNBits, which keeps a weight of 2, 4 or 8 bits in groups.

The weight of shape [K, N] becomes, for each of its N columns, blocks of `group_size` codes along K, packed from the
lowest bits of a byte up, with one scale a block. Codes are unsigned; without zero points the middle code is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.affine import integer_format
from quark.onnx.graph import add_initializer, add_node, attribute, replace_value
from quark.onnx.insert.constant_pieces import code_pieces, stored
from quark.onnx.insert.options import NBitsOptions
from quark.onnx.insert.pairs import MICROSOFT
from quark.onnx.large_tensors import ComputedTensor
from quark.plan import AffineChoice, QuantizationPlan, Role
from quark.rounded import parameters_of

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
    value = node.inputs[1]
    source = None if value is None else value.const_value
    assert source is not None, node.name
    name = str(node.inputs[1].name)  # type: ignore[union-attr]
    is_turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    k, n = reversed(source.shape.numpy()) if is_turned else source.shape.numpy()
    scale, zero_point = _parameters(source, choice, options.bits)
    if is_turned:
        scale, zero_point = scale.T, zero_point.T
    scales = np.ascontiguousarray(scale.T).astype(source.dtype.numpy()).ravel()
    inputs: list[ir.Value | None] = [
        node.inputs[0],
        add_initializer(model, f"{name}_packed", stored(model, _packed(source, choice, options.bits, is_turned))),
        add_initializer(model, f"{name}_scales", scales),
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
    tensor = node.outputs[0].name
    replace_value(node.outputs[0], result)
    model.graph.remove(node, safe=True)
    result.name = tensor  # as every quantized form has it: by it the two networks can be compared


def _parameters(source: ir.TensorProtocol, choice: AffineChoice, bits: int) -> tuple[Array, Array]:
    """Scales, and zero points of unsigned codes, in the shape of the groups."""
    parameters = parameters_of(choice, tuple(source.shape.numpy()))
    zero_point = np.asarray(parameters.zero_point).astype(np.int16) + _offset(choice, bits)
    return np.asarray(parameters.scale), zero_point


def _offset(choice: AffineChoice, bits: int) -> int:
    """From the codes of the plan to unsigned ones."""
    return (1 << (bits - 1)) if integer_format(choice.format).signed else 0


def _packed(source: ir.TensorProtocol, choice: AffineChoice, bits: int, is_turned: bool) -> ComputedTensor:
    """The unsigned codes of a weight, [K, N] or turned, as `pack_columns` has them; as a whole: its pieces are not
    consecutive there. It is a fraction of the weight."""
    k, n = reversed(source.shape.numpy()) if is_turned else source.shape.numpy()
    size = choice.group_size or k
    shape = (n, -(-k // size), size * bits // 8)

    def compute() -> Iterator[Array]:
        result = np.empty(shape, np.uint8)
        for piece, codes in code_pieces(source, choice):
            unsigned = codes.astype(np.int16) + _offset(choice, bits)
            columns = unsigned[..., 0].T if is_turned else unsigned[0]
            blocks = slice(piece.along.start // size, -(-piece.along.stop // size))
            result[piece.outer if is_turned else slice(None), blocks] = pack_columns(columns, bits, size)
        yield result

    return ComputedTensor(compute, ir.DataType.UINT8, ir.Shape(shape))


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
    packed: Array = parts[..., 0].copy()
    for index in range(1, per_byte):
        packed |= parts[..., index] << np.uint8(index * bits)
    return packed
