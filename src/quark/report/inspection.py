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
    import onnx_ir as ir

QUANTIZE = {"QuantizeLinear", "ExtendedQuantizeLinear"}
DEQUANTIZE = {"DequantizeLinear", "ExtendedDequantizeLinear"}
WITH_BIAS = {"Conv", "ConvTranspose", "Gemm"}
BIAS_INPUT = 2
Reader: TypeAlias = "Callable[[Path], ir.Model]"
BLOCK = {"MXQuantizeDequantize", "BFPQuantizeDequantize"}


def _read_whole(path: Path) -> ir.Model:
    import onnx_ir

    return onnx_ir.load(path)


@dataclass(frozen=True)
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


def inspect_model(path: Path, read: Reader = _read_whole) -> Inspection:
    """Read the file and look; the model need not run. One whose parts contradict each other is a ModelError.

    Of weights only types and shapes are looked at: `read` may leave their values out.
    """
    model = _read(path, read)
    try:
        return _inspected(path, model)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"model '{path}' is damaged: {error}. Fetch or export it again") from error


def _inspected(path: Path, model: ir.Model) -> Inspection:
    graph = model.graph
    return Inspection(
        name=path.name,
        bytes=_size(path, model),
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        ir_version=model.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in graph.opset_imports.items()},
        inputs=tuple(_port(value) for value in graph.inputs),
        outputs=tuple(_port(value) for value in graph.outputs),
        nodes=dict(Counter(_op_name(node) for node in _nodes(model)).most_common()),
        parameters=_parameters(model),
        quantized=_quantized(model),
        functions=tuple(f"{function.domain}.{function.name}" for function in model.functions.values()),
        metadata={str(key): str(text) for key, text in model.metadata_props.items()},  # what is no text is bytes
    )


def model_bytes(path: Path, read: Reader = _read_whole) -> int:
    """The size of the file and of the external files that its weights are in."""
    return _size(path, _read(path, read))


def _read(path: Path, read: Reader) -> ir.Model:
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise ModelError(f"model '{path}': {what}; expected an ONNX model")
    try:
        model = read(path)
    except QuarkError:
        raise
    except Exception as error:  # on what is no model, protobuf and onnx_ir fail in ways of their own
        raise ModelError(f"model '{path}' cannot be read as ONNX: {error}") from error
    if not model.graph.opset_imports:
        raise ModelError(f"model '{path}' is not an ONNX model: it names no operator set")
    return model


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    import onnx_ir

    return iter(onnx_ir.traversal.RecursiveGraphIterator(model.graph))


def _op_name(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _port(value: ir.Value) -> Port:
    shape = None if value.shape is None else tuple(_dimension(each) for each in value.shape)
    return Port(str(value.name), _type_name(value.dtype), shape)


def _type_name(dtype: ir.DataType | None) -> str:
    """As numpy calls it; ONNX's own name where numpy has none."""
    name = "unknown" if dtype is None else dtype.name.lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _dimension(size: int | ir.SymbolicDim) -> int | str:
    return size if isinstance(size, int) else str(size.value or "?")


def _size(path: Path, model: ir.Model) -> int:
    """The file and the external files that its weights are in."""
    import onnx_ir

    tensors = (value.const_value for value in model.graph.initializers.values())
    beside = {os.fspath(each.path) for each in tensors if isinstance(each, onnx_ir.ExternalTensor)}
    return path.stat().st_size + sum(os.path.getsize(each) for each in beside if os.path.isfile(each))


def _parameters(model: ir.Model) -> tuple[Parameters, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None:
            counts[_type_name(tensor.dtype)] += tensor.size
            sizes[_type_name(tensor.dtype)] += tensor.nbytes
    return tuple(Parameters(name, counts[name], size) for name, size in sizes.most_common())


def _quantized(model: ir.Model) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for node in _nodes(model):
        kind = _quantized_by(node)
        if kind is not None:
            role, what = kind
            found.setdefault(role, Counter())[what] += 1
    order = ("activations", "weights", "biases", "operators")
    return {role: dict(found[role].most_common()) for role in order if role in found}


def _quantized_by(node: ir.Node) -> tuple[str, str] | None:
    """The role and format of the tensor that this node quantizes; None where it quantizes none.

    A pair of QuantizeLinear and DequantizeLinear counts once: at the first of them, or at the second where the codes
    are constant.
    """
    if not node.outputs:
        return None
    if node.op_type in QUANTIZE:
        return _constant_role(node) if _is_constant(node, 0) else "activations", _codes_format(node)
    if node.op_type in DEQUANTIZE and _is_constant(node, 0) and not _is_unpacking(node):
        return _constant_role(node), _codes_format(node)
    if node.op_type in BLOCK and node.domain in (DOMAIN, CONSTANT_DOMAIN):
        is_held = _is_constant(node, 0)
        is_packed = node.domain == CONSTANT_DOMAIN and not is_held
        role = _constant_role(node) if is_held or is_packed else "activations"
        return role, f"{_block_format(node)}{' packed' if is_packed else ''}"
    if node.op_type == "MatMulNBits":
        group = node.attributes.get_int("block_size", 0)
        return "weights", f"int{node.attributes.get_int('bits', 4)} per group of {group}"
    if node.op_type.startswith("QLinear") or node.op_type in ("ConvInteger", "MatMulInteger"):
        return "operators", _op_name(node)
    return None


def _is_unpacking(node: ir.Node) -> bool:
    """That the mark behind it says more than its codes."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.domain == CONSTANT_DOMAIN for reader in readers)


def _constant_role(node: ir.Node) -> str:
    """Of the constant that this node quantizes: what its readers, behind a DequantizeLinear too, make of it."""
    value = node.outputs[0]
    readers = list(value.uses())
    if readers and all(reader.op_type in DEQUANTIZE for reader, _ in readers):
        readers = [use for reader, _ in readers for use in reader.outputs[0].uses()]
    is_bias = bool(readers) and all(index == BIAS_INPUT and reader.op_type in WITH_BIAS for reader, index in readers)
    return "biases" if is_bias else "weights"


def _is_constant(node: ir.Node, index: int) -> bool:
    return _constant(node, index) is not None


def _constant(node: ir.Node, index: int) -> ir.TensorProtocol | None:
    import onnx_ir

    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else onnx_ir.convenience.get_const_tensor(value)


def _codes_format(node: ir.Node) -> str:
    """The type of the codes, and how many scales they have."""
    zero_point, scale = _constant(node, 2), _constant(node, 1)
    codes = zero_point or (_constant(node, 0) if node.op_type in DEQUANTIZE else None)
    name = "uint8" if codes is None else _type_name(codes.dtype)
    if scale is not None and scale.size > 1:
        group = node.attributes.get_int("block_size", 0)
        return f"{name} per group of {group}" if group else f"{name} per channel"
    return name if scale is not None else f"{name} dynamic"


def _block_format(node: ir.Node) -> str:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        return str(quantizer_of(node.op_type, attributes)[0].format)
    except (QuarkError, TypeError, ValueError):
        return f"{node.op_type} with attributes of its own"
