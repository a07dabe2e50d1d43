"""What is inside an ONNX file: a value with everything that `quark inspect` tells.

Quantized tensors are recognised by the nodes that make them:

    QuantizeLinear, DequantizeLinear     integers (or 8-bit floats): the type of the codes; a constant is a weight, or
                                         a bias where a convolution or Gemm adds it
    Extended*Linear                      the same, for types that ONNX Runtime's own do not take
    MX-, BFPQuantizeDequantize           block formats; a constant input is a weight, and so is one that the file holds
                                         packed: its mark reads what nodes unpack
    QLinear*, *Integer, MatMulNBits      operators that compute with the codes themselves

Weights in external files are measured by what the model says of them, not read.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quark.errors import ModelError, QuarkError
from quark.ops.constant_marks import CONSTANT_DOMAIN
from quark.ops.schema import DOMAIN, quantizer_of

if TYPE_CHECKING:
    import onnx

QUANTIZE = {"QuantizeLinear", "ExtendedQuantizeLinear"}
DEQUANTIZE = {"DequantizeLinear", "ExtendedDequantizeLinear"}
WITH_BIAS = {"Conv", "ConvTranspose", "Gemm"}
BIAS_INPUT = 2
BLOCK = {"MXQuantizeDequantize", "BFPQuantizeDequantize"}
INTEGER_OPERATORS = {"ConvInteger", "MatMulInteger"}
Reader: TypeAlias = "Callable[[Path], onnx.ModelProto]"


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the graph; a dimension is a number, a name, or '?'."""

    name: str
    type: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        shape = "of unknown rank" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.name}: {self.type} {shape}"


@dataclass(frozen=True)
class Parameters:
    """The constants of one type: how many values, and what they weigh."""

    type: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """One file. `quantized` counts tensors by role and format, such as {"weights": {"int8 per channel": 53}}."""

    name: str
    bytes: int
    producer: str
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: dict[str, int]
    parameters: tuple[Parameters, ...]
    quantized: dict[str, dict[str, int]]
    functions: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        return bool(self.quantized)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_quantized": self.is_quantized}


def _read_whole(path: Path) -> onnx.ModelProto:
    import onnx

    return onnx.load(path, load_external_data=False)


def inspect_model(path: Path, read: Reader = _read_whole) -> Inspection:
    """Read the file and look; the model need not run. Raises ModelError if its parts contradict each other.

    Of weights only types and shapes are looked at: `read` may leave their values out.
    """
    model = _read(path, read)
    try:
        return _inspected(path, model)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"model '{path}' is damaged: {error}. Fetch or export it again") from error


def _inspected(path: Path, model: onnx.ModelProto) -> Inspection:
    graph = model.graph
    return Inspection(
        name=path.name,
        bytes=_size(path, model),
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        ir_version=model.ir_version,
        opsets={each.domain or "ai.onnx": each.version for each in model.opset_import},
        inputs=tuple(_port(info) for info in graph.input),
        outputs=tuple(_port(info) for info in graph.output),
        nodes=dict(Counter(_op_name(node) for node in _nodes(graph)).most_common()),
        parameters=_parameters(graph),
        quantized=_quantized(graph),
        functions=tuple(f"{function.domain}.{function.name}" for function in model.functions),
        metadata={entry.key: entry.value for entry in model.metadata_props},
    )


def model_bytes(path: Path, read: Reader = _read_whole) -> int:
    """The size of the file and of the external files that its weights are in."""
    return _size(path, _read(path, read))


def _read(path: Path, read: Reader) -> onnx.ModelProto:
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        what = "it is a device or pipe" if path.exists() and not path.is_dir() else what
        raise ModelError(f"model '{path}': {what}; expected an ONNX model")
    try:
        model = read(path)
    except QuarkError:
        raise
    except Exception as error:  # on what is no model, protobuf fails in ways of its own
        raise ModelError(f"model '{path}' cannot be read as ONNX: {error}") from error
    if not model.opset_import:
        raise ModelError(f"model '{path}' is not an ONNX model: it names no operator set")
    return model


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, each followed by those of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in _subgraphs(node):
            yield from _nodes(inner)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _op_name(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _port(info: onnx.ValueInfoProto) -> Port:
    """A sequence or an optional value has the type and shape of what it holds, with that word before it."""
    kind, words = info.type, ""
    while not kind.HasField("tensor_type"):
        if kind.HasField("sequence_type"):
            kind, words = kind.sequence_type.elem_type, f"{words}sequence of "
        elif kind.HasField("optional_type"):
            kind, words = kind.optional_type.elem_type, f"{words}optional "
        else:
            name = (
                "map" if kind.HasField("map_type") else "sparse" if kind.HasField("sparse_tensor_type") else "unknown"
            )
            return Port(info.name, f"{words}{name}", None)
    tensor = kind.tensor_type
    shape = tuple([_dimension(each) for each in tensor.shape.dim]) if tensor.HasField("shape") else None
    return Port(info.name, f"{words}{_type_name(tensor.elem_type)}" if words else _type_name(tensor.elem_type), shape)


@functools.cache
def _type_name(number: int) -> str:
    """As numpy calls it; ONNX's own name where numpy has none."""
    import onnx

    name = onnx.TensorProto.DataType.Name(number).lower() if number else "unknown"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _dimension(size: onnx.TensorShapeProto.Dimension) -> int | str:
    return size.dim_value if size.HasField("dim_value") else size.dim_param or "?"


def _size(path: Path, model: onnx.ModelProto) -> int:
    """The file and the external files that its weights are in."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    beside = {os.path.join(path.parent, entry.value) for entry in entries if entry.key == "location"}
    return path.stat().st_size + sum(os.path.getsize(each) for each in beside if os.path.isfile(each))


def _parameters(graph: onnx.GraphProto) -> tuple[Parameters, ...]:
    counts: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for tensor in graph.initializer:
        count = math.prod(tensor.dims)
        counts[tensor.data_type] += count
        texts = tensor.string_data
        sizes[tensor.data_type] += sum(map(len, texts)) if texts else -(-count * _bits(tensor.data_type) // 8)
    return tuple(Parameters(_type_name(number), counts[number], size) for number, size in sizes.most_common())


@functools.cache
def _bits(number: int) -> int:
    """Bits that a value of the type takes, packed as ONNX packs it."""
    import onnx_ir

    kind = onnx_ir.DataType(number)
    return 0 if kind == onnx_ir.DataType.STRING else int(kind.bitwidth)


@dataclass(eq=False)
class _Readers:
    """What the nodes that read a value have in common. A value can have millions of readers, which are not kept."""

    count: int = 0
    biases: int = 0  # that add the value as a bias
    dequantizers: int = 0
    is_marked: bool = False  # a mark of a constant says more than the codes
    dequantized: list[_Readers] = field(default_factory=list)  # of what those dequantizers give


@dataclass(eq=False)
class _Scope:
    """The names of one graph. `outer` is the graph around it."""

    outer: _Scope | None
    made: set[str] = field(default_factory=set)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    readers: dict[str, _Readers] = field(default_factory=dict)  # of what quantizers and dequantizers give

    def home(self, name: str) -> _Scope:
        """The scope that the name belongs to."""
        scope = self
        while name not in scope.made and scope.outer is not None:
            scope = scope.outer
        return scope

    def constant(self, node: onnx.NodeProto, index: int) -> onnx.TensorProto | None:
        """What an input of a node is, if that is known beforehand."""
        name = node.input[index] if index < len(node.input) else ""
        return self.home(name).constants.get(name) if name else None


def _quantized(graph: onnx.GraphProto) -> dict[str, dict[str, int]]:
    if not any(_may_quantize(node) for node in _nodes(graph)):
        return {}
    found: dict[str, Counter[str]] = {}
    for scope, node in _placed(graph, None):
        kind = _quantized_by(node, scope)
        if kind is not None:
            role, what = kind
            found.setdefault(role, Counter())[what] += 1
    order = ("activations", "weights", "biases", "operators")
    return {role: dict(found[role].most_common()) for role in order if role in found}


def _may_quantize(node: onnx.NodeProto) -> bool:
    kind = node.op_type
    known = kind in QUANTIZE or kind in DEQUANTIZE or kind in BLOCK or kind in INTEGER_OPERATORS
    return known or kind == "MatMulNBits" or kind.startswith("QLinear")


def _placed(graph: onnx.GraphProto, outer: _Scope | None) -> list[tuple[_Scope, onnx.NodeProto]]:
    """The nodes that may quantize, each with the scope that it is in."""
    scope = _Scope(outer)
    scope.made.update(info.name for info in graph.input)
    for tensor in graph.initializer:
        scope.made.add(tensor.name)
        scope.constants[tensor.name] = tensor
    result: list[tuple[_Scope, onnx.NodeProto]] = []
    for node in graph.node:
        scope.made.update(node.output)
        if node.op_type == "Constant" and node.output:
            value = _constant_value(node)
            if value is not None:
                scope.constants[node.output[0]] = value
        elif _may_quantize(node) and node.output:
            scope.readers[node.output[0]] = _Readers()
            result.append((scope, node))
    for node in graph.node:
        for index, name in enumerate(node.input):
            readers = scope.home(name).readers.get(name) if name else None
            if readers is None:
                continue
            readers.count += 1
            readers.is_marked |= node.domain == CONSTANT_DOMAIN
            if index == BIAS_INPUT and node.op_type in WITH_BIAS:
                readers.biases += 1
            elif node.op_type in DEQUANTIZE:
                readers.dequantizers += 1
                if index == 0 and node.output:
                    readers.dequantized.append(scope.readers[node.output[0]])
        for inner in _subgraphs(node):
            result += _placed(inner, scope)
    return result


def _constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Type and shape of what a Constant node gives."""
    import onnx

    for attribute in node.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            value: onnx.TensorProto = attribute.t
            return value
        if attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
            kind = onnx.TensorProto.FLOAT if "float" in attribute.name else onnx.TensorProto.INT64
            count = len(attribute.floats) + len(attribute.ints)
            return onnx.TensorProto(data_type=kind, dims=[count] if attribute.name.endswith("s") else [])
    return None


def _quantized_by(node: onnx.NodeProto, scope: _Scope) -> tuple[str, str] | None:
    """The role and format of the tensor that this node quantizes; None where it quantizes none.

    A pair of QuantizeLinear and DequantizeLinear counts once: at the first of them, or at the second where the codes
    are constant.
    """
    is_held = scope.constant(node, 0) is not None
    if node.op_type in QUANTIZE:
        return _constant_role(node, scope) if is_held else "activations", _codes_format(node, scope)
    if node.op_type in DEQUANTIZE and is_held and not scope.readers[node.output[0]].is_marked:
        return _constant_role(node, scope), _codes_format(node, scope)
    if node.op_type in BLOCK and node.domain in (DOMAIN, CONSTANT_DOMAIN):
        is_packed = node.domain == CONSTANT_DOMAIN and not is_held
        role = _constant_role(node, scope) if is_held or is_packed else "activations"
        return role, f"{_block_format(node)}{' packed' if is_packed else ''}"
    if node.op_type == "MatMulNBits":
        return "weights", f"int{_integer(node, 'bits', 4)} per group of {_integer(node, 'block_size', 0)}"
    if node.op_type.startswith("QLinear") or node.op_type in INTEGER_OPERATORS:
        return "operators", _op_name(node)
    return None


def _constant_role(node: onnx.NodeProto, scope: _Scope) -> str:
    """The role of the constant that this node quantizes, by its readers, also those behind a DequantizeLinear."""
    readers = [scope.readers[node.output[0]]]
    if readers[0].count == readers[0].dequantizers:
        readers = readers[0].dequantized
    count = sum(each.count for each in readers)
    return "biases" if count and count == sum(each.biases for each in readers) else "weights"


def _codes_format(node: onnx.NodeProto, scope: _Scope) -> str:
    """The type of the codes, and how many scales they have."""
    zero_point, scale = scope.constant(node, 2), scope.constant(node, 1)
    codes = scope.constant(node, 0) if zero_point is None and node.op_type in DEQUANTIZE else zero_point
    name = "uint8" if codes is None else _type_name(codes.data_type)
    if scale is not None and math.prod(scale.dims) > 1:
        group = _integer(node, "block_size", 0)
        return f"{name} per group of {group}" if group else f"{name} per channel"
    return name if scale is not None else f"{name} dynamic"


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((each.i for each in node.attribute if each.name == name and each.HasField("i")), default)


def _block_format(node: onnx.NodeProto) -> str:
    from onnx import helper

    try:
        attributes = {each.name: _plain(helper.get_attribute_value(each)) for each in node.attribute}
        return str(quantizer_of(node.op_type, attributes)[0].format)
    except (QuarkError, TypeError, ValueError):
        return f"{node.op_type} with attributes of its own"


def _plain(value: Any) -> Any:
    """Texts as such: ONNX keeps them as bytes."""
    return value.decode() if isinstance(value, bytes) else value
