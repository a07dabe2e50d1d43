"""Which operators the presets quantize: asked of the code that decides it, with a model of one node.

Presets that decide alike for every operator share a column. A cell says

    yes        the operator is quantized
    moves      it takes the scale of what it moves, where a neighbour is quantized
    asked      it stays in float unless `extra_op_types_to_quantize` names it
    (empty)    it stays in float
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from quark.decide.operators import OPERATORS, RECURRENT_TYPES, Kind, OperatorFacts
from quark.decide.options import ChoiceOptions
from quark.decide.placement import place
from quark.decide.specs import AffineSpec
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS
from quark.onnx.view import view_of

_OPSET = 17
_SHAPE = (1, 4, 4, 4)
_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_WEIGHT_RANKS: Mapping[str, int] = {  # others have matrices
    **dict.fromkeys(("Conv", "ConvTranspose"), 4),
    **dict.fromkeys(RECURRENT_TYPES, 3),
}


@dataclass(frozen=True)
class Column:
    """What presets that decide alike do with each operator."""

    presets: tuple[str, ...]
    cells: Mapping[str, str]


def columns() -> tuple[Column, ...]:
    """One for each way to decide, in the order of the presets; those with finetuning or mixed types decide as their
    base does, and are left out. The last is `WeightsOnly`, an option."""
    presets: dict[tuple[str, ...], list[str]] = {}
    for name, options in _configurations():
        presets.setdefault(tuple(_cell(op_type, options) for op_type in OPERATORS), []).append(name)
    return tuple(Column(tuple(names), dict(zip(OPERATORS, cells, strict=True))) for cells, names in presets.items())


def _configurations() -> Iterator[tuple[str, ChoiceOptions]]:
    for name, preset in PRESETS.items():
        if not preset.is_trained and not preset.fields.get("include_auto_mp"):
            yield name, settings_of(name).choose
    config = get_default_config("INT8_CNN_DEFAULT")
    config.extra_options["WeightsOnly"] = True
    yield "WeightsOnly", settings_of(config).choose


def _cell(op_type: str, options: ChoiceOptions) -> str:
    if is_quantized(op_type, options):
        is_moving = OPERATORS[op_type].kind is Kind.PASS and isinstance(options.default.activation, AffineSpec)
        return "moves" if is_moving else "yes"
    asked = replace(options.selection, extra_op_types=options.selection.extra_op_types | {op_type})
    return "asked" if is_quantized(op_type, replace(options, selection=asked)) else ""


def is_quantized(op_type: str, options: ChoiceOptions) -> bool:
    """That a node of this type reads or writes something quantized, with constants where it has weights and float
    inputs elsewhere. What only moves values is taken to have a neighbour that is quantized."""
    placement = place(view_of(_model_of_one(op_type, OPERATORS[op_type])), replace(options, has_forced_movers=True))
    return bool(placement.requests)


def _model_of_one(op_type: str, known: OperatorFacts) -> ir.Model:
    constants = {index for index in (*known.weights, known.bias) if index is not None}
    count = 2 if known.data is None else 1 + len(constants)
    ranks: dict[int | None, int] = {**dict.fromkeys(known.weights, _WEIGHT_RANKS.get(op_type, 2)), known.bias: 1}
    operands = [_value(index, ranks[index] if index in constants else None) for index in range(count)]
    output = ir.Value(name="y", type=_FLOAT, shape=ir.Shape(_SHAPE))
    node = ir.Node("", op_type, operands, outputs=[output], name="node")
    inputs = [operand for operand in operands if operand.const_value is None]
    weights = [operand for operand in operands if operand.const_value is not None]
    graph = ir.Graph(inputs, [output], nodes=[node], initializers=weights, opset_imports={"": _OPSET}, name="one")
    return ir.Model(graph, ir_version=8)


def _value(index: int, rank: int | None) -> ir.Value:
    """An activation, or where there is a rank a constant."""
    if rank is None:
        return ir.Value(name=f"x{index}", type=_FLOAT, shape=ir.Shape(_SHAPE))
    tensor = ir.tensor(np.ones((4,) * rank, np.float32))
    return ir.Value(name=f"x{index}", type=_FLOAT, shape=ir.Shape((4,) * rank), const_value=tensor)
