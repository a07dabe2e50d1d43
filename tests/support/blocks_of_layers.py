"""Small networks, quantized, with the layers of them that are trained and the blocks that those make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.features.finetuning.blocks import Block, blocks
from quark.features.finetuning.layers import TrainedLayer, trained_layers
from quark.features.finetuning.options import TRAINED_OP_TYPES
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.insert import insert
from quark.onnx.load import load
from quark.plan import AffineChoice, BlockChoice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import rounded

MX = BlockQuantizer(get_format("mxint8"))
FORMATS = ("int8", "uint8", "int16", "mxint8", "bfloat16")


@dataclass(frozen=True, eq=False)
class Quantized:
    """A model without quantizers, and its plan."""

    model: ir.Model
    plan: QuantizationPlan
    layers: list[TrainedLayer]
    blocks: list[Block]

    @property
    def choices(self):
        return {(reader.node, reader.index): tensor.choice for tensor in self.plan for reader in tensor.readers}


def quantized(proto, format="int8", bits=8) -> Quantized:
    """Everything that layers and additions read is quantized to `format`; integer weights for each channel."""
    model = load(proto).model
    plan = QuantizationPlan(tuple(_choices(model, format, bits)))
    layers, _ = trained_layers(model, plan, TRAINED_OP_TYPES)
    return Quantized(model, plan, layers, blocks(model, layers))


def quantized_copy(found):
    """The model with quantizers for activations, and constants as they are kept."""
    copy = found.model.clone()
    nodes = {node.name: node for node in copy.graph}
    for (name, index), choice in found.choices.items():
        values = constant(input_value(nodes[name], index))
        if values is not None:
            set_constant(copy, nodes[name], index, rounded(values, choice))
    insert(copy, QuantizationPlan(tuple(tensor for tensor in found.plan if tensor.role is Role.ACTIVATION)))
    return copy


def names(found) -> list[tuple[str, ...]]:
    """The layers of each block."""
    return [tuple(layer.name for layer in block.layers) for block in found]


def _choices(model, format, bits):
    seen: dict[str, list[tuple[ir.Node, int]]] = {}
    values = {}
    for node in model.graph:
        for index in (0, 1) if node.op_type in (*TRAINED_OP_TYPES, "Add") else ():
            value = input_value(node, index)
            seen.setdefault(value.name, []).append((node, index))
            values[value.name] = value
    for name, uses in seen.items():
        array = constant(values[name])
        where = tuple(Reader(str(node.name), index) for node, index in uses)
        role = Role.ACTIVATION if array is None else Role.WEIGHT
        yield TensorChoice(name, role, _choice(array, uses[0][0], format, bits), where)


def _choice(array, node, format, bits):
    axis = 1 if array is None or node.op_type == "Conv" else 0
    if format == "mxint8":
        return BlockChoice(MX, axis if array is None or array.ndim > 1 else 0)
    if format == "bfloat16":
        return FloatChoice(format)
    levels = 2 ** (bits - 1)
    if array is None:
        return AffineChoice(format, (0.07 if format != "int16" else 1e-3,), (30 if format == "uint8" else 0,))
    if node.op_type not in ("Conv", "Gemm") or array.ndim < 2:
        return AffineChoice("int8", (float(np.abs(array).max()) / levels,), (0,))
    peaks = np.abs(array).reshape(len(array), -1).max(1)
    return AffineChoice("int8", tuple(float(peak) / levels for peak in peaks), (0,) * len(array), 0)
