"""Why a quantized file is larger than its float file, in one sentence with what to do about it.

stored twice      weights that are stored quantized, and in float for other readers
stays float       weights that nothing quantizes, by the operators that read them
rounded           weights in block formats, which are stored rounded in float
in bodies         If, Loop and Scan hold their own copies of what they read quantized
rest of the file  nodes, functions and metadata
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import QuarkError
from quark.onnx.file_graph import bare_graph
from quark.onnx.graph import readers
from quark.onnx.plan_reader import BLOCK, QuantizedGraph
from quark.report.quantities import count_of, listed, size_text

MOST_CAUSES = 2
LEAST_SHARE = 0.02  # share of the file from which on a cause is mentioned
SMALL_REST_BYTES = 64 * 1024  # nodes and metadata up to this size are not worth a warning
LEAST_WEIGHT_BYTES = 1024
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Growth:
    """The sentence. `is_by_design`: a block format, or the nodes of a small network; packing or a larger network make
    up for it, and nothing is wrong with the configuration."""

    text: str
    is_by_design: bool


@dataclass(frozen=True)
class _Cause:
    bytes: int
    text: str
    advice: str


def growth(written: FileFacts, source: FileFacts, proto: onnx.ModelProto) -> Growth | None:
    """Explain why the written file is larger than the source; None if it is not. `proto` may lack its weights."""
    if written.bytes <= source.bytes:
        return None
    more = size_text(written.bytes - source.bytes)
    beginning = f"'{written.name}' is {more} larger than the float file of {size_text(source.bytes)}"
    try:
        model = bare_graph(proto)
        storage = _Storage.of(model)
    except QuarkError as error:  # the user has edited the model
        return Growth(f"{beginning}; the reason was not sought, because {error}", is_by_design=False)
    in_bodies = sum(
        _bytes(value) for graph in model.graphs() if graph is not model.graph for value in graph.initializers.values()
    )
    rest = max(0, written.bytes - sum(storage.sizes.values()) - in_bodies)
    has_quantized_bodies = any(
        node.op_type == "QuantizeLinear" for graph in model.graphs() if graph is not model.graph for node in graph
    )
    rounded = storage.rounded_cause()
    causes = [
        storage.twice_cause(),
        storage.kept_cause(model),
        rounded,
        _Cause(
            in_bodies * has_quantized_bodies,
            f"bodies of If, Loop and Scan have their own weights, {size_text(in_bodies)}",
            "EnableSubgraph: false leaves them as they are",
        ),
        _Cause(rest, f"nodes, functions and metadata take {size_text(rest)}", "a larger network makes up for that"),
    ]
    causes.sort(key=lambda cause: -cause.bytes)
    told = [cause for cause in causes if cause.bytes >= LEAST_SHARE * written.bytes][:MOST_CAUSES]
    is_small = written.bytes - source.bytes <= min(rest, SMALL_REST_BYTES)
    advice = told[0].advice
    text = f"{beginning}: {'; '.join(cause.text for cause in told)}. {advice[:1].upper()}{advice[1:]}"
    return Growth(text, is_by_design=not storage.twice and (told[0] is rounded or is_small))


@dataclass(frozen=True)
class _Storage:
    """The storage of a graph's constants.

    sizes     bytes by name
    rounded   weights in block formats, with the format
    twice     weights in float whose codes are stored as well
    kept      other weights in float
    """

    sizes: Mapping[str, int]
    rounded: Mapping[str, str]
    twice: frozenset[str]
    kept: frozenset[str]

    @staticmethod
    def of(model: ir.Model) -> _Storage:
        """Sort the constants of the main graph."""
        constants = model.graph.initializers
        sizes = {str(name): _bytes(value) for name, value in constants.items()}
        graph = QuantizedGraph(model)
        quantized = graph.constants()
        rounded = {
            str(quantizer.source.name): str(quantizer.choice)
            for quantizer in graph.quantizers.values()
            if quantizer.node.op_type in BLOCK and quantizer.is_constant and quantizer.is_stored
        }
        plain = frozenset(
            name
            for name, size in sizes.items()
            if name not in rounded and size >= LEAST_WEIGHT_BYTES and constants[name].dtype in _FLOATS
        )
        return _Storage(sizes, rounded, plain & quantized, plain - quantized)

    def _total(self, names: Iterable[str]) -> int:
        return sum(self.sizes.get(name, 0) for name in names)

    def twice_cause(self) -> _Cause:
        total, verb = self._total(self.twice), "is" if len(self.twice) == 1 else "are"
        where = f"quantized, and in float for readers that are not quantized ({size_text(total)})"
        text = f"{count_of(len(self.twice), 'weight')} {verb} stored twice: {where}"
        return _Cause(total, text, "quantize those readers too, or leave the quantized ones out: nodes_to_exclude")

    def kept_cause(self, model: ir.Model) -> _Cause:
        total = self._total(self.kept)
        reading = {node for name in self.kept for node, _ in readers(model.graph.initializers[name])}
        types = listed(f"{count} {kind}" for kind, count in Counter(node.op_type for node in reading).most_common())
        advice = "the report says of every node why it stays in float"
        return _Cause(total, f"constants of {types} stay float ({size_text(total)})", advice)

    def rounded_cause(self) -> _Cause:
        total = self._total(self.rounded)
        formats = listed(dict.fromkeys(self.rounded.values()))
        text = f"weights in {formats} are stored rounded, in float ({size_text(total)})"
        return _Cause(total, text, "'quark pack' stores such weights in their true width")


def _bytes(value: ir.Value) -> int:
    tensor = value.const_value
    if tensor is None or tensor.dtype is ir.DataType.STRING:
        return 0
    return -(-math.prod(tensor.shape.numpy()) * tensor.dtype.bitwidth // 8)
