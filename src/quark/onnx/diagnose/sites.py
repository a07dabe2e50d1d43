"""The layers of a quantized network that the float network has too: nodes whose results have the same name in both.

Quantizers keep the names of activations, and a folded BatchNormalization leaves that of its output. A layer ends behind
the Relu or Clip that is computed with it, where nothing is quantized between the two: that is what the next layer sees,
and the runtime then computes both in one.

    shared   tensors of both graphs, at which the quantized one can be cut
    sites    the layers, in the order of the quantized graph
    lost     quantized nodes whose result the float network does not have: their error counts at the next layer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from quark.onnx.diagnose.operands import Constants, Operand, is_quantizer, is_quantizing, operands
from quark.onnx.graph import is_float, readers

BY_CODES = frozenset({"QLinearConv", "QLinearMatMul", "QGemm"})
COMPUTING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulNBits"}) | BY_CODES
ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu"})
WITH_BIAS = frozenset({"Conv", "ConvTranspose", "Gemm"})
LAST_AXIS = frozenset({"Gemm", "MatMul", "MatMulNBits", "LayerNormalization", "QLinearMatMul", "QGemm"})


@dataclass(frozen=True, eq=False)
class Site:
    """A layer: `node` of the quantized graph, whose result is `tensor` in both networks."""

    node: ir.Node
    tensor: str
    order: int
    operands: tuple[Operand, ...]
    is_result_rounded: bool = False  # its tensor is what comes out of a quantizer
    activation: str = ""  # the node of the Relu or Clip that is computed with it

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.name, self.activation) if self.activation else (self.name,)

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def weight(self) -> Operand | None:
        """Its weight, where that is quantized."""
        if self.node.op_type not in COMPUTING:
            return None
        return next((each for each in self.operands if each.is_constant and not self.is_bias(each)), None)

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Its quantized activations."""
        return tuple(each for each in self.operands if not each.is_constant)

    def is_bias(self, operand: Operand) -> bool:
        return operand.index == 2 and self.node.op_type in WITH_BIAS


@dataclass(frozen=True, eq=False)
class Sites:
    """`makers` are the operators that the shared tensors come from, where that can be told."""

    shared: tuple[str, ...]
    sites: tuple[Site, ...]
    lost: tuple[str, ...]
    makers: Mapping[str, str]

    def channel_axis(self, tensor: str, rank: int) -> int:
        """The axis of a shared tensor that weights, and equalization, know channels by."""
        op_type = self.makers.get(tensor, "")
        if op_type in LAST_AXIS or (rank == 3 and op_type != "Conv"):
            return rank - 1
        return min(1, rank - 1)


def find_sites(exact: ir.Model, quantized: ir.Model, unusable: Collection[str] = ()) -> Sites:
    """Match the two graphs; tensors of `unusable` are no match, such as those that turned out to have other shapes.

    A file without any quantizer has all its computing nodes as layers: whatever differs from float then is theirs.
    """
    exact_values, constants = _computed(exact), Constants()
    values = {
        name: value
        for name, value in _computed(quantized).items()
        if name in exact_values and name not in unusable and value not in constants
    }
    values = {name: value for name, value in values.items() if is_float(exact_values[name]) or is_float(value)}
    inner = {name for name, value in values.items() if _is_inner(value, values)}
    shared = [name for name in values if name not in inner]
    is_plain = not any(is_quantizing(node) for node in quantized.graph)
    sites, makers = [], {}
    for order, name in enumerate(shared):
        node = _maker(values[name], set(shared) - {name})
        found = () if node is None else operands(node, constants)
        makers[name] = "" if node is None else node.op_type
        is_layer = bool(found) or is_quantizer(values[name].producer())
        if node is not None and (is_layer or (is_plain and node.op_type in COMPUTING)):
            activation = _activation(values[name], node)
            sites.append(Site(node, name, order, found, is_quantizer(values[name].producer()), activation))
    made = {id(site.node) for site in sites}
    lost = [
        str(node.name)
        for node in quantized.graph
        if node.op_type in COMPUTING and id(node) not in made and operands(node, constants)
    ]
    return Sites(tuple(shared), tuple(sites), tuple(lost), makers)


def _computed(model: ir.Model) -> dict[str, ir.Value]:
    return {str(value.name): value for node in model.graph for value in node.outputs if value.name}


def _is_inner(value: ir.Value, matched: Collection[str]) -> bool:
    """That only an activation reads the value, whose result is a match too."""
    uses = readers(value)
    if len(uses) != 1 or value.is_graph_output() or is_quantizer(value.producer()):
        return False
    node, index = uses[0]
    return index == 0 and node.op_type in ACTIVATIONS and not node.domain and str(node.outputs[0].name) in matched


def _maker(value: ir.Value, others: Collection[str]) -> ir.Node | None:
    """The node that a tensor comes from: behind it there may be its activation and a quantizer. None where that leads
    to another shared tensor: then only a quantizer is between the two, or an activation by itself."""
    node = value.producer()
    is_first = True
    while node is not None and (is_quantizer(node) or (is_first and node.op_type in ACTIVATIONS)):
        before = node.inputs[0] if node.inputs else None
        if before is None:
            return None
        if before.name in others or before.producer() is None or (node.op_type in ACTIVATIONS and _is_cut(before)):
            return node if node.op_type in ACTIVATIONS else None
        is_first = is_first and is_quantizer(node)
        node = before.producer()
    return node


def _activation(value: ir.Value, maker: ir.Node) -> str:
    """The name of the activation between a layer's node and its result."""
    node = value.producer()
    while node is not None and node is not maker:
        if node.op_type in ACTIVATIONS:
            return str(node.name)
        node = None if not node.inputs or node.inputs[0] is None else node.inputs[0].producer()
    return ""


def _is_cut(value: ir.Value) -> bool:
    """That an activation reads something quantized: it is a layer by itself."""
    return is_quantizer(value.producer())
