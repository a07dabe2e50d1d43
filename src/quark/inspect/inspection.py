"""What is inside an ONNX file: a value with everything that `quark inspect` shows, and its table.

The values of weights are not looked at, so they need not be read. Quantized tensors are counted once for each quantizer
that `QuantizedGraph` finds; operators that compute with codes are counted by name.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from quark.errors import ModelError, QuarkError
from quark.onnx.file_graph import bare_graph
from quark.onnx.load.reading import read_proto
from quark.onnx.plan_reader import (
    BLOCK,
    DEQUANTIZE,
    PACKED,
    QUANTIZE,
    QuantizedGraph,
    Quantizer,
    is_on_codes,
    is_turned,
)
from quark.onnx.prepared_blocks import expand
from quark.ops.onnx_nodes import all_nodes
from quark.plan import Role
from quark.report.console import Table, cell
from quark.report.quantities import count_of, listed, size_text

MOST_OP_TYPES = 12
MOST_PORTS = 100  # inputs; as many outputs
MOST_METADATA = 8
MOST_CHARACTERS = 60  # characters of a metadata value, which may contain a whole configuration
Reader: TypeAlias = Callable[[Path], onnx.ModelProto]


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


def inspect_model(path: Path, read: Reader = read_proto) -> Inspection:
    """Read the file and look; the model need not run. Raises ModelError if its parts contradict each other.

    Of weights only types and shapes are looked at: `read` may leave their values out.
    """
    model = _read(path, read)
    graph = model.graph
    try:
        counts: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for tensor in graph.initializer:
            count = math.prod(tensor.dims)
            counts[tensor.data_type] += count
            texts = tensor.string_data
            sizes[tensor.data_type] += sum(map(len, texts)) if texts else -(-count * _bits(tensor.data_type) // 8)
        return Inspection(
            name=path.name,
            bytes=_size(path, model),
            producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
            ir_version=model.ir_version,
            opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
            inputs=tuple(_port(info) for info in graph.input),
            outputs=tuple(_port(info) for info in graph.output),
            nodes=dict(Counter(_op_name(node) for node in all_nodes(graph.node)).most_common()),
            parameters=tuple(
                Parameters(_type_name(number), counts[number], size) for number, size in sizes.most_common()
            ),
            quantized=_quantized(model),
            functions=tuple(f"{function.domain}.{function.name}" for function in model.functions),
            metadata={entry.key: entry.value for entry in model.metadata_props},
        )
    except (TypeError, ValueError, LookupError, AttributeError, ModelError) as error:
        raise ModelError(f"model '{path}' is damaged: {error}. Fetch or export it again") from error


def model_bytes(path: Path, read: Reader = read_proto) -> int:
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
    except Exception as error:  # protobuf raises various errors for files that are not models
        raise ModelError(f"model '{path}' cannot be read as ONNX: {error}") from error
    if not model.opset_import:
        raise ModelError(f"model '{path}' is not an ONNX model: it names no operator set")
    return model


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
    sizes = [
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or "?"
        for dimension in tensor.shape.dim
    ]
    shape = tuple(sizes) if tensor.HasField("shape") else None
    return Port(info.name, f"{words}{_type_name(tensor.elem_type)}" if words else _type_name(tensor.elem_type), shape)


@functools.cache
def _type_name(number: int) -> str:
    """NumPy's name of the type, or ONNX's if NumPy has none."""
    name = onnx.TensorProto.DataType.Name(number).lower() if number else "unknown"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _size(path: Path, model: onnx.ModelProto) -> int:
    """The file and the external files that its weights are in."""
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    beside = {os.path.join(path.parent, entry.value) for entry in entries if entry.key == "location"}
    return path.stat().st_size + sum(os.path.getsize(file) for file in beside if os.path.isfile(file))


@functools.cache
def _bits(number: int) -> int:
    """Bits that a value of the type takes, packed as ONNX packs it."""
    kind = ir.DataType(number)
    return 0 if kind == ir.DataType.STRING else int(kind.bitwidth)


def _quantized(model: onnx.ModelProto) -> dict[str, dict[str, int]]:
    """The formats of the quantized tensors by role, each with how many there are."""
    kinds = {*QUANTIZE, *DEQUANTIZE, *BLOCK}
    if not any(node.op_type in kinds or is_on_codes(node) for node in all_nodes(model.graph.node)):
        return {}
    whole = bare_graph(model)
    expand(whole)
    for value in [value for value in whole.graph.inputs if value.is_initializer()]:
        whole.graph.inputs.remove(value)  # older files list constants as inputs
    with contextlib.suppress(ValueError):  # the graph has a cycle
        whole.graph.sort()  # other tools leave that to the runtime
    graph = QuantizedGraph(whole)
    formats: dict[str, Counter[str]] = {}
    for quantizer in graph.quantizers.values():
        counted = _role_and_format(graph, quantizer)
        if counted is not None:
            formats.setdefault(counted[0], Counter())[counted[1]] += 1
    for node in all_nodes(model.graph.node):
        if is_on_codes(node) and node.op_type not in (*PACKED, "QGemm"):
            formats.setdefault("operators", Counter())[_op_name(node)] += 1
    order = ("activations", "weights", "biases", "operators")
    return {role: dict(formats[role].most_common()) for role in order if role in formats}


def _role_and_format(graph: QuantizedGraph, quantizer: Quantizer) -> tuple[str, str] | None:
    """What a quantizer counts as. None for float16 and bfloat16, and for a DequantizeLinear behind a QuantizeLinear: a
    pair counts once."""
    node = quantizer.node
    role = {Role.ACTIVATION: "activations", Role.WEIGHT: "weights", Role.BIAS: "biases"}[graph.role(quantizer)]
    if node.op_type in PACKED:
        bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
        return "weights", f"int{bits} per group of {size}"
    if node.op_type in BLOCK:
        try:
            name = str(quantizer.choice)
        except QuarkError:
            name = f"{node.op_type} with attributes of its own"
        is_plain = not quantizer.is_constant or quantizer.is_stored or is_turned(quantizer.source)
        return role, name if is_plain else f"{name} packed"
    is_codes = node.op_type in DEQUANTIZE and quantizer.has_codes
    if quantizer.dtype is None or not (node.op_type in QUANTIZE or is_codes):
        return None
    name = _type_name(int(quantizer.dtype))
    if quantizer.scale_count > 1:
        group = node.attributes.get_int("block_size", 0)
        return role, f"{name} per group of {group}" if group else f"{name} per channel"
    return role, name if quantizer.scale_count else f"{name} dynamic"


def inspection_table(inspection: Inspection) -> Table:
    """Two columns without lines: one row for each fact, long ones folded."""
    opsets = listed(f"{domain} {version}" for domain, version in inspection.opsets.items())
    counts = listed((f"{count} {name}" for name, count in inspection.nodes.items()), MOST_OP_TYPES)
    quantized = [
        f"{role}: {listed((f'{count} {name}' for name, count in formats.items()), MOST_OP_TYPES)}"
        for role, formats in inspection.quantized.items()
    ]
    metadata = []
    for key, value in inspection.metadata.items():
        text = " ".join(value.split())
        metadata.append(f"{key}: {text if len(text) <= MOST_CHARACTERS else f'{text[:MOST_CHARACTERS]}...'}")
    rows = {
        "file": [f"{inspection.name}  {size_text(inspection.bytes)}"],
        "opset": [f"{opsets} (IR version {inspection.ir_version})"],
        "made by": [inspection.producer] if inspection.producer else [],
        "input": _first(list(map(str, inspection.inputs)), MOST_PORTS),
        "output": _first(list(map(str, inspection.outputs)), MOST_PORTS),
        "nodes": [f"{sum(inspection.nodes.values())}: {counts}"],
        "parameters": [
            f"{count_of(parameter.count, 'value')} of {parameter.type}, {size_text(parameter.bytes)}"
            for parameter in inspection.parameters
        ],
        "functions": [listed(inspection.functions)] if inspection.functions else [],
        "quantized": quantized or ["nothing"],
        "metadata": _first(metadata, MOST_METADATA),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, values in rows.items():
        for index, value in enumerate(values):
            grid.add_row("" if index else heading, cell(value))
    return grid


def _first(rows: list[str], most: int) -> list[str]:
    return rows if len(rows) <= most else [*rows[:most], f"and {len(rows) - most} more; --json shows all"]
