"""Read a quantized model: which tensors it quantizes, how, and who reads them. The inverse of `insert`.

    read_plan         the plan that a model carries out
    QuantizedGraph    the same with the nodes and values of the graph; inspect, lint, pack and diagnose start from it
    is_quantizer ...  what a node is by its operator alone

    activations       QuantizeLinear with DequantizeLinear (ONNX's, com.microsoft's or Extended*), block operators,
                      Casts to float16 or bfloat16 and back, DynamicQuantizeLinear
    constants         codes behind DequantizeLinear, rounded numbers behind a block mark, float16 or bfloat16 behind a
                      Cast, or float numbers behind one of the quantizers above, as AMD Quark writes them; codes of
                      a table that a Gather takes rows from before they are dequantized
    integer layers    ConvInteger, MatMulInteger, DynamicQuantizeLSTM, MatMulNBits, GatherBlockQuantized, and the
                      QLinear* operators with whatever moves codes between them

A file does not hold everything that a plan says. Fields that it does not hold are read as follows:

    reason            empty, except for the two reasons of `skipped` below
    is_saturating     True only if a Clip stands before the Cast; Extended* operators saturate in any case
    format            integers are named after the type they are stored in: int7 reads as int8
    scale             as stored, in float32 or float16; for MatMulInteger it includes the alpha of a Gemm
    axis              for MatMulInteger and MatMulNBits that of a [K, N] matrix, even if a Gemm read it transposed
    tensor            if the original name is lost, the name of the value in the file: this happens to results of
                      ConvInteger and MatMulInteger, and to codes that go from one moving operator to the next

`skipped` lists Conv, ConvTranspose, Gemm, MatMul and recurrent nodes that read their weight, or every input, in float.

All other tensors have the names of the float model. `insert` and ONNX Runtime's quantizer, from which AMD Quark's is
derived, name codes, scales and zero points after them, so a name is known even if a folded Relu took its tensor along.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.decide.operators import OPERATORS, Kind, OperatorFacts
from quark.errors import ModelError, QuarkError
from quark.formats.catalog import FORMATS
from quark.formats.spec import IntFormat
from quark.onnx.file_graph import read_graph
from quark.onnx.graph import attribute, graphs_in, input_value, is_constant, readers
from quark.onnx.insert.float8 import APART
from quark.onnx.view import operator_facts
from quark.ops.onnx_nodes import CONSTANT_DOMAIN
from quark.ops.schema import BLOCK_OPERATORS, DOMAIN, quantizer_of
from quark.plan import (
    EIGHT_BIT_FLOATS,
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    SkippedNode,
    TensorChoice,
)

Array = NDArray[Any]

QUANTIZE = ("QuantizeLinear", "ExtendedQuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "ExtendedDequantizeLinear")
BLOCK = BLOCK_OPERATORS
DYNAMIC = "DynamicQuantizeLinear"
INTEGER_PRODUCTS = ("ConvInteger", "MatMulInteger")
DYNAMIC_LSTM = "DynamicQuantizeLSTM"
PACKED = ("MatMulNBits", "GatherBlockQuantized")

WEIGHT_IN_FLOAT = "its weight is in float"
ALL_IN_FLOAT = "it reads no quantized tensor"

_LINEAR_DOMAINS = ("", "com.microsoft", DOMAIN)
_SHORT_FLOATS = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_FLOAT8 = {ir.DataType.FLOAT8E4M3FN: "fp8_e4m3", ir.DataType.FLOAT8E5M2: "fp8_e5m2", ir.DataType.FLOAT4E2M1: "fp4_e2m1"}
_MOVED = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_MOST_MOVES = 8
_MOVING = ("Identity", "Pad", "Resize")  # in addition to those that the table of operators lists
_TRANSPOSE_A = r"Transpose_output(_\d+)?"  # inserted before the integer form of a Gemm with transA
_WIDE_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_DAMAGE = (QuarkError, TypeError, ValueError, LookupError, AttributeError)  # errors that a malformed node causes


@dataclass(frozen=True)
class CodeOperator:
    """An operator on codes: the inputs that are codes (scale and zero point follow each), the int32 bias, and the scale
    of the result (its zero point follows)."""

    factors: tuple[int, ...]
    result: int
    bias: int | None = None


CODE_OPERATORS = {
    "QLinearConv": CodeOperator((0, 3), 6, bias=8),
    "QLinearMatMul": CodeOperator((0, 3), 6),
    "QGemm": CodeOperator((0, 3), 7, bias=6),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), CodeOperator((0, 3), 6)),
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool"), CodeOperator((0,), 3)),
    **dict.fromkeys(("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"), CodeOperator((0,), 3)),
}


def is_quantize(node: ir.Node | None) -> bool:
    """True for QuantizeLinear of any domain, and ExtendedQuantizeLinear."""
    return node is not None and node.op_type in QUANTIZE and node.domain in _LINEAR_DOMAINS


def is_dequantize(node: ir.Node | None) -> bool:
    """True for DequantizeLinear of any domain, and ExtendedDequantizeLinear."""
    return node is not None and node.op_type in DEQUANTIZE and node.domain in _LINEAR_DOMAINS


def is_on_codes(node: ir.Node | onnx.NodeProto) -> bool:
    """True if the operator computes with codes instead of the numbers that they stand for."""
    return node.op_type.startswith("QLinear") or node.op_type in (*INTEGER_PRODUCTS, DYNAMIC_LSTM, "QGemm", *PACKED)


def is_quantizer(node: ir.Node | None) -> bool:
    """True if the node is a quantizer or half of one."""
    if node is None:
        return False
    if node.op_type in BLOCK:
        return node.domain in (DOMAIN, CONSTANT_DOMAIN)
    if node.op_type != "Cast":
        return is_quantize(node) or is_dequantize(node) or node.op_type == DYNAMIC
    source = input_value(node, 0)
    first = None if source is None else source.producer()
    is_second = first is not None and first.op_type == "Cast" and _cast_type(first) in _SHORT_FLOATS
    return not node.domain and (is_second or _cast_type(node) in _SHORT_FLOATS)


def is_quantizing(node: ir.Node) -> bool:
    """True if the node is a quantizer or computes with codes; a float model has no such node."""
    return is_on_codes(node) or is_quantizer(node)


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One quantizer of a file: a node that rounds a tensor, or that turns stored codes into numbers.

    tensor         the name of the tensor in the float model
    source         the value that is rounded, or the constant that the file stores
    node           of two Casts the second; for codes that an operator on codes reads or computes, that operator
    is_constant    True if the tensor is a constant, or computed from nothing but constants
    dtype          the type of the codes, with their scale and zero point; None for formats that have none. A scale or
                   zero point that is not a constant is None
    """

    tensor: str
    source: ir.Value
    node: ir.Node
    is_constant: bool
    decide: Callable[[], Choice]
    dtype: ir.DataType | None = None
    scale: ir.Value | None = None
    zero_point: ir.Value | None = None

    @cached_property
    def choice(self) -> Choice:
        """The plan's choice for the tensor; scales are read on first use. Raises QuarkError if a plan cannot express
        it."""
        try:
            return self.decide()
        except QuarkError:
            raise
        except _DAMAGE as error:
            raise _damaged(self.node, error) from error

    @property
    def is_stored(self) -> bool:
        """True if the source is an initializer or a Constant, rather than computed, or unpacked from one."""
        return is_held(self.source)

    @property
    def has_codes(self) -> bool:
        """True if the source is a constant of codes, rather than of numbers that are rounded at run time."""
        return self.is_stored and self.dtype is not None and _dtype(self.source) is self.dtype

    @property
    def scale_count(self) -> int:
        """The number of scales, without reading them; 0 if they are computed at run time."""
        tensor = stored_tensor(self.scale)
        return 0 if tensor is None else int(tensor.size)


def read_plan(source: str | os.PathLike[str] | onnx.ModelProto | bytes | ir.Model) -> QuantizationPlan:
    """Return the plan that a quantized model carries out. A model in float has an empty one.

    `source` is a file, a model, or its bytes. Raises ModelError if it is not an ONNX model, or if a quantizer in it
    does something that a plan cannot express, such as float8 with a scale for each block.
    """
    return QuantizedGraph(source if isinstance(source, ir.Model) else read_graph(source)).plan()


class QuantizedGraph:
    """A graph, and what is quantized in it. The graph must be sorted; it is not changed.

    Numbers are read on first use, so a graph without its large weights can be inspected too. Nodes that cannot be read
    are skipped; `plan` raises an error for the first of them.

    quantizers    by their node, in the order of the graph. Each half of a pair is a quantizer; of operators on codes
                  only MatMulNBits and GatherBlockQuantized are
    fixed         values that are computed from nothing but constants
    """

    def __init__(self, model: ir.Model) -> None:
        self.quantizers: dict[ir.Node, Quantizer] = {}
        self.fixed = _fixed_values(model.graph)
        self._numbers: dict[ir.Value, Quantizer] = {}  # values that are dequantized
        self._codes: dict[ir.Value, Quantizer] = {}  # values that are codes
        self._factors: dict[tuple[ir.Node, int], Quantizer] = {}  # codes that operators on codes read
        self._rows: dict[tuple[Quantizer, Role], list[Reader]] = {}
        self._layers: list[ir.Node] = []
        self._problems: list[ModelError] = []
        self._inner = _unpacking_nodes(model.graph, self.fixed)
        self._values = {
            str(value.name): value
            for graph in model.graphs()
            for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs))
        }
        self._rules: Mapping[str, Callable[[ir.Node], bool]] = {
            **dict.fromkeys(QUANTIZE, self._quantize),
            **dict.fromkeys(DEQUANTIZE, self._dequantize),
            **dict.fromkeys(BLOCK, self._block),
            **dict.fromkeys(INTEGER_PRODUCTS, self._integer_product),
            DYNAMIC: self._dynamic,
            DYNAMIC_LSTM: self._dynamic_lstm,
            "Cast": self._cast,
            "MatMulNBits": self._matmul_nbits,
            "GatherBlockQuantized": self._block_gather,
            "QLinearConcat": self._code_concat,
            **dict.fromkeys(CODE_OPERATORS, self._code_operator),
        }
        for node in _all_nodes(model.graph):
            if id(node) not in self._inner:
                self._read(node)
        for index, value in enumerate(model.graph.outputs):
            if value in self._numbers:
                self._add(self._numbers[value], Reader("", index), None)

    def of(self, value: ir.Value | None) -> Quantizer | None:
        """The quantizer whose result the value is, or None if the value is not quantized."""
        return None if value is None else self._numbers.get(value)

    def factor(self, node: ir.Node, index: int) -> Quantizer | None:
        """The quantizer of the codes that an operator on codes reads as input number `index`."""
        return self._factors.get((node, index))

    def constants(self) -> set[str]:
        """The names of weights and biases that have a quantizer."""
        return {quantizer.tensor for quantizer, _ in self._rows if quantizer.is_constant}

    def is_fixed(self, value: ir.Value | None) -> bool:
        """True if the value is a constant or computed from nothing but constants."""
        return value is not None and (value in self.fixed or is_constant(value))

    def role(self, quantizer: Quantizer) -> Role:
        """The role of the tensor for its readers. A constant is a bias only if nothing reads it as a weight."""
        if not quantizer.is_constant:
            return Role.ACTIVATION
        is_bias = (quantizer, Role.BIAS) in self._rows and (quantizer, Role.WEIGHT) not in self._rows
        return Role.BIAS if is_bias else Role.WEIGHT

    def plan(self) -> QuantizationPlan:
        """The plan, with one row for all readers that see a tensor the same way, regardless of how many quantizers they
        use."""
        if self._problems:
            raise self._problems[0]
        seconds = {quantizer: first for quantizer, _ in self._rows if (first := self._first(quantizer)) is not None}
        links = {(first, _name(quantizer.node)) for quantizer, first in seconds.items()}
        merged: dict[tuple[str, Role, Choice, Choice | None], list[Reader]] = {}
        for (quantizer, role), all_readers in self._rows.items():
            first = seconds.get(quantizer)
            key = (
                (quantizer if first is None else first).tensor,
                role,
                _choice_of(quantizer),
                None if first is None else _choice_of(first),
            )
            readers = [reader for reader in all_readers if (quantizer, reader.node) not in links]
            if readers:
                merged.setdefault(key, []).extend(readers)
        rows = tuple(
            TensorChoice(tensor, role, choice, tuple(readers), first=first)
            for (tensor, role, choice, first), readers in merged.items()
        )
        return QuantizationPlan(rows, tuple(self._skipped()))

    def _first(self, quantizer: Quantizer) -> Quantizer | None:
        """The quantizer of another type whose result this one quantizes again. None if there is none, or if this is the
        third in a row."""
        before = self._numbers.get(quantizer.source)
        if before is None or before.is_constant or self._numbers.get(before.source) is not None:
            return None
        return before if _choice_of(before) != _choice_of(quantizer) else None

    def _skipped(self) -> Iterator[SkippedNode]:
        for node in self._layers:
            quantized = [index for index, value in enumerate(node.inputs) if value in self._numbers]
            if not quantized:
                yield SkippedNode(_name(node), node.op_type, ALL_IN_FLOAT)
            elif 1 not in quantized and is_held(input_value(node, 1)):
                yield SkippedNode(_name(node), node.op_type, WEIGHT_IN_FLOAT)

    def _read(self, node: ir.Node) -> None:
        """Record what the node does to its input, and which quantized numbers it reads."""
        first = input_value(node, 0)
        if node.op_type == "Sum" and len(node.inputs) == 1 and first in self._numbers and _stem(node.name, APART):
            self._numbers[node.outputs[0]] = self._numbers[first]
            return
        for index, value in enumerate(node.inputs):
            if value in self._numbers:
                self._add(self._numbers[value], Reader(_name(node), index), node)
        rule = self._rules.get(node.op_type)
        try:
            is_read = (rule is not None and rule(node)) or self._moved_codes(node)
        except _DAMAGE as error:
            self._problems.append(error if isinstance(error, ModelError) else _damaged(node, error))
            return
        known = _standard(node)
        if not is_read and known is not None and known.kind in (Kind.COMPUTE, Kind.RECURRENT):
            self._layers.append(node)

    def _add(self, quantizer: Quantizer, reader: Reader, node: ir.Node | None) -> None:
        role = Role.ACTIVATION
        if quantizer.is_constant:
            known = None if node is None else _standard(node)
            role = Role.BIAS if known is not None and reader.index == known.bias else Role.WEIGHT
        self._rows.setdefault((quantizer, role), []).append(reader)

    # Rules. Each returns False if the node does not have the role that its name suggests.

    def _quantize(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if node.domain not in _LINEAR_DOMAINS or source is None:
            return False
        hint = _hint(node, 1)
        widened = source.producer()
        if widened is not None and widened.op_type == "Cast" and _stem(widened.name, "wide"):  # float16 data
            hint, source = _stem(widened.name, "wide"), widened.inputs[0] or source
        quantizer = _linear(node, self._tensor(source, hint), source, is_held(source), None)
        self.quantizers[node] = self._codes[node.outputs[0]] = quantizer
        return True

    def _dequantize(self, node: ir.Node) -> bool:
        codes = input_value(node, 0)
        if node.domain not in _LINEAR_DOMAINS or codes is None:
            return False
        before = self._codes.get(codes)
        gather = None if before is not None else _gather_of_table(node)
        if gather is not None:
            self._table_rows(node, gather)
            return True
        if before is None:
            is_fixed = codes in self.fixed or is_held(codes)
            own = _linear(node, _stem(codes.name, "quantized") or str(codes.name), codes, is_fixed, codes)
        else:
            own = _linear(node, before.tensor, before.source, before.is_constant, codes)
        self.quantizers[node] = own
        if before is None and own.is_constant and own.scale is None:
            return True  # a weight that is unpacked, with its own scale
        result = node.outputs[0]
        narrow = _lone_reader(result)
        if narrow is not None and _cast_type(narrow) is ir.DataType.FLOAT16 and _stem(narrow.name, "narrow"):
            self._inner.add(id(narrow))  # float16 data
            result = narrow.outputs[0]
        self._numbers[result] = before or own
        return True

    def _table_rows(self, node: ir.Node, gather: ir.Node) -> None:
        """Record the table that a Gather takes rows of codes from, for the node that dequantizes them."""
        table = gather.inputs[0]
        assert table is not None
        own = _linear(node, _stem(table.name, "quantized") or str(table.name), table, True, table)

        def decide() -> Choice:
            choice, tensor = own.choice, stored_tensor(table)
            if not isinstance(choice, AffineChoice) or choice.axis is None or choice.axis >= 0 or tensor is None:
                return choice
            return replace(choice, axis=choice.axis + len(tensor.shape))  # negative, because a Gather may add axes

        quantizer = replace(own, decide=decide)
        self.quantizers[node] = quantizer
        self._add(quantizer, Reader(_name(gather), 0), gather)

    def _block(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if node.domain not in (DOMAIN, CONSTANT_DOMAIN) or source is None:
            return False
        attributes = {key: attr.value for key, attr in node.attributes.items()}

        def decide() -> BlockChoice:
            given = input_value(node, 1)
            if given is None:
                return BlockChoice(*quantizer_of(node.op_type, attributes))
            scale = _optional_array(given)
            if scale is None or scale.size != 1:
                raise ModelError(f"node '{_name(node)}' ({node.op_type}): its tensor scale is not one constant number")
            return BlockChoice(*quantizer_of(node.op_type, attributes, float(scale.reshape(()))))

        hint = _stem(node.name, node.op_type)
        if node.domain == DOMAIN:
            tensor, is_constant = self._tensor(source, hint), is_held(source)
        else:
            tensor, is_constant = str(source.name) if is_held(source) or hint is None else hint, True
            with contextlib.suppress(QuarkError, TypeError, ValueError):  # plan() reports the error
                tensor = _stem(tensor, decide().format) or tensor
        quantizer = Quantizer(tensor, source, node, is_constant, decide)
        self.quantizers[node] = self._numbers[node.outputs[0]] = quantizer
        return True

    def _cast(self, node: ir.Node) -> bool:
        """Record the second of two Casts, or one that widens a constant."""
        source = input_value(node, 0)
        if source is None or node.domain or _cast_type(node) not in _WIDE_FLOATS:
            return False
        if is_held(source) or is_turned(source):
            name = _SHORT_FLOATS.get(_dtype(source) or ir.DataType.UNDEFINED)
            original = None if name is None else _stem(source.name, name)
            if name is None or (original is None and _cast_type(node) is _dtype(source)):
                return False  # a float16 model has such Casts of its weights too; their names tell
            self._note_float(node, original or str(source.name), source, FloatChoice(name))
            return True
        first = source.producer()
        if first is None or first.op_type != "Cast" or first.domain or _cast_type(first) not in _SHORT_FLOATS:
            return False
        name, before = _SHORT_FLOATS[_cast_type(first)], input_value(first, 0)
        if before is None or before.dtype not in (None, _cast_type(node)):
            return False
        hint, clip = _stem(first.name, name), before.producer()
        back = _stem(node.name, "float")
        if hint != back and (hint == before.name or back == source.name):
            return False  # one of them belongs to the model, or widens data for DynamicQuantizeLinear
        is_clipped = (
            clip is not None and clip.op_type == "Clip" and hint is not None and _stem(clip.name, "Clip") == hint
        )
        if clip is not None and is_clipped:
            before = clip.inputs[0] or before
        self._note_float(node, self._tensor(before, hint), before, FloatChoice(name, is_saturating=is_clipped))
        return True

    def _note_float(self, node: ir.Node, tensor: str, source: ir.Value, choice: FloatChoice) -> None:
        quantizer = Quantizer(tensor, source, node, is_held(source) or is_turned(source), lambda: choice)
        self.quantizers[node] = self._numbers[node.outputs[0]] = quantizer

    def _dynamic(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if source is None:
            return False
        before, hint = source.producer(), None
        if before is not None and before.op_type == "Cast" and _stem(before.name, "float"):  # float16 data
            hint, source = _stem(before.name, "float"), before.inputs[0] or source
            before = source.producer()
        if before is not None and before.op_type == "Transpose" and re.fullmatch(_TRANSPOSE_A, f"{source.name}"):
            hint, source = None, before.inputs[0] or source
        tensor, dtype = self._tensor(source, hint), ir.DataType.UINT8
        quantizer = Quantizer(tensor, source, node, False, lambda: DynamicChoice("uint8"), dtype)
        self.quantizers[node] = self._codes[node.outputs[0]] = quantizer
        return True

    def _integer_product(self, node: ir.Node) -> bool:
        name, weight = _layer(node), input_value(node, 1)
        data = self._codes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if data is not None:
            self._add(data, Reader(name, 0), None)
        scale = _product_scale(node)
        if weight is None or scale is None or not self.is_fixed(weight):
            return True

        def decide() -> AffineChoice:
            numbers = _array(scale)
            axis = None if numbers.ndim == 0 else 0 if node.op_type == "ConvInteger" else 1
            return _affine(node, _dtype(weight), numbers, _optional_array(input_value(node, 3)), axis)

        tensor = _stem(weight.name, "quantized") or str(weight.name)
        self._add(Quantizer(tensor, weight, node, True, decide, _dtype(weight), scale), Reader(name, 1), None)
        return True

    def _dynamic_lstm(self, node: ir.Node) -> bool:
        data = input_value(node, 0)
        if node.domain != "com.microsoft" or data is None:
            return False
        name, dtype = _layer(node), ir.DataType.UINT8
        activation = Quantizer(str(data.name), data, node, False, lambda: DynamicChoice("uint8"), dtype)
        self._add(activation, Reader(name, 0), None)
        for index, position in ((1, 8), (2, 10)):
            weight, scale = input_value(node, index), input_value(node, position)
            if weight is not None and is_held(weight) and is_held(scale):
                zero_point = input_value(node, position + 1)
                decide = partial(_gate_choice, node, weight, scale, zero_point)
                tensor = _stem(weight.name, "quantized") or str(weight.name)
                quantizer = Quantizer(tensor, weight, node, True, decide, _dtype(weight), scale, zero_point)
                self._add(quantizer, Reader(name, index), None)
        return True

    def _matmul_nbits(self, node: ir.Node) -> bool:
        weight, scale = input_value(node, 1), input_value(node, 2)
        if weight is None or not is_held(scale):
            return True
        tensor = _stem(weight.name, "packed") or str(weight.name)
        quantizer = Quantizer(tensor, weight, node, True, lambda: _nbits_choice(node), None, scale)
        self.quantizers[node] = quantizer
        self._add(quantizer, Reader(_stem(node.name, "nbits") or _name(node), 1), None)
        return True

    def _block_gather(self, node: ir.Node) -> bool:
        table, scale = input_value(node, 0), input_value(node, 2)
        if table is None or not is_held(scale):
            return True
        maker = table.producer()
        if maker is not None and maker.op_type == "Reshape" and table in self.fixed:  # stored with a product
            table = maker.inputs[0] or table
        tensor = _stem(table.name, "packed") or str(table.name)
        quantizer = Quantizer(tensor, table, node, True, lambda: _table_choice(node), None, scale)
        self.quantizers[node] = quantizer
        self._add(quantizer, Reader(_stem(node.name, "nbits") or _name(node), 0), None)
        return True

    def _code_operator(self, node: ir.Node) -> bool:
        if node.domain not in _LINEAR_DOMAINS[:2]:
            return False
        form, name = CODE_OPERATORS[node.op_type], _layer(node)
        for index, position in enumerate(form.factors):
            self._code_factor(node, position, Reader(name, index))
        bias = None if form.bias is None else input_value(node, form.bias)
        scales = [input_value(node, position + 1) for position in form.factors]
        if bias is not None and all(is_held(scale) for scale in scales):

            def decide() -> AffineChoice:
                product = np.float32(attribute(node, "alpha", 1.0)) * _array(scales[0]) * _array(scales[1])
                return _affine(node, ir.DataType.INT32, product, None, 0 if product.ndim else None)

            quantizer = Quantizer(_stem(bias.name, "quantized") or str(bias.name), bias, node, True, decide)
            self._rows[quantizer, Role.BIAS] = [Reader(name, 2)]
        self._code_result(node, form.result)
        return True

    def _code_concat(self, node: ir.Node) -> bool:
        for index, position in enumerate(range(2, len(node.inputs), 3)):
            self._code_factor(node, position, Reader(_layer(node), index))
        self._code_result(node, 0)
        return True

    def _code_factor(self, node: ir.Node, position: int, reader: Reader) -> None:
        """Record that the node reads these codes."""
        codes, scale = input_value(node, position), input_value(node, position + 1)
        quantizer = None if codes is None else self._codes.get(codes)
        if codes is not None and quantizer is None and is_held(scale):

            def decide() -> AffineChoice:
                axis, numbers = None, _array(scale)
                if numbers.ndim:  # one for each output channel
                    axis = 0 if node.op_type == "QLinearConv" or attribute(node, "transB", 0) else 1
                return _affine(node, _dtype(codes), numbers, _optional_array(input_value(node, position + 2)), axis)

            tensor = _stem(codes.name, "quantized") or str(codes.name)
            zero_point = input_value(node, position + 2)
            quantizer = Quantizer(tensor, codes, node, is_held(codes), decide, _dtype(codes), scale, zero_point)
        if quantizer is not None:
            self._factors[node, position] = quantizer
            self._add(quantizer, reader, None)

    def _code_result(self, node: ir.Node, position: int) -> None:
        scale, zero_point = input_value(node, position), input_value(node, position + 1)
        if is_held(scale) and is_held(zero_point):
            result, dtype = node.outputs[0], _dtype(zero_point)

            def decide() -> AffineChoice:
                return _affine(node, dtype, _array(scale), _array(zero_point), None)

            tensor = _hint(node, position) or str(result.name)
            self._codes[result] = Quantizer(tensor, result, node, False, decide, dtype, scale, zero_point)

    def _moved_codes(self, node: ir.Node) -> bool:
        """Record a standard node that reads codes; Reshape, MaxPool, Relu and others that move codes keep the scale."""
        read = [(index, value) for index, value in enumerate(node.inputs) if value in self._codes]
        if not read or node.domain:
            return bool(read)
        name, maker = _layer(node), read[0][1].producer()
        quantizer = self._codes[read[0][1]]
        if maker is not None and _layer(maker) == name != _name(maker):  # a Relu that follows its layer
            self._codes[node.outputs[0]] = quantizer
            return True
        for index, value in read:
            self._add(self._codes[value], Reader(name, index), node)
        known = operator_facts(node)
        is_moving = node.op_type in _MOVING or (known is not None and known.kind in (Kind.PASS, Kind.ACTIVATION))
        for result in node.outputs if is_moving else ():
            # the next reader of the codes may still have the scale that was named after the tensor
            hints = (_hint(reader, index + 1) for reader, index in readers(result))
            tensor = next((hint for hint in hints if hint is not None and hint not in self._values), str(result.name))
            self._codes[result] = replace(
                quantizer, tensor=tensor, source=result, node=node, decide=lambda: quantizer.choice
            )
        return True

    def _tensor(self, source: ir.Value, hint: str | None) -> str:
        """The name of the tensor in the float model. `hint` is what the quantizer was named after.

        The hint is right if a folded Relu took its tensor with it, and if a graph output was quantized: then the result
        has taken the output's name.
        """
        name, holder = str(source.name), self._values.get(hint or "")
        if hint is None or hint == name:
            return name
        if holder is None:
            return hint
        is_renamed = _stem(name, "float") == hint or name == f"{hint}_QuantizeLinear_Input"
        return hint if is_renamed and holder.is_graph_output() else name


def _linear(node: ir.Node, tensor: str, source: ir.Value, is_fixed: bool, codes: ir.Value | None) -> Quantizer:
    """The quantizer of a QuantizeLinear or DequantizeLinear. The type is uint8 if nothing declares it."""
    scale, zero_point = input_value(node, 1), input_value(node, 2)
    dtype = _dtype(zero_point) or _dtype(codes) or ir.DataType(int(attribute(node, "output_dtype", 0)) or 2)

    def decide() -> Choice:
        if not is_held(scale):
            return DynamicChoice(dtype.name.lower())
        numbers, name = _array(scale), _SHORT_FLOATS.get(dtype) or _FLOAT8.get(dtype)
        axis = None
        if numbers.size > 1 or (numbers.ndim and "axis" in node.attributes):
            axis = int(attribute(node, "axis", 0 if node.domain == DOMAIN else 1))
        if name is not None:
            if numbers.ndim > 1:
                raise ModelError(f"node '{_name(node)}' ({node.op_type}): {name} with scales for blocks fits no plan")
            scales = tuple(numbers.astype(np.float64).ravel().tolist())
            return FloatChoice(name, name in EIGHT_BIT_FLOATS, scales, axis)
        size = int(attribute(node, "block_size", 0)) or None
        return _affine(node, dtype, numbers, _optional_array(zero_point), axis, size)

    held = (value if is_held(value) else None for value in (scale, zero_point))
    return Quantizer(tensor, source, node, is_fixed, decide, dtype, *held)


def _choice_of(quantizer: Quantizer) -> Choice:
    """The choice of a quantizer; raises a ModelError if it is malformed."""
    try:
        return quantizer.choice
    except ModelError:
        raise
    except QuarkError as error:
        raise _damaged(quantizer.node, error) from error


def _gate_choice(node: ir.Node, weight: ir.Value, scale: ir.Value | None, zero_point: ir.Value | None) -> AffineChoice:
    """The choice for a weight of DynamicQuantizeLSTM, in the layout of LSTM: [directions, gates, inputs]."""
    numbers, zeros, tensor = _array(scale), _optional_array(zero_point), stored_tensor(weight)
    shape = () if tensor is None else tuple(tensor.shape.numpy())
    if len(shape) != 3 or numbers.shape not in ((shape[0],), (shape[0], shape[2])):
        raise ModelError(f"node '{_name(node)}' ({node.op_type}): scales of '{weight.name}' contradict its shape")
    if numbers.ndim == 1:  # one for each direction
        return _affine(node, _dtype(weight), numbers, zeros, None if numbers.size == 1 else 0)
    if (numbers == numbers[0]).all() and (zeros is None or (zeros == zeros.ravel()[0]).all()):
        return _affine(node, _dtype(weight), numbers[0], None if zeros is None else zeros.ravel()[:1], 1)
    return _affine(node, _dtype(weight), numbers, zeros, 2, shape[1])  # separate for each gate of each direction


def _table_choice(node: ir.Node) -> AffineChoice:
    """The choice for the table of a GatherBlockQuantized, which reads its rows."""
    scale, packed = _array(input_value(node, 2)), _optional_array(input_value(node, 3))
    bits, size = int(attribute(node, "bits", 4)), int(attribute(node, "block_size", 128))
    axis = int(attribute(node, "quantize_axis", 1))
    is_plain = _dtype(input_value(node, 0)) is ir.DataType.UINT8 and scale.ndim == 2
    if bits not in (2, 4, 8) or size < 1 or not is_plain or axis % 2 != 1 or attribute(node, "gather_axis", 0) != 0:
        raise ModelError(f"node '{_name(node)}' (GatherBlockQuantized): a table of this form fits no plan")
    zero_points = _unpacked_zero_points(packed, bits, len(scale), scale.shape[1])
    format = f"int{bits}" if zero_points is None else f"uint{bits}"
    zeros = np.zeros(scale.size, np.int64) if zero_points is None else zero_points.ravel()
    return AffineChoice(format, tuple(scale.ravel().tolist()), tuple(zeros.tolist()), 1, size)


def _unpacked_zero_points(packed: Array | None, bits: int, lines: int, blocks: int) -> Array | None:
    """Unpack zero points [lines, blocks] from bytes; None if there are none, or if they are floats."""
    if packed is None or packed.dtype != np.uint8:
        return None
    codes = packed.reshape(lines, -1, 1) >> (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))
    return np.asarray((codes & np.uint8((1 << bits) - 1)).reshape(lines, -1)[:, :blocks].astype(np.int64))


def _nbits_choice(node: ir.Node) -> AffineChoice:
    """The choice for the weight of a MatMulNBits."""
    scale, packed = _array(input_value(node, 2)), _optional_array(input_value(node, 3))
    bits, size = int(attribute(node, "bits", 4)), int(attribute(node, "block_size", 0))
    columns = int(attribute(node, "N", 0))
    if bits not in (2, 4, 8) or columns < 1 or size < 1 or scale.size % columns:
        raise ModelError(f"node '{_name(node)}' (MatMulNBits): its attributes contradict its scales")
    format, zero_points = f"int{bits}", np.zeros(scale.size, np.int64)
    codes = _unpacked_zero_points(packed, bits, columns, scale.size // columns)
    if codes is not None:
        format, zero_points = f"uint{bits}", codes.T.ravel()
    scales = scale.reshape(columns, -1).T.ravel()
    return AffineChoice(format, tuple(scales.tolist()), tuple(zero_points.tolist()), 0, size)


def _affine(
    node: ir.Node,
    dtype: ir.DataType | None,
    scale: Array,
    zero_point: Array | None,
    axis: int | None,
    group_size: int | None = None,
) -> AffineChoice:
    """The choice for codes of that type; a missing zero point means 0, and a single one applies to all scales."""
    format = "uint8" if dtype is None else dtype.name.lower()
    if not isinstance(FORMATS.get(format), IntFormat):
        raise ModelError(f"node '{_name(node)}' ({node.op_type}): codes of type {format} fit no plan")
    scales = scale.ravel().tolist()
    zeros = [0] * len(scales) if zero_point is None else zero_point.astype(np.int64).ravel().tolist()
    if len(zeros) == 1:
        zeros *= len(scales)
    if len(zeros) != len(scales) or not scales:
        raise ModelError(f"node '{_name(node)}' ({node.op_type}) has {len(scales)} scales and {len(zeros)} zero points")
    return AffineChoice(format, tuple(scales), tuple(zeros), axis, None if axis is None else group_size)


def _product_scale(node: ir.Node) -> ir.Value | None:
    """The weight's scale of ConvInteger or MatMulInteger: a factor of what the Mul behind the Cast multiplies by."""
    cast = _lone_reader(node.outputs[0])
    scaled = _lone_reader(cast.outputs[0]) if cast is not None and cast.op_type == "Cast" else None
    if cast is None or scaled is None or scaled.op_type != "Mul":
        return None
    factor = next((value for value in scaled.inputs if value is not cast.outputs[0]), None)
    product = None if factor is None else factor.producer()
    if product is None or product.op_type != "Mul":
        return None
    return next((value for value in product.inputs if is_held(value)), None)


def _gather_of_table(node: ir.Node) -> ir.Node | None:
    """The Gather from a constant table whose rows of codes the node dequantizes. ONNX Runtime's quantizer also moves
    codes before they are dequantized, with one scale for the table."""
    value, scale = node.inputs[0], stored_tensor(input_value(node, 1))
    maker = None if value is None else value.producer()
    is_single = scale is not None and scale.size == 1
    for _ in range(_MOST_MOVES):  # a damaged graph may have cycles
        if maker is None or maker.op_type not in _MOVED or maker.domain or not is_single:
            break
        source = input_value(maker, 0)
        maker = None if source is None else source.producer()
    is_gather = maker is not None and maker.op_type == "Gather" and not maker.domain
    return maker if maker is not None and is_gather and is_held(input_value(maker, 0)) else None


def _standard(node: ir.Node) -> OperatorFacts | None:
    """The entry of a standard operator in the table of operators."""
    return OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def _lone_reader(value: ir.Value) -> ir.Node | None:
    uses = readers(value)
    return uses[0][0] if len(uses) == 1 else None


def _fixed_values(graph: ir.Graph) -> set[ir.Value]:
    """The values that are computed from nothing but constants."""
    values: set[ir.Value] = set()
    for node in _all_nodes(graph):
        is_plain = node.inputs and not node.op_type.startswith("Random")
        is_plain = is_plain and not any(graphs_in(attr) for attr in node.attributes.values())
        if is_plain and all(value is None or value in values or is_held(value) for value in node.inputs):
            values.update(node.outputs)
    return values


def _unpacking_nodes(graph: ir.Graph, fixed: Collection[ir.Value]) -> set[int]:
    """The nodes that unpack a weight for a mark; the mark describes the weight."""
    ids: set[int] = set()
    for mark in _all_nodes(graph):
        pending = list(mark.inputs) if mark.domain == CONSTANT_DOMAIN else []
        while pending:
            value = pending.pop()
            maker = value.producer() if value is not None and value in fixed else None
            if maker is not None and id(maker) not in ids:
                ids.add(id(maker))
                pending += maker.inputs
    return ids


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph, each followed by those of its subgraphs."""
    for node in graph:
        yield node
        for attr in node.attributes.values():
            for inner in graphs_in(attr):
                yield from _all_nodes(inner)


def is_held(value: ir.Value | None) -> bool:
    """True if the value is an initializer or a Constant."""
    if value is None:
        return False
    maker = value.producer()
    return is_constant(value) or (maker is not None and maker.op_type == "Constant" and not maker.domain)


def is_turned(value: ir.Value) -> bool:
    """True for the transpose of a constant: a weight that is also the table of an embedding is stored that way."""
    maker = value.producer()
    return maker is not None and maker.op_type == "Transpose" and not maker.domain and is_held(input_value(maker, 0))


def stored_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or a Constant; None for other values."""
    if value is None or not is_held(value):
        return None
    maker = value.producer()
    tensor: ir.TensorProtocol | None = value.const_value if maker is None else attribute(maker, "value")
    return tensor


def _optional_array(value: ir.Value | None) -> Array | None:
    """The numbers of a constant."""
    tensor = stored_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def _array(value: ir.Value | None) -> Array:
    array = _optional_array(value)
    if array is None:
        raise ModelError(f"'{None if value is None else value.name}' is not a constant")
    return array


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    """The type of the stored data, as opposed to the declared one."""
    if value is None:
        return None
    maker = value.producer()
    tensor = stored_tensor(maker.inputs[0] if maker is not None and is_turned(value) else value) or value.const_value
    return value.dtype if tensor is None else tensor.dtype


def _cast_type(node: ir.Node) -> ir.DataType:
    number = int(attribute(node, "to", 0))
    return ir.DataType(number) if number in _DATA_TYPES else ir.DataType.UNDEFINED


_DATA_TYPES: Sequence[int] = [kind.value for kind in ir.DataType]


def _damaged(node: ir.Node, error: Exception) -> ModelError:
    return ModelError(f"node '{_name(node)}' ({node.op_type}) is damaged: {error}")


def _name(node: ir.Node) -> str:
    """The node's name, or its output's if it has none."""
    return node.name or next((str(value.name) for value in node.outputs if value.name), node.op_type)


def _layer(node: ir.Node) -> str:
    """The float model's node that an operator on codes stands for; ONNX Runtime's quantizer appends 'quant'."""
    return _stem(node.name, node.op_type) or _stem(node.name, "quant") or _name(node)


def _stem(name: str | None, suffix: str) -> str | None:
    """The name without this suffix; a number that made the name unique is removed too.

    >>> _stem("w_quantized", "quantized"), _stem("w_quantized_1", "quantized"), _stem("w", "quantized")
    ('w', 'w', None)
    """
    match = re.fullmatch(rf"(.+)_{re.escape(suffix)}(?:_\d+)?", name or "", re.DOTALL)
    return None if match is None else match[1]


def _hint(node: ir.Node, position: int) -> str | None:
    """The tensor that scale and zero point are named after, if both agree."""
    scale, zero_point = input_value(node, position), input_value(node, position + 1)
    names = [_stem(None if scale is None else scale.name, "scale")]
    names.append(_stem(None if zero_point is None else zero_point.name, "zero_point"))
    return names[0] if names[0] == names[1] else None
