"""Which nodes are quantized, and with which spec; for the others, the reason why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from quark.errors import unknown_name
from quark.onnx.choose.operators import OPERATORS, TRANSFORMER_TYPES, Kind, facts
from quark.onnx.choose.options import ChoiceOptions, Selection, Target
from quark.onnx.choose.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, LayerSpec
from quark.onnx.graph import READS_FLOAT, constant, is_constant, rank
from quark.plan import SkippedNode

QUANTIZABLE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def select_nodes(
    model: ir.Model, options: ChoiceOptions, vanished: Iterable[str] = ()
) -> tuple[dict[str, LayerSpec], list[SkippedNode]]:
    """Name to spec of every node that is quantized, and all others with a reason.

    `vanished` are nodes that a rewrite removed: their names are no mistakes.
    """
    selector = _Selector(model, options, frozenset(vanished))
    chosen: dict[str, LayerSpec] = {}
    skipped: list[SkippedNode] = []
    for node in model.graph:
        reason = selector.obstacle(node)
        if reason:
            skipped.append(SkippedNode(_name(node), node.op_type, reason))
        else:
            spec = selector.spec_of(node)
            assert spec is not None, node.name
            chosen[_name(node)] = spec
    return chosen, skipped


class _Selector:
    """The options with every name resolved against one model."""

    def __init__(self, model: ir.Model, options: ChoiceOptions, vanished: frozenset[str]) -> None:
        self._options = options
        self._op_types = _selected_op_types(options)
        names = _Names(model, vanished)
        selection = options.selection
        self._only = names.matching(selection.nodes, "nodes_to_quantize")
        self._excluded = names.matching(selection.excluded_nodes, "nodes_to_exclude")
        self._between = _excluded_by_subgraphs(model, selection, names)
        self._inside = _bounded(model, selection, names)
        self._by_node: dict[str, LayerSpec | None] = {}
        for pattern, spec in options.by_node:
            self._by_node.update(dict.fromkeys(names.matching((pattern,), "specific_layer_config"), spec))
        self._by_type = dict(options.by_op_type)
        self._kept_float = dict(selection.kept_float)

    def spec_of(self, node: ir.Node) -> LayerSpec | None:
        """The spec by name, else by operator, else the default."""
        by_type = self._by_type.get(node.op_type, self._options.default)
        return self._by_node.get(_name(node), by_type)

    def obstacle(self, node: ir.Node) -> str:
        """Why the node stays in float; empty if it does not."""
        return self._unwanted(node) or self._impossible(node)

    def _unwanted(self, node: ir.Node) -> str:
        name, op_type = _name(node), node.op_type
        selection = self._options.selection
        if READS_FLOAT in node.meta:
            return f"belongs to {node.meta[READS_FLOAT]}: it comes before the quantizer of its result"
        if name in self._excluded:
            return "excluded by name"
        if name in self._kept_float:
            return f"protected: {self._kept_float[name]}"
        if op_type in selection.excluded_op_types:
            return f"operator type {op_type} is excluded"
        if name in self._between:
            return "inside an excluded subgraph"
        if name not in self._inside:
            return "outside the part between input_nodes and output_nodes"
        if selection.nodes and name not in self._only:
            return "not among nodes_to_quantize"
        if self.spec_of(node) is None:
            return "its layer or operator type is configured to stay in float"
        return ""

    def _impossible(self, node: ir.Node) -> str:
        known = facts(node)
        if known is None:
            return "no quantized form is known"
        if node.op_type not in self._op_types:
            return self._why_not_type(node.op_type)
        data = [value for value in _data_inputs(node, known.data) if value is not None]
        if not data or data[0].dtype is None:
            return "the type of its input is not known"
        if data[0].dtype not in QUANTIZABLE_TYPES:
            return f"computes on {data[0].dtype.name.lower()}"
        if known.kind is not Kind.COMPUTE and any(_is_unbounded(value) for value in data):
            return "one of its constants holds NaN or Inf, which has no scale"
        return self._operand_obstacle(node, known.kind)

    def _why_not_type(self, op_type: str) -> str:
        if self._options.selection.op_types is not None:
            return f"operator type {op_type} is not among op_types_to_quantize"
        if _is_compute_only(self._options):
            return "only Conv, ConvTranspose, Gemm and MatMul are quantized"
        return f"operator type {op_type} is not quantized for this target; extra_op_types_to_quantize adds it"

    def _operand_obstacle(self, node: ir.Node, kind: Kind) -> str:
        spec = self.spec_of(node)
        assert spec is not None
        is_compute = kind is Kind.COMPUTE
        if not is_compute and self._options.has_products_only and isinstance(spec.activation, (BlockSpec, FloatSpec)):
            return "blocks and floats go on the operands of products; BlockPlacement 'all' puts them here too"
        has_weight = is_compute and is_constant(node.inputs[1])
        if has_weight and _is_empty(node.inputs[1]):
            return "its weight has no element"
        if is_compute and not has_weight and self._options.selection.needs_constant_matmul_operand:
            return "both operands are activations (MatMulConstBOnly)"
        if self._options.selection.needs_weight_matrix and not (is_compute and rank(node.inputs[1]) == 2):
            return "MatMulNBits takes a weight of two dimensions only"
        if isinstance(spec.activation, DynamicSpec) and not (has_weight and node.op_type != "ConvTranspose"):
            return "dynamic quantization needs Conv, Gemm or MatMul with a constant weight"
        if spec.activation is None and not has_weight:
            return "only weights are quantized, and it has none"
        if isinstance(spec.weight, AffineSpec) and spec.weight.group_size and not has_weight:
            return "weights are quantized in groups, and it has no constant weight"
        return ""


def _selected_op_types(options: ChoiceOptions) -> frozenset[str]:
    selection = options.selection
    for op_type in selection.extra_op_types | selection.excluded_op_types | (selection.op_types or frozenset()):
        if op_type not in OPERATORS:
            raise unknown_name("operator type with a quantized form", op_type, OPERATORS)
    if selection.op_types is not None:
        return selection.op_types | selection.extra_op_types
    if selection.has_all_op_types:
        return frozenset(OPERATORS)
    return _default_op_types(options) | selection.extra_op_types


def _default_op_types(options: ChoiceOptions) -> frozenset[str]:
    compute = frozenset(name for name, each in OPERATORS.items() if each.kind is Kind.COMPUTE)
    if _is_compute_only(options):
        return compute
    if options.target is Target.NPU_TRANSFORMER:
        return TRANSFORMER_TYPES
    if options.target is Target.NPU_CNN or not isinstance(options.default.activation, AffineSpec):
        return frozenset(OPERATORS)
    return frozenset(name for name, each in OPERATORS.items() if each.is_for_runtime)


def _is_compute_only(options: ChoiceOptions) -> bool:
    """Only products are quantized: block formats where they are placed so, dynamic and weight-only quantization."""
    activation = options.default.activation
    if activation is None or options.is_weights_only or isinstance(activation, DynamicSpec):
        return True
    return isinstance(activation, (BlockSpec, FloatSpec)) and options.has_products_only


class _Names:
    """The names of a model's nodes, and what patterns find among them."""

    def __init__(self, model: ir.Model, vanished: frozenset[str]) -> None:
        self._names = [_name(node) for node in model.graph]
        self._vanished = vanished

    def matching(self, patterns: Iterable[str], option: str) -> frozenset[str]:
        """Every name that is one of the patterns, or wholly matched by one as a regular expression. A pattern that
        finds nothing is an error."""
        found: set[str] = set()
        for pattern in patterns:
            names = [name for name in self._names if name == pattern] or self._search(pattern)
            if not names and not self._has_vanished(pattern):
                raise unknown_name(f"node ({option})", pattern, self._names)
            found.update(names)
        return frozenset(found)

    def _search(self, pattern: str) -> list[str]:
        matches = _matcher(pattern)
        return [name for name in self._names if matches(name)]

    def _has_vanished(self, pattern: str) -> bool:
        matches = _matcher(pattern)
        return any(name == pattern or matches(name) for name in self._vanished)


def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return lambda name: False
    return lambda name: compiled.fullmatch(name) is not None


def _excluded_by_subgraphs(model: ir.Model, selection: Selection, names: _Names) -> frozenset[str]:
    """All nodes on a path from the first nodes of a subgraph to its last ones."""
    excluded: set[str] = set()
    for starts, ends in selection.excluded_subgraphs:
        first = names.matching(starts, "subgraphs_to_exclude")
        last = names.matching(ends, "subgraphs_to_exclude")
        excluded |= _reachable(model, first, _followers) & _reachable(model, last, _predecessors)
    return frozenset(excluded)


def _bounded(model: ir.Model, selection: Selection, names: _Names) -> frozenset[str]:
    inside = {_name(node) for node in model.graph}
    if selection.input_nodes:
        inside &= _reachable(model, names.matching(selection.input_nodes, "input_nodes"), _followers)
    if selection.output_nodes:
        inside &= _reachable(model, names.matching(selection.output_nodes, "output_nodes"), _predecessors)
    return frozenset(inside)


def _reachable(model: ir.Model, start: frozenset[str], step: Callable[[ir.Node], Iterable[ir.Node]]) -> set[str]:
    by_name: Mapping[str, ir.Node] = {_name(node): node for node in model.graph}
    seen, pending = set(start), [by_name[name] for name in start]
    while pending:
        for neighbour in step(pending.pop()):
            if _name(neighbour) not in seen and _name(neighbour) in by_name:
                seen.add(_name(neighbour))
                pending.append(neighbour)
    return seen


def _followers(node: ir.Node) -> Iterable[ir.Node]:
    return (usage.node for output in node.outputs for usage in output.uses())


def _predecessors(node: ir.Node) -> Iterable[ir.Node]:
    producers = (value.producer() for value in node.inputs if value is not None)
    return (producer for producer in producers if producer is not None)


def _data_inputs(node: ir.Node, data: tuple[int, ...] | None) -> list[ir.Value | None]:
    return [value for i, value in enumerate(node.inputs) if data is None or i in data]


def _is_unbounded(value: ir.Value) -> bool:
    """Whether it is a constant with a NaN or Inf, as the start of a maximum is."""
    values = constant(value)
    return values is not None and not bool(np.isfinite(values.astype(np.float32, copy=False)).all())


def _is_empty(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size == 0


def _name(node: ir.Node) -> str:
    assert node.name is not None
    return node.name
