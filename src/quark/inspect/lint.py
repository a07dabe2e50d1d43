"""Check whether AMD's NPU would take a quantized file, from this project or from another tool: `quark lint`.

`CHECKS` has the checks of 8-bit files in the order of their findings, `BF16_CHECKS` those of files in bfloat16.
`docs/npu.md` says what the NPU wants, and why.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.decide.npu_positions import FOLLOWERS, is_constant_factor, npu_operations
from quark.decide.operators import OPERATORS, RECURRENT_TYPES, Kind, OperatorFacts
from quark.decide.view import Node, Value
from quark.errors import ModelError
from quark.npu import (
    BF16_OPERATORS,
    HARD_SIGMOID_FACTOR,
    LANGUAGE_OPERATORS,
    LIKELY_OPERATORS,
    RULES,
    average_pool_factor,
    is_npu_hard_sigmoid,
    leaky_relu_alpha,
)
from quark.onnx.file_graph import read_graph
from quark.onnx.graph import (
    FLOAT_TYPES,
    attribute,
    constant,
    dimensions,
    input_value,
    is_constant,
    is_read_once,
    opset,
    readers,
)
from quark.onnx.plan_reader import DYNAMIC, QuantizedGraph, Quantizer, is_dequantize, is_on_codes, is_quantize
from quark.onnx.simulate import square_side
from quark.onnx.view import operator_facts, view_of
from quark.plan import AffineChoice, BlockChoice, Role

__all__ = ["BF16_CHECKS", "CHECKS", "Finding", "Level", "Place", "Where", "lint", "places"]

RECOMMENDED_OPSET = 17
READABLE_OPSETS = range(11, 23)  # before, Clip has its bounds as attributes; beyond, everything runs on the CPU
USUAL_OPSETS = range(13, 21)  # the compiler knows every operator of these
QUANTIZER_TYPES = frozenset({"QuantizeLinear", "DequantizeLinear"})
ROUNDING_TYPES = QUANTIZER_TYPES | {"Cast", "ExtendedQuantizeLinear", "ExtendedDequantizeLinear"}
FUSED_ATTENTION = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention", "PackedAttention"})
NPU_OPERATORS = (frozenset(OPERATORS) - RECURRENT_TYPES) | QUANTIZER_TYPES | {"Constant", "Identity"}

_XINT8 = "quantize with XINT8"
_MIDDLE = {ir.DataType.UINT8: 128, ir.DataType.INT8: 0}
_TOLERANCE = 1e-5


class Level(str, Enum):
    """The severity of a finding."""

    ERROR = "error"  # the NPU's compiler refuses it, or leaves the work to the CPU
    WARNING = "warning"  # it can be compiled, and something may differ from what is expected


@dataclass(frozen=True)
class Finding:
    """`message` says what is there and what was expected, `fix` what to do. `node` or `tensor` is empty if the finding
    is about something else."""

    rule: str
    node: str
    tensor: str
    level: Level
    message: str
    fix: str

    def __str__(self) -> str:
        where = " ".join(f"'{name}'" for name in (self.node, self.tensor) if name)
        return f"{self.level.value}: {self.rule}{': ' if where else ''}{where}: {self.message}; {self.fix}"


def lint(model: str | os.PathLike[str] | onnx.ModelProto | bytes) -> tuple[Finding, ...]:
    """Return what the NPU would refuse, or compute otherwise than the file says. Empty if the file is as it should be.

    A model that is not quantized is one finding. Raises ModelError if it is not an ONNX model.
    """
    return _lint(read_graph(model))


def lint_npu_file(model: str | os.PathLike[str]) -> tuple[Finding, ...] | None:
    """`lint` a file in the NPU's numbers: 8-bit integers with power-of-two scales, one for each tensor; biases may be
    wider. None for other files."""
    graph = read_graph(model)
    try:
        choices = [entry.choice for entry in QuantizedGraph(graph).plan()]
    except ModelError:  # numbers that a plan cannot express
        return None
    narrow = [
        choice for choice in choices if not isinstance(choice, BlockChoice) and choice.format in ("int8", "uint8")
    ]
    is_for_npu = narrow and all(
        isinstance(choice, AffineChoice) and len(choice.scale) == 1 and position_of(choice.scale[0]) is not None
        for choice in narrow
    )
    return _lint(graph) if is_for_npu else None


def other_purpose(model: str | os.PathLike[str]) -> str:
    """The purpose of a quantized file, if most of its numbers are neither the NPU's power-of-two int8 nor bfloat16;
    else ''."""
    graph = read_graph(model)
    if is_bfloat16(graph):
        return ""
    try:
        choices = [entry.choice for entry in QuantizedGraph(graph).plan()]
    except ModelError:  # numbers that a plan cannot express
        return ""
    scales = [choice.scale for choice in choices if isinstance(choice, AffineChoice)]
    if len(scales) < len(choices) / 2:
        names = Counter(str(choice) for choice in choices if not isinstance(choice, AffineChoice))
        return f"most of its tensors are {names.most_common(1)[0][0]}"
    is_shift = [len(scale) == 1 and position_of(scale[0]) is not None for scale in scales]
    if not scales or sum(is_shift) >= len(scales) / 2:
        return ""
    return f"{is_shift.count(False)} of its {len(scales)} scales are not powers of two, or are per channel"


class Where(str, Enum):
    """The place where a node would run, as far as AMD's documents tell."""

    NPU = "NPU"
    UNKNOWN = "unknown"  # depends on the compiler's release
    CPU = "CPU"


@dataclass(frozen=True)
class Place:
    """The place where a node would run; `reason` is empty for the NPU."""

    node: str
    op_type: str
    where: Where
    reason: str = ""


def places(model: str | os.PathLike[str] | onnx.ModelProto | bytes, findings: Iterable[Finding]) -> tuple[Place, ...]:
    """Return where each node would run by these findings, without those that quantize or round."""
    reasons: dict[str, tuple[Where, str]] = {}
    for finding in findings:
        if finding.node and (finding.level is Level.ERROR or finding.rule in ("Operator", "Unlisted")):
            reasons.setdefault(
                finding.node, (Where.UNKNOWN if finding.rule == "Unlisted" else Where.CPU, finding.message)
            )
    nodes = [node for node in read_graph(model).graph if node.op_type not in ROUNDING_TYPES]
    return tuple(Place(str(node.name), node.op_type, *reasons.get(str(node.name), (Where.NPU, ""))) for node in nodes)


def is_bfloat16(model: ir.Model) -> bool:
    """True if the tensors of a model are rounded to bfloat16, or stored in it, and none are integers."""
    nodes = list(model.graph)
    if any(not node.domain and (node.op_type in QUANTIZER_TYPES or _is_integer(node)) for node in nodes):
        return False
    tensors = [*model.graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
    return any(value.dtype == ir.DataType.BFLOAT16 for value in tensors)


def _lint(graph: ir.Model) -> tuple[Finding, ...]:
    if is_bfloat16(graph):
        return tuple(dict.fromkeys(finding for check in BF16_CHECKS for finding in check(graph)))
    if not any(node.domain or node.op_type in QUANTIZER_TYPES or _is_integer(node) for node in graph.graph):
        message = "the model is not quantized: it has no QuantizeLinear or DequantizeLinear"
        fix = (
            "quantize it: quark quantize MODEL OUTPUT --config XINT8 --calib FOLDER. The compiler also takes float32 "
            "models and computes them in BF16: lint the file of --config BF16 --set BF16QDQToCast=true for that"
        )
        return (Finding("Quantized", "", "", Level.ERROR, message, fix),)
    quantizers = FileQuantizers(graph)
    checks = CHECKS if quantizers.all else (check_opset, check_inputs, check_operators)
    return tuple(dict.fromkeys(finding for check in checks for finding in check(graph, quantizers)))


# --- quantizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorKey:
    """The tensor that is quantized; for a constant also its DequantizeLinear."""

    tensor: str
    node: str = ""


@dataclass(frozen=True, eq=False)
class NpuQuantizer:
    """A QuantizeLinear or DequantizeLinear with its numbers; `scale` is None if it is computed at run time."""

    node: ir.Node
    key: TensorKey
    role: Role
    is_constant: bool
    scale: NDArray[Any] | None
    zero_point: NDArray[Any] | None
    codes: ir.DataType

    @property
    def position(self) -> int | None:
        """The position, if there is one scale and it is a power of two."""
        is_single = self.scale is not None and self.scale.size == 1
        return position_of(float(self.scale.reshape(()))) if self.scale is not None and is_single else None

    @property
    def uses(self) -> list[tuple[ir.Node, int]]:
        """The readers of the tensor after it was dequantized."""
        outputs = [self.node.outputs[0]]
        if is_quantize(self.node):
            outputs = [node.outputs[0] for node, _ in readers(outputs[0]) if is_dequantize(node)]
        return [use for value in outputs for use in readers(value)]

    @property
    def parameters(self) -> tuple[object, ...]:
        """The parameters that quantizers of one tensor must have in common."""
        scale = None if self.scale is None else tuple(self.scale.ravel().tolist())
        return scale, (0,) if self.zero_point is None else tuple(self.zero_point.ravel().tolist()), self.codes

    def finding(self, rule: str, message: str, fix: str) -> Finding:
        """Name the node that reads the constant or computes the tensor: people know those, not the quantizers."""
        uses, source = self.uses if self.is_constant else [], self.node.inputs[0]
        node = uses[0][0] if uses else None if source is None else source.producer()
        return Finding(rule, str((node or self.node).name), self.key.tensor, Level.ERROR, message, fix)


def position_of(scale: float) -> int | None:
    """The p for which scale = 2^-p, or None if there is none.

    >>> position_of(0.25), position_of(0.3)
    (2, None)
    """
    significand, exponent = math.frexp(scale)
    return 1 - exponent if significand == 0.5 else None


class FileQuantizers:
    """The QuantizeLinear and DequantizeLinear nodes of the main graph, and their positions: the `Quantizers` of a file.

    A computed tensor has one key, however many pairs stand behind it; a constant has one for each DequantizeLinear.
    """

    def __init__(self, model: ir.Model) -> None:
        self.view = view_of(model)
        graph = QuantizedGraph(model)
        linear = (quantizer for quantizer in graph.quantizers.values() if quantizer.node.op_type in QUANTIZER_TYPES)
        quantizers = [_npu_quantizer(graph, quantizer) for quantizer in linear if quantizer.node.graph is model.graph]
        self._by_node = {quantizer.node: quantizer for quantizer in quantizers}
        self._nodes = {node.origin: node for node in self.view}
        self.all = tuple(quantizers)
        self.positions: dict[Hashable, int] = {}
        for quantizer in self.all:
            if quantizer.position is not None:
                self.positions.setdefault(quantizer.key, quantizer.position)

    def of(self, value: ir.Value | None) -> NpuQuantizer | None:
        """The DequantizeLinear whose result the value is."""
        writer = None if value is None else value.producer()
        return self._by_node.get(writer) if writer is not None and is_dequantize(writer) else None

    def read(self, node: Node, index: int) -> TensorKey | None:
        value = node.input(index)
        quantizer = None if value is None else self.of(value.origin)
        return None if quantizer is None else quantizer.key

    def written(self, value: Value) -> TensorKey | None:
        quantizers = (self._by_node.get(reader.origin) for reader, _ in value.readers if is_quantize(reader.origin))
        return next((quantizer.key for quantizer in quantizers if quantizer is not None), None)

    def source(self, value: Value) -> Value:
        for is_one in (is_dequantize, is_quantize):
            writer = value.producer
            if writer is not None and writer.origin in self._by_node and is_one(writer.origin):
                value = writer.input(0) or value
        return value

    def is_constant_factor(self, node: ir.Node) -> bool:
        """True if the node stands for the NPU's constant of the operator before it."""
        viewed = self._nodes.get(node)
        return viewed is not None and is_constant_factor(viewed, self)


def _npu_quantizer(graph: QuantizedGraph, quantizer: Quantizer) -> NpuQuantizer:
    node, has_numbers = quantizer.node, is_constant(quantizer.source)
    key = TensorKey(str(quantizer.source.name), str(node.name) if has_numbers else "")
    scale, zero_point = constant(quantizer.scale), constant(quantizer.zero_point)
    if not has_numbers:
        scale, zero_point = _without_repetition(scale), _without_repetition(zero_point)
    assert quantizer.dtype is not None
    role = graph.role(graph.of(node.outputs[0]) or quantizer) if has_numbers else Role.ACTIVATION
    return NpuQuantizer(node, key, role, has_numbers, scale, zero_point, quantizer.dtype)


def _without_repetition(numbers: NDArray[Any] | None) -> NDArray[Any] | None:
    """One number if all channels have the same, as behind layers in float: see `keep_float` in insert."""
    is_same = numbers is not None and numbers.size > 1 and bool((numbers == numbers.flat[0]).all())
    return np.asarray(numbers.flat[0]) if numbers is not None and is_same else numbers


# --- checks -----------------------------------------------------------------------------------------------------------


def check_opset(model: ir.Model, _: FileQuantizers | None = None) -> Iterator[Finding]:
    """The compiler reads only some opsets."""
    version = opset(model)
    if version in USUAL_OPSETS:
        return
    level = Level.WARNING if version in READABLE_OPSETS else Level.ERROR
    message = f"opset {version}, expected {USUAL_OPSETS[0]} to {USUAL_OPSETS[-1]}, best {RECOMMENDED_OPSET}"
    fix = f"export the float model for opset {RECOMMENDED_OPSET}"
    if version < RECOMMENDED_OPSET:
        fix = f"quantize with ConvertOpsetVersion: {RECOMMENDED_OPSET}"
    yield Finding("Opset", "", "", level, message, fix)


def check_inputs(model: ir.Model, _: FileQuantizers | None = None) -> Iterator[Finding]:
    """Every size of every input is fixed, and the batch is 1. The compiler can bind a free batch, and nothing else."""
    for value in model.graph.inputs:
        name, sizes = str(value.name), dimensions(value)
        if sizes is None:
            message, fix = "the shape of the input is not known, expected fixed sizes", "[1, ...]', with all sizes"
            yield Finding("FixedShape", "", name, Level.ERROR, message, f"quantize with FixShapes: '{name}:{fix}")
            continue
        free = [axis for axis, size in enumerate(sizes) if size is None]
        shape = "[" + ", ".join(str(size) for size in value.shape or ()) + "]"
        wanted = ",".join(str(size or ("..." if axis else "1")) for axis, size in enumerate(sizes))
        fix = f"quantize with FixShapes: '{name}:[{wanted}]'"
        if free == [0]:
            message = f"the batch of {shape} is free, expected 1; a compiler may bind it"
            yield Finding("Batch", "", name, Level.WARNING, message, fix)
        elif free:
            message = f"axis {', '.join(map(str, free))} of {shape} is free, expected fixed sizes"
            yield Finding("FixedShape", "", name, Level.ERROR, message, fix)
        if len(sizes) > 1 and sizes[0] not in (None, 1):
            fix = "export the model with a batch of 1, or a free one"
            yield Finding("Batch", "", name, Level.ERROR, f"the batch of {shape} is {sizes[0]}, expected 1", fix)


def check_operators(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    """The NPU has every operator: those with a quantized form (`choose.operators`), between standard quantizers."""
    for node in model.graph:
        name, level = str(node.name), Level.ERROR
        if node.domain:
            message = f"operator {node.op_type} of domain {node.domain}, expected standard operators only"
            fix = "quantize the float model with XINT8, whose quantizers are standard"
            if node.op_type in QUANTIZER_TYPES:
                fix = "use 8 bits, and convert_fp16_to_fp32 for a model of float16: quantizers are standard then"
            yield Finding("CustomDomain", name, "", level, message, fix)
        elif _is_integer(node):
            message = f"operator {node.op_type}, which computes on codes; expected pairs of quantizers around floats"
            fix = "quantize with quant_format=QuantFormat.QDQ and without use_dynamic_quant"
            yield Finding("Operator", name, "", level, message, fix)
        elif node.op_type not in NPU_OPERATORS:
            message = f"the NPU has no {node.op_type}: it runs on the CPU, and cuts the network in two"
            fix = "replace it by operators that the NPU has; docs/npu.md lists them"
            if not any(_is_float(value) for value in node.outputs):  # it computes shapes
                level, message = Level.WARNING, f"{node.op_type} on integers runs on the CPU"
                fix = "with fixed shapes (FixShapes) it can be computed beforehand"
            yield Finding("Operator", name, "", level, message, fix)
        elif node.op_type in ("Min", "Max"):
            yield from _per_channel_bounds(node, quantizers)


def check_attention(model: ir.Model, _: FileQuantizers) -> Iterator[Finding]:
    """A product with what Softmax gives, as in attention: AMD compiles transformers in BF16, and INT8 is for CNNs."""
    for node in model.graph:
        writers = [_writer(value) for value in node.inputs[:2]] if node.op_type == "MatMul" else []
        if node.op_type in FUSED_ATTENTION or any(
            writer is not None and writer.op_type == "Softmax" for writer in writers
        ):
            message = "the network has attention; AMD's documents name BF16 for transformers, INT8 for CNNs only"
            fix = "quantize the float model with BF16 and BF16QDQToCast: true, and lint that file"
            yield Finding("Transformer", str(node.name), "", Level.WARNING, message, fix)
            return


def _writer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes the value, before it was rounded or masked."""
    writer = None if value is None else value.producer()
    while writer is not None and writer.op_type in ROUNDING_TYPES | {"Dropout"}:
        writer = None if writer.inputs[0] is None else writer.inputs[0].producer()
    return writer


def check_bfloat16_operators(model: ir.Model) -> Iterator[Finding]:
    """The compiler has every operator in BF16, by the lists of `quark.npu.operators`; rounding is written as Casts."""
    for node in model.graph:
        name, op_type = str(node.name), node.op_type
        if op_type in ROUNDING_TYPES:
            if node.domain:
                message = f"bfloat16 as {op_type} of domain {node.domain}, expected Casts"
                yield Finding("CustomDomain", name, "", Level.ERROR, message, "quantize with BF16QDQToCast: true")
            continue
        if not node.domain and op_type in BF16_OPERATORS:
            continue
        if not node.domain and op_type in LIKELY_OPERATORS:
            message = f"AMD's table for BF16 (Ryzen AI 1.5.0) has no {op_type}; newer compilers probably take it"
            fix = "look into vitisai_ep_report.json, which the session writes to its cache folder"
            yield Finding("Unlisted", name, "", Level.WARNING, message, fix)
            continue
        what = f"{op_type} of domain {node.domain}" if node.domain else op_type
        message = f"no list of AMD's has {what} in BF16: it runs on the CPU, and cuts the network in two"
        fix = "export it as standard operators; docs/npu.md lists those of BF16"
        if op_type in LANGUAGE_OPERATORS:
            message = f"{what} is taken by AMD's flow for language models alone; in a session it runs on the CPU"
            fix = "export without fused operators, or use that flow (ONNX Runtime GenAI)"
        level = Level.ERROR if any(_is_float(value) for value in node.outputs) else Level.WARNING  # shapes, indices
        yield Finding("Operator", name, "", level, message, fix)


def check_pooling(model: ir.Model, _: FileQuantizers | None = None) -> Iterator[Finding]:
    """Windows of pooling end inside the padded input. With ceil_mode the last one may reach beyond it, and compilers
    differ in what they read there."""
    for node in model.graph:
        if node.domain or node.op_type not in ("MaxPool", "AveragePool") or not attribute(node, "ceil_mode", 0):
            continue
        sizes, kernel = dimensions(node.inputs[0]), attribute(node, "kernel_shape", ())
        strides, pads = attribute(node, "strides", [1] * len(kernel)), attribute(node, "pads", [0] * 2 * len(kernel))
        spare = [
            (size + pads[axis] + pads[axis + len(kernel)] - kernel[axis]) % strides[axis]
            for axis, size in enumerate((sizes or ())[2:])
            if isinstance(size, int)
        ]
        if len(spare) == len(kernel) and not any(spare):
            continue  # rounding up and down are the same
        message = "ceil_mode=1: the last window reaches beyond the input, which compilers treat differently; expected 0"
        fix = "export with ceil_mode=False, and a Pad in front if the size of the output has to stay"
        yield Finding("CeilMode", str(node.name), "", Level.WARNING, message, fix)


def _is_integer(node: ir.Node) -> bool:
    """True for standard operators that compute with codes, or that choose scales at run time."""
    return not node.domain and (is_on_codes(node) or node.op_type == DYNAMIC)


def _per_channel_bounds(node: ir.Node, quantizers: FileQuantizers) -> Iterator[Finding]:
    """Equalization turns a Clip into a Min with a bound for each channel; the NPU has one for a tensor."""
    for value in node.inputs:
        quantizer = quantizers.of(value)
        bound = quantizer.node.inputs[0] if quantizer is not None and quantizer.is_constant else value
        size = 1 if bound is None or bound.const_value is None or not is_constant(bound) else bound.const_value.size
        if size > 1:
            message = f"{node.op_type} with a bound for each of {size} channels, expected a Clip with one bound"
            fix = "equalize with CLEClip 'calibrated' or 'skip'"
            yield Finding("Operator", str(node.name), "", Level.ERROR, message, fix)


def check_float_tensors(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    """Tensors between the NPU's operators that are not quantized: the work on them goes to the CPU."""
    for node in model.graph:
        known = _npu_facts(node)
        for index, value in enumerate(() if known is None else node.inputs):
            if known is not None and value is not None and _is_float_operand(node, known, index, quantizers):
                level = Level.ERROR if known.kind is Kind.COMPUTE else Level.WARNING
                message = f"{node.op_type} reads '{value.name}' in float, expected 8 bits"
                fix = "quantize the node too: take it out of nodes_to_exclude and similar options; enable_npu_cnn is on"
                yield Finding("FloatTensor", str(node.name), str(value.name), level, message, fix)
    for value in model.graph.outputs:
        writer = value.producer()
        if writer is not None and _npu_facts(writer) is not None and not is_dequantize(writer) and _is_float(value):
            message = f"output '{value.name}' of the graph is not quantized"
            fix = "quantize with enable_npu_cnn, as XINT8 does"
            yield Finding("FloatTensor", str(writer.name), str(value.name), Level.WARNING, message, fix)


def _npu_facts(node: ir.Node) -> OperatorFacts | None:
    """The facts about an operator that the NPU has."""
    return None if node.op_type in RECURRENT_TYPES else operator_facts(node)


def _is_float_operand(node: ir.Node, known: OperatorFacts, index: int, quantizers: FileQuantizers) -> bool:
    """True if the input should be quantized and is not.

    Nothing is quantized between an operator and the activation that is computed with it, and before the Mul that
    stands for an NPU's constant.
    """
    value = node.inputs[index]
    is_operand = known.data is None or index in (*known.data, known.weight, known.bias)
    if value is None or not is_operand or not _is_float(value) or quantizers.of(value) is not None:
        return False
    writer = value.producer()
    is_behind = writer is not None and index == 0 and is_read_once(value) and _npu_facts(writer) is not None
    is_padded = writer is not None and writer.op_type == "Pad" and node.op_type == "AveragePool"
    is_computed_with = is_behind and (node.op_type in FOLLOWERS or is_padded)
    return not (is_computed_with or quantizers.is_constant_factor(node))


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOAT_TYPES or value.dtype is None


def check_numbers(_: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    """Codes are those of the NPU: 8 bits around zero, one power-of-two scale for a tensor.

    activations      uint8 with zero point 128, or int8 with 0: the same numbers
    weights, biases  int8 with zero point 0
    """
    for quantizer in quantizers.all:
        if quantizer.is_constant or is_quantize(quantizer.node):  # the second of a pair is checked for being the same
            if quantizer.scale is None:
                message = "the scale is computed at run time, expected a constant"
                yield quantizer.finding("PowerOfTwoScale", message, f"{_XINT8}: the NPU takes no dynamic quantization")
            elif quantizer.scale.size > 1:
                message = f"{quantizer.scale.size} scales, expected one for the tensor"
                yield quantizer.finding("PerTensor", message, "quantize with per_channel=False, as XINT8 does")
            elif quantizer.position is None:
                message = f"scale {float(quantizer.scale.reshape(())):.9g} is not a power of two"
                yield quantizer.finding(
                    "PowerOfTwoScale", message, "quantize with PowerOfTwoMethod.MinMSE, as XINT8 does"
                )
            yield from _check_codes(quantizer)
    first: dict[object, NpuQuantizer] = {}
    for quantizer in quantizers.all:
        other = first.setdefault(quantizer.key, quantizer)
        if quantizer.parameters != other.parameters:
            message = f"quantized differently by '{other.node.name}' and '{quantizer.node.name}', expected one scale"
            fix = f"{_XINT8}; where layers have configs of their own, give neighbours the same"
            yield quantizer.finding("OneScale", message, fix)


def _check_codes(quantizer: NpuQuantizer) -> Iterator[Finding]:
    known, name = [operator_facts(node) for node, _ in quantizer.uses], quantizer.codes.name.lower()
    # constant operands of Add, Mul and the like may have the codes of an activation
    is_operand = bool(known) and all(fact is not None and fact.kind is not Kind.COMPUTE for fact in known)
    is_weight = quantizer.role is not Role.ACTIVATION and not is_operand
    wanted = "int8" if is_weight else "uint8 or int8"
    if name not in wanted.split(" or "):
        fix = "leave Int32Bias and Int16Bias out, as XINT8 does" if quantizer.role is Role.BIAS else _XINT8
        yield quantizer.finding("Int8", f"{quantizer.role.value} of {name}, expected {wanted}", fix)
        return
    zero_points = (
        [0] if quantizer.zero_point is None else sorted({int(number) for number in quantizer.zero_point.ravel()})
    )
    middle = _MIDDLE[quantizer.codes]
    if zero_points != [middle]:
        fix = f"quantize with {'WeightSymmetric' if is_weight else 'ActivationSymmetric'}, as XINT8 does"
        if zero_points == [0]:
            fix += " and without UseUnsignedReLU"
        shown = ", ".join(map(str, zero_points[:3]))
        yield quantizer.finding("Symmetric", f"zero point {shown} of {name}, expected {middle}", fix)


def check_positions(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    """The ten rules on positions, `quark.npu.RULES`, for every operator of a file."""
    for operation in npu_operations(quantizers.view, quantizers):
        for rule in RULES:
            for violation in rule.check(operation, quantizers.positions):
                bound = violation.bound
                assert isinstance(bound.key, TensorKey)
                before = quantizers.positions[bound.key]
                after = before - bound.direction * bound.excess
                fix = (
                    f"quantize with {violation.rule} and NPULimitationCheck on, as XINT8 has them: it goes from "
                    f"{before} to {after}"
                )
                yield Finding(violation.rule, violation.operation, bound.key.tensor, Level.ERROR, str(violation), fix)


def check_constants(model: ir.Model, quantizers: FileQuantizers) -> Iterator[Finding]:
    """Operators that the NPU computes with another constant than the file says, so that the file is a little off."""
    for node in model.graph:
        if node.domain:
            continue
        if node.op_type == "LeakyRelu":
            alpha = float(attribute(node, "alpha", 0.01))
            wanted = leaky_relu_alpha(alpha)
            if not math.isclose(alpha, wanted, rel_tol=_TOLERANCE, abs_tol=1e-9):
                message = f"slope {alpha:.6g}, expected a multiple of 1/256: the NPU has {wanted:.6g}"
                yield _constant_finding(node, message, "ConvertLeakyReluToDPUVersion")
        elif node.op_type == "Sigmoid":
            message = "the NPU computes HardSigmoid in the place of Sigmoid, off by up to 0.07"
            yield _constant_finding(node, message, "ConvertSigmoidToHardSigmoid")
        elif node.op_type == "HardSigmoid":
            alpha, beta = float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))
            if is_npu_hard_sigmoid(alpha, beta):
                yield from _check_factor(node, HARD_SIGMOID_FACTOR, quantizers, "ConvertHardSigmoidToDPUVersion")
            else:
                message = f"HardSigmoid of alpha {alpha:.6g} and beta {beta:.6g}, expected 1/6 and 1/2"
                fix = "train or export with that HardSigmoid; others run on the CPU"
                yield Finding("NpuConstant", str(node.name), "", Level.WARNING, message, fix)
        elif node.op_type in ("AveragePool", "GlobalAveragePool"):
            side = square_side(node)
            if side is not None:
                factor = average_pool_factor(side, side)
                yield from _check_factor(node, factor, quantizers, "ConvertAvgPoolToDPUVersion")


def _check_factor(node: ir.Node, wanted: float, quantizers: FileQuantizers, option: str) -> Iterator[Finding]:
    """The result of the node is multiplied by the factor."""
    actual = 1.0
    for reader, _ in readers(node.outputs[0]):
        factor = constant(input_value(reader, 1)) if quantizers.is_constant_factor(reader) else None
        actual = actual if factor is None else float(factor.reshape(()))
    if not math.isclose(actual, wanted, rel_tol=_TOLERANCE):
        message = f"the NPU gives {wanted:.6g} times the result, expected a Mul by that; there is {actual:.6g}"
        yield _constant_finding(node, message, option)


def _constant_finding(node: ir.Node, message: str, option: str) -> Finding:
    fix = f"quantize with {option} and SimulateDPU on, as XINT8 has them"
    return Finding("NpuConstant", str(node.name), str(node.outputs[0].name), Level.WARNING, message, fix)


Check = Callable[[ir.Model, FileQuantizers], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_opset,
    check_inputs,
    check_operators,
    check_attention,
    check_pooling,
    check_float_tensors,
    check_numbers,
    check_positions,
    check_constants,
)
BF16_CHECKS: tuple[Callable[[ir.Model], Iterator[Finding]], ...] = (
    check_opset,
    check_inputs,
    check_bfloat16_operators,
    check_pooling,
)
