"""Weights of a few bits, with all else in float, as operators of com.microsoft that read packed codes.

MatMulNBits           a product with a constant matrix
GatherBlockQuantized  rows of a constant table: an embedding

Both hold a matrix as [N, codes along K], packed from the lowest bits of a byte up, with a scale for each block along K.
So a table that is also the last product's matrix is stored once, and a Reshape that the runtime folds turns the blocks
of one into the rows of the other. Codes are unsigned; without zero points, the middle code is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError
from quark.formats.affine import integer_format
from quark.onnx.graph import add_initializer, add_node, attribute, input_value, replace_value
from quark.onnx.insert.dynamic import with_bias
from quark.onnx.insert.pairs import MICROSOFT, NBitsOptions, WeightForm, code_pieces, stored
from quark.onnx.large_tensors import ComputedTensor
from quark.onnx.tied import are_same_numbers
from quark.plan import AffineChoice, QuantizationPlan, Role
from quark.rounded import parameters_of

Array = NDArray[Any]
CHANNEL_BLOCK = 128  # block size for outputs with one scale, because the operator requires blocks


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A constant matrix in groups along K. `is_turned`: it is [N, K], not [K, N]."""

    name: str
    source: ir.TensorProtocol
    choice: AffineChoice
    is_turned: bool

    @property
    def bits(self) -> int:
        return integer_format(self.choice.format).bits

    @property
    def sizes(self) -> tuple[int, int]:
        """K and N."""
        first, second = self.source.shape.numpy()
        return (second, first) if self.is_turned else (first, second)

    @property
    def block(self) -> int:
        assert self.choice.group_size is not None
        return self.choice.group_size

    @cached_property
    def parameters(self) -> tuple[Array, Array]:
        """Scales and unsigned zero points, [N, blocks]."""
        parameters = parameters_of(self.choice, tuple(self.source.shape.numpy()))
        scale, zero_point = np.asarray(parameters.scale), np.asarray(parameters.zero_point).astype(np.int16)
        if not self.is_turned:
            scale, zero_point = scale.T, zero_point.T
        return np.ascontiguousarray(scale).astype(self.source.dtype.numpy()), zero_point + _offset(self.choice)


@dataclass(frozen=True, eq=False)
class _Stored:
    """A matrix in the file: codes [N, blocks, bytes] (for a table alone [N, bytes]), scales and zero points."""

    matrix: _Matrix
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None


def insert_weight_only(
    model: ir.Model, nodes: Mapping[str, ir.Node], plan: QuantizationPlan, options: NBitsOptions
) -> set[str]:
    """Replace every product and every table that the plan quantizes by the operators above, with 2, 4 or 8 bits.

    Returns the names of the nodes that were replaced: all, or only the tables if products are to read DequantizeLinear.
    """
    wanted = [
        (nodes[reader.node], entry.choice)
        for entry in plan
        if entry.role is Role.WEIGHT and isinstance(entry.choice, AffineChoice) and entry.choice.axis is not None
        for reader in entry.readers
    ]
    store: list[_Stored] = []
    if options.form is WeightForm.MATMUL_NBITS:  # products first, whose blocks are complete
        for node, choice in wanted:
            if node.op_type != "Gather":
                _insert_product(model, node, choice, options, store)
    for node, choice in wanted:
        if node.op_type == "Gather":
            _insert_table(model, node, choice, store)
    is_packed = options.form is WeightForm.MATMUL_NBITS
    return {str(node.name) for node, _ in wanted if is_packed or node.op_type == "Gather"}


def _insert_product(
    model: ir.Model, node: ir.Node, choice: AffineChoice, options: NBitsOptions, store: list[_Stored]
) -> None:
    is_turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    matrix = _matrix(node, 1, choice, is_turned)
    held = _find(store, matrix) or _add(model, matrix, store)
    (k, n), data = matrix.sizes, node.inputs[0]
    assert data is not None, node.name
    if node.op_type == "Gemm" and attribute(node, "transA", 0):
        data = add_node(model, "Transpose", [data], before=node, attributes={"perm": [1, 0]}).outputs[0]
    inputs: list[ir.Value | None] = [data, held.codes, held.scales]
    inputs += [] if held.zero_points is None else [held.zero_points]
    attributes = {"K": k, "N": n, "bits": matrix.bits, "block_size": matrix.block}
    attributes["accuracy_level"] = options.accuracy_level
    model.opset_imports.setdefault(MICROSOFT, 1)
    name = f"{node.name}_nbits"
    product = add_node(model, "MatMulNBits", inputs, before=node, name=name, domain=MICROSOFT, attributes=attributes)
    result = product.outputs[0]
    alpha = float(attribute(node, "alpha", 1.0)) if node.op_type == "Gemm" else 1.0
    if alpha != 1.0:
        factor = add_initializer(model, f"{node.name}_alpha", np.array(alpha, matrix.source.dtype.numpy()))
        result = add_node(model, "Mul", [result, factor], before=node, name=f"{node.name}_scaled").outputs[0]
    if node.op_type == "Gemm":
        result.type = node.outputs[0].type
        result = with_bias(model, node, result, None, matrix.source.dtype)
    _replace(model, node, result)


def _insert_table(model: ir.Model, node: ir.Node, choice: AffineChoice, store: list[_Stored]) -> None:
    matrix = _matrix(node, 0, choice, is_turned=True)
    k, n = matrix.sizes
    held = _find(store, matrix) if k % matrix.block == 0 else None
    if held is None:
        held = _add(model, matrix, store, is_table=True)
    codes = held.codes
    if codes.shape is not None and len(codes.shape) == 3:  # the codes of a product
        shape = add_initializer(model, f"{node.name}_rows", np.array([n, -1], np.int64))
        codes = add_node(model, "Reshape", [codes, shape], before=node, name=f"{node.name}_table").outputs[0]
        codes.type, codes.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape([n, k * matrix.bits // 8])
    inputs: list[ir.Value | None] = [codes, node.inputs[1], held.scales]
    inputs += [] if held.zero_points is None else [held.zero_points]
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": matrix.block, "bits": matrix.bits}
    model.opset_imports.setdefault(MICROSOFT, 1)
    name = f"{node.name}_nbits"
    rows = add_node(
        model, "GatherBlockQuantized", inputs, before=node, name=name, domain=MICROSOFT, attributes=attributes
    )
    _replace(model, node, rows.outputs[0])


def _matrix(node: ir.Node, index: int, choice: AffineChoice, is_turned: bool) -> _Matrix:
    weight = input_value(node, index)
    source = None if weight is None else weight.const_value
    if weight is None or source is None or len(source.shape) != 2:
        raise ModelError(f"node '{node.name}' ({node.op_type}): codes of a few bits need a constant matrix")
    if choice.group_size is None:  # one scale for an output, which is repeated
        blocks = -(-source.shape.numpy()[1 if is_turned else 0] // CHANNEL_BLOCK)
        spread = np.repeat if is_turned else np.tile
        scale, zero_point = (
            tuple(spread(parameter, blocks).tolist()) for parameter in (choice.scale, choice.zero_point)
        )
        choice = AffineChoice(choice.format, scale, zero_point, 1 if is_turned else 0, CHANNEL_BLOCK)
    if source.dtype is ir.DataType.FLOAT16:  # scales are stored in float16
        choice = replace(choice, scale=tuple(_in_float16(np.array(choice.scale)).tolist()))
    return _Matrix(str(weight.name), source, choice, is_turned)


def _in_float16(scale: Array) -> Array:
    """Scales rounded to float16; away from zero below its normal numbers, where they would vanish or clip."""
    info = np.finfo(np.float16)
    smallest = float(info.smallest_subnormal)
    upward = np.copysign(np.ceil(np.abs(scale) / smallest) * smallest, scale)
    return np.where(np.abs(scale) < float(info.tiny), upward, scale).astype(np.float16)


def _find(store: list[_Stored], matrix: _Matrix) -> _Stored | None:
    """A matrix with the same codes that is stored already."""
    for known in store:
        other = known.matrix
        alike = (other.sizes, other.block, other.choice.format) == (matrix.sizes, matrix.block, matrix.choice.format)
        if not alike or not _has_same_parameters(other, matrix):
            continue
        if are_same_numbers(other.source, matrix.source, is_turned=other.is_turned != matrix.is_turned):
            return known
    return None


def _has_same_parameters(first: _Matrix, second: _Matrix) -> bool:
    pairs = zip(first.parameters, second.parameters, strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _add(model: ir.Model, matrix: _Matrix, store: list[_Stored], *, is_table: bool = False) -> _Stored:
    """Put the matrix into the model."""
    codes = stored(model, _packed(matrix, is_table=is_table))
    scales, zero_points = matrix.parameters
    held = None
    values = (
        add_initializer(model, f"{matrix.name}_packed", codes),
        add_initializer(model, f"{matrix.name}_scales", scales),
    )
    if not integer_format(matrix.choice.format).signed:
        packed = pack_columns(zero_points.T, matrix.bits, 8 // matrix.bits).reshape(len(zero_points), -1)
        held = add_initializer(model, f"{matrix.name}_zero_points", packed)
    store.append(_Stored(matrix, *values, held))
    return store[-1]


def _replace(model: ir.Model, node: ir.Node, result: ir.Value) -> None:
    """Replace the node's result by this one, under the same name, so that the two networks can be compared."""
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    tensor = node.outputs[0].name
    replace_value(node.outputs[0], result)
    model.graph.remove(node, safe=True)
    result.name = tensor


def _offset(choice: AffineChoice) -> int:
    """The difference between unsigned codes and those of the plan."""
    integer = integer_format(choice.format)
    return (1 << (integer.bits - 1)) if integer.signed else 0


def _packed(matrix: _Matrix, *, is_table: bool = False) -> ComputedTensor:
    """The unsigned codes, packed by `pack_columns`. They are computed as a whole, because pieces of the weight are not
    consecutive there, and take a fraction of its size. `is_table`: rows without the padding of the last block."""
    choice, bits, block = matrix.choice, matrix.bits, matrix.block
    k, n = matrix.sizes
    shape = (n, -(-k // block), block * bits // 8)
    rows = (n, k * bits // 8)

    def compute() -> Iterator[Array]:
        result = np.empty(shape, np.uint8)
        for piece, signed in code_pieces(matrix.source, choice):
            unsigned = signed.astype(np.int16) + _offset(choice)
            columns = unsigned[..., 0].T if matrix.is_turned else unsigned[0]
            blocks = slice(piece.along.start // block, -(-piece.along.stop // block))
            result[piece.outer if matrix.is_turned else slice(None), blocks] = pack_columns(columns, bits, block)
        yield result.reshape(n, -1)[:, : rows[1]] if is_table else result

    return ComputedTensor(compute, ir.DataType.UINT8, ir.Shape(rows if is_table else shape))


def pack_columns(codes: Array, bits: int, group_size: int) -> Array:
    """Pack [K, N] codes into [N, blocks, bytes]; the last block is padded with the middle code.

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
