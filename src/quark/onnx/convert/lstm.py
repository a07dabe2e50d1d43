"""Quantized LSTMs as ExtendedLSTM of com.amd.quark, whose arithmetic is that of AMD's NPU.

The operator reads X, W, R and B in float, has their scales and zero points as attributes, and computes a bidirectional
LSTM from 16-bit codes: products are sums of integers, multiplied by a 15-bit number and shifted; the gates are computed
in float32 from numbers with 24 bits behind the point; the hidden state is a 16-bit code.

AMD Quark has a compiled kernel for it. Here it is a function of ordinary operators inside the file, which runs on any
ONNX Runtime. Its codes are those of the kernel, except where the two round tanh differently. Two overflows are not
repeated: in the kernel a multiplier that rounds to 32768 changes its sign, which happens if scales are powers of two,
and hidden states beyond 16 bits wrap around. The kernel computes one sequence; the function takes any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import AttributeProto, FunctionProto, helper

from quark.errors import ModelError
from quark.onnx.convert.operators import EXTENDED_LSTM
from quark.onnx.convert.quantizers import graph_of_model, model_of_graph
from quark.onnx.graph import attribute, constant, input_value, opset, readers
from quark.onnx.plan_reader import QuantizedGraph, Quantizer, is_quantize, stored_tensor
from quark.ops.function_body import DOUBLE, FLOAT, INT64, FunctionBody, Value
from quark.ops.schema import DOMAIN, VERSION, Operator
from quark.text import get_logger

TENSORS = ("x", "w", "r", "b")  # inputs 0 to 3; attributes have these names, and y
_OPERATOR = Operator(EXTENDED_LSTM, TENSORS, ())
_MIN_OPSET, _MIN_IR_VERSION = 13, 9
_NUM_OUTPUTS_OPSET = 18  # from here on, Split must be told the number of parts
_POINT = float(1 << 24)  # one, as the gates have it
_INT32 = (-(2.0**31), 2.0**31 - 1)
_INT16 = (-(2.0**15), 2.0**15 - 1)
_MIDDLE = 2.0**15  # codes are unsigned in the file, and signed in the arithmetic
_DEFAULT_ACTIVATIONS = ["sigmoid", "tanh", "tanh"] * 2

_log = get_logger(__name__)


def has_lstm(model: onnx.ModelProto) -> bool:
    """True if the main graph has an LSTM."""
    return any(node.op_type == "LSTM" and not node.domain for node in model.graph.node)


def convert_lstm_to_customlstm(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace LSTM nodes by ExtendedLSTM. Those that are not quantized, or that it cannot express, stay, and the log
    says why."""
    graph = graph_of_model(model)
    quantized = QuantizedGraph(graph)
    count = 0
    for node in list(graph.graph):
        if node.op_type != "LSTM" or node.domain:
            continue
        try:
            attributes = _attributes(node, quantized)
        except ModelError as error:
            _log.warning("%s", error)
            continue
        node.op_type, node.domain = EXTENDED_LSTM, DOMAIN
        node.attributes.clear()
        for attr in ir.convenience.convert_attributes(attributes):
            node.attributes.add(attr)
        node.resize_inputs(len(TENSORS))
        node.resize_outputs(1)
        count += 1
    if not count:
        return model
    version = opset(graph)
    if version < _MIN_OPSET:
        raise ModelError(f"'{model.graph.name}' is of opset {version}, and {EXTENDED_LSTM} needs {_MIN_OPSET} or newer")
    graph.opset_imports.setdefault(DOMAIN, VERSION)
    result = model_of_graph(graph)
    result.ir_version = max(result.ir_version, _MIN_IR_VERSION)
    result.functions.append(extended_lstm_function(version))
    return result


def _attributes(node: ir.Node, quantized: QuantizedGraph) -> dict[str, float | int | str]:
    """The attributes of the operator. Raises ModelError if it cannot stand for the node."""
    obstacle = _obstacle(node)
    if obstacle:
        raise ModelError(f"LSTM '{node.name}' stays: {obstacle}")
    quantizers = {name: quantized.of(input_value(node, index)) for index, name in enumerate(TENSORS)}
    behind = [reader for reader, _ in readers(node.outputs[0])]
    is_read_quantized = len(behind) == 1 and is_quantize(behind[0]) and not node.outputs[0].is_graph_output()
    quantizers["y"] = quantized.quantizers.get(behind[0]) if is_read_quantized else None
    values: dict[str, float | int | str] = {}
    for name, quantizer in quantizers.items():
        values[f"{name}_scale"], values[f"{name}_zero_point"] = _parameters(node, name, quantizer)
    recurrence = input_value(node, 2)
    assert recurrence is not None  # it is quantized
    size = attribute(node, "hidden_size", None if recurrence.shape is None else recurrence.shape[-1])
    if not isinstance(size, int):
        raise ModelError(f"LSTM '{node.name}' stays: its hidden_size is unknown")
    return {**values, "direction": "bidirectional", "hidden_size": size, "layout": 0}


def _obstacle(node: ir.Node) -> str:
    """The properties of an LSTM that the operator cannot express; empty if there are none."""
    activations = [str(name).lower() for name in attribute(node, "activations", _DEFAULT_ACTIVATIONS)]
    given = [index for index in range(4, len(node.inputs)) if not _is_zero(node.inputs[index])]
    checks = (
        (attribute(node, "direction", "forward") == "bidirectional", "only bidirectional ones have a custom form"),
        (attribute(node, "layout", 0) == 0, "its layout is not 0"),
        (attribute(node, "input_forget", 0) == 0 and "clip" not in node.attributes, "it has clip or input_forget"),
        (activations == _DEFAULT_ACTIVATIONS, "its activations are not Sigmoid, Tanh, Tanh"),
        (not given, "it has lengths, initial states or peepholes"),
        (not any(value.uses() or value.is_graph_output() for value in node.outputs[1:]), "Y_h or Y_c is read"),
    )
    return next((reason for is_fine, reason in checks if not is_fine), "")


def _is_zero(value: ir.Value | None) -> bool:
    array = None if value is None else constant(value)
    return value is None or (array is not None and not array.any())


def _parameters(node: ir.Node, name: str, quantizer: Quantizer | None) -> tuple[float, int]:
    """The scale and the zero point of a tensor, which must be quantized to uint16 as a whole."""
    scale = None if quantizer is None else stored_tensor(quantizer.scale)
    if quantizer is None or quantizer.dtype != ir.DataType.UINT16 or scale is None or scale.size != 1:
        raise ModelError(
            f"LSTM '{node.name}' stays: {name.upper()} is not quantized to uint16 with one scale, as X, W, R, B and Y "
            "must be"
        )
    zero_point = stored_tensor(quantizer.zero_point)
    number = 0 if zero_point is None else int(zero_point.numpy().reshape(()))
    return float(scale.numpy().reshape(())), number


# ---- what the operator computes ----


def extended_lstm_function(opset: int) -> FunctionProto:
    """ExtendedLSTM as a function of ordinary operators, for a model of this opset."""
    body = _Body(opset)
    codes = {name: body.codes(name) for name in TENSORS}
    numbers = _Numbers.of(body, codes)
    directions = [_direction(body, codes, numbers, index) for index in (0, 1)]
    axes = body.constant([1], INT64)
    y = body.op("Concat", *(body.op("Unsqueeze", direction, axes) for direction in directions), axis=1)
    result = (y - numbers.zero["y"]).cast(FLOAT) * body.number("y_scale", FLOAT)
    defaults: dict[str, float | int | str] = {f"{name}_scale": 1.0 for name in (*TENSORS, "y")}
    defaults |= {f"{name}_zero_point": 0 for name in (*TENSORS, "y")}
    defaults |= {"direction": "bidirectional", "hidden_size": 0, "layout": 0}
    return body.function(_OPERATOR, result, defaults)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Multiplier:
    """A number as a 15-bit integer and a power of two: products are multiplied by one and divided by the other."""

    factor: Value
    power: Value

    def times(self, value: Value) -> Value:
        """The product, rounded to an integer of 32 bits."""
        return _shifted(value * self.factor, self.power).clip(*_INT32)


@dataclass(frozen=True)
class _Numbers:
    """Numbers that the arithmetic derives from scales, zero points and sizes."""

    zero: dict[str, Value]  # zero points of signed codes
    x_float: Value
    h_float: Value
    b_float: Value
    x_power: Value  # sums are divided by the smallest power of two that is not below their length
    h_power: Value
    x: Multiplier
    h: Multiplier
    x_sum: Multiplier
    h_sum: Multiplier
    y: Multiplier

    @classmethod
    def of(cls, body: _Body, codes: dict[str, Value]) -> _Numbers:
        """Write the nodes that compute them."""
        scale = {name: body.number(f"{name}_scale", FLOAT) for name in (*TENSORS, "y")}
        zero = {name: body.number(f"{name}_zero_point", DOUBLE) - _MIDDLE for name in (*TENSORS, "y")}
        x_float = (scale["x"] * scale["w"]).cast(DOUBLE) * _POINT
        h_float = (scale["y"] * scale["r"]).cast(DOUBLE) * _POINT
        x_power, h_power = (body.power(body.ceil_log2(body.size(codes[name]))) for name in ("w", "r"))
        x, h = body.multiplier(x_float, x_power), body.multiplier(h_float, h_power)
        sums = (body.multiplier(x_float * zero["w"]), body.multiplier(h_float * zero["r"]))
        quotient = 1.0 / scale["y"].cast(DOUBLE)
        shift = 16.0 - body.ceil_log2(quotient)
        factor = body.op("Min", _rounded(quotient * body.power(shift)), 65535.0)
        y = Multiplier(factor, body.power(shift) * _POINT)
        b_float = scale["b"].cast(DOUBLE) * _POINT
        return cls(zero, x_float, h_float, b_float, x_power, h_power, x, h, *sums, y)


def _direction(body: _Body, codes: dict[str, Value], numbers: _Numbers, index: int) -> Value:
    """The codes of the hidden states of one direction, [time, batch, hidden]."""
    x = codes["x"]
    w, r, b = (body.op("Gather", codes[name], body.constant(index, INT64), axis=0) for name in ("w", "r", "b"))
    zero, sizes = numbers.zero, {name: body.size(codes[name]) for name in ("w", "r")}
    offset = (
        sizes["w"] * (numbers.x_float * zero["w"]) * zero["x"] + sizes["r"] * (numbers.h_float * zero["r"]) * zero["y"]
    )
    offset = offset - numbers.x_float * zero["x"] * w.reduce("Sum", 1).reshape([-1])
    offset = offset - numbers.h_float * zero["y"] * r.reduce("Sum", 1).reshape([-1])
    offset = _rounded(offset + numbers.b_float * (b.reshape([2, -1]).reduce("Sum", 0).reshape([-1]) - zero["b"] * 2.0))
    wt, rt = (body.op("Transpose", value, perm=[1, 0]) for value in (w, r))
    products = _shifted(body.op("MatMul", x, wt), numbers.x_power).clip(*_INT32)
    given = numbers.x.times(products) - numbers.x_sum.times(x.reduce("Sum", 2)) + offset
    second = body.constant([1], INT64)
    shape = body.op("Concat", *(body.op("Gather", value.shape(), second, axis=0) for value in (x, r)), axis=0)
    states = body.op("Expand", body.constant(0.0, DOUBLE), shape)  # [batch, hidden]

    def step(h: Value, c: Value, part: Value) -> tuple[Value, Value]:
        inner = _shifted(body.op("MatMul", h, rt), numbers.h_power).clip(*_INT32)
        gates = part + numbers.h.times(inner) - numbers.h_sum.times(h.reduce("Sum", 1))
        i, o, f, g = body.split(gates, 4)
        i, o, f = (
            (_tanh((gate / (2 * _POINT)).cast(FLOAT)).cast(DOUBLE) * 0.5 + 0.5).cast(FLOAT) for gate in (i, o, f)
        )
        state = i * _tanh((g / _POINT).cast(FLOAT)) + f * c
        hidden = _rounded((o * _tanh(state)).cast(DOUBLE) * _POINT)
        code = _shifted(hidden * numbers.y.factor + numbers.zero["y"] * numbers.y.power, numbers.y.power)
        return code.clip(*_INT16), state

    return body.scan(step, states + zero["y"], states.cast(FLOAT), given, is_reversed=index == 1)


def _rounded(value: Value) -> Value:
    """The nearest integers, halves away from zero."""
    return _shifted(value, value.body.constant(1.0, DOUBLE), half=0.5)


def _shifted(value: Value, power: Value, half: float | None = None) -> Value:
    """Integers divided by a power of two and rounded, halves away from zero. All are exact in float64."""
    body = value.body
    offset = body.op("Floor", power * 0.5) if half is None else body.constant(half, DOUBLE)
    return body.op("Sign", value) * body.op("Floor", (abs(value) + offset) / power)


def _tanh(value: Value) -> Value:
    """tanh of float32 numbers. ONNX Runtime approximates it in float32, so it is computed in float64."""
    return value.body.op("Tanh", value.cast(DOUBLE)).cast(FLOAT)


class _Body(FunctionBody):
    """A function body with attributes that are numbers, and a Scan."""

    def number(self, name: str, type: int) -> Value:
        """An attribute of the calling node as a scalar of this type."""
        is_float = name.endswith("_scale")
        output = f"{name}_{next(self._numbers)}"
        kind = AttributeProto.FLOAT if is_float else AttributeProto.INT
        node = helper.make_node("Constant", [], [output])
        field = "value_float" if is_float else "value_int"
        node.attribute.append(AttributeProto(name=field, ref_attr_name=name, type=kind))
        self._scopes[-1].append(node)
        value = Value(self, output, FLOAT if is_float else INT64)
        return value if value.type == type else value.cast(type)

    def codes(self, name: str) -> Value:
        """The signed codes of an input, as numbers of float64."""
        quotient = self.input(name, FLOAT) / self.number(f"{name}_scale", FLOAT)
        codes = self.op("Round", quotient).cast(DOUBLE) + self.number(f"{name}_zero_point", DOUBLE)
        return codes.clip(0.0, 2 * _MIDDLE - 1) - _MIDDLE

    def size(self, value: Value) -> Value:
        """The length of the last axis."""
        return self.op("Gather", value.shape(), self.constant(2, INT64), axis=0).cast(DOUBLE)

    def ceil_log2(self, value: Value) -> Value:
        """The exponent of the smallest power of two that is not below a magnitude; -100 for 0."""
        powers = self.constant(2.0 ** np.arange(-100.0, 101.0), DOUBLE)
        return (powers < abs(value)).cast(DOUBLE).reduce("Sum", 0).reshape([]) - 100.0

    def power(self, exponent: Value) -> Value:
        return self.op("Pow", self.constant(2.0, DOUBLE), exponent)

    def multiplier(self, number: Value, done: Value | None = None) -> Multiplier:
        """`number` for sums that were divided by the power of two `done` already."""
        exponent = self.ceil_log2(number)
        factor = _rounded(number * self.power(15.0 - exponent))
        is_full = (abs(factor) > _INT16[1]).cast(DOUBLE)  # a power of two, which 14 bits hold exactly
        power = self.power(15.0 - exponent - is_full)
        factor = factor / (is_full + 1.0)
        return Multiplier(factor, power if done is None else power / done)

    def split(self, value: Value, count: int) -> list[Value]:
        """Equal parts of a matrix along its last axis."""
        names = [f"part_{next(self._numbers)}" for _ in range(count)]
        node = helper.make_node("Split", [value.name], names, names[0], axis=1)
        if self.opset >= _NUM_OUTPUTS_OPSET:
            node.attribute.append(helper.make_attribute("num_outputs", count))
        self._scopes[-1].append(node)
        return [Value(self, name, value.type) for name in names]

    def scan(
        self,
        step: Callable[[Value, Value, Value], tuple[Value, Value]],
        first: Value,
        second: Value,
        items: Value,
        *,
        is_reversed: bool,
    ) -> Value:
        """All values that the first state has after a step. `step` gets both states and an item."""
        inside = [Value(self, f"state_{next(self._numbers)}", value.type) for value in (first, second, items)]
        with self._scope() as nodes:
            results = [self.op("Identity", value) for value in step(*inside)]
            results.append(self.op("Identity", results[0]))
        graph = helper.make_graph(nodes, "step", _declared(inside), _declared(results))
        names = [f"scan_{next(self._numbers)}" for _ in range(3)]
        order = [int(is_reversed)]
        self._scopes[-1].append(
            helper.make_node(
                "Scan",
                [value.name for value in (first, second, items)],
                names,
                names[2],
                num_scan_inputs=1,
                body=graph,
                scan_input_directions=order,
                scan_output_directions=order,
            )
        )
        return Value(self, names[2], first.type)


def _declared(values: Sequence[Value]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(value.name, value.type, None) for value in values]
