"""Which nodes are quantized, and with which spec; for the others, the reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from quark.decide.end_layers import OPTION
from quark.decide.operators import (
    FEWEST_TABLE_NUMBERS,
    OPERATORS,
    OTHER,
    RECURRENT_TYPES,
    TRANSFORMER_TYPES,
    Kind,
    OperatorFacts,
    facts,
    is_embedding,
    reduction_axis,
)
from quark.decide.options import ChoiceOptions, Target
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, LayerSpec
from quark.decide.view import Graph, Node, Value
from quark.errors import unknown_name
from quark.plan import SkippedNode

FEWEST_ROW_CODES = 32  # the fewest codes that the median row of a table has to use


def select_nodes(
    graph: Graph, options: ChoiceOptions, vanished: Iterable[str] = ()
) -> tuple[dict[str, LayerSpec], list[SkippedNode]]:
    """Return the spec of every node that is quantized, by name, and all others with a reason.

    `vanished` are nodes that a rewrite removed; naming one is not an error.
    """
    selector = _Selector(graph, options, list(vanished))
    chosen: dict[str, LayerSpec] = {}
    skipped: list[SkippedNode] = []
    for node in graph:
        if node.is_plumbing:
            continue
        reason = selector.obstacle(node)
        if reason:
            skipped.append(SkippedNode(node.label, node.op_type, reason))
        else:
            spec, _ = selector.spec_of(node)
            assert spec is not None, node.name
            chosen[node.name] = lone_table(spec) if selector.has_lone_table(node) else spec
    return chosen, skipped


def facts_of(node: Node, spec: LayerSpec | None, options: ChoiceOptions) -> OperatorFacts | None:
    """The facts about the node's operator. If a user names its type, every float tensor of the node is quantized: for
    types without a row in the table, and for recurrent layers in integers, of which otherwise only the weights are
    quantized."""
    known = facts(node)
    is_named = node.op_type in options.selection.named_op_types and node.has_quantized_form
    is_recurrent = known is not None and known.kind is Kind.RECURRENT
    if is_named and (known is None or (is_recurrent and spec is not None and isinstance(spec.activation, AffineSpec))):
        return OTHER
    return known


def lone_table(spec: LayerSpec) -> LayerSpec:
    """The spec of an embedding whose table is quantized as a weight, and whose rows stay float."""
    return replace(spec, activation=None, output=None)


def named_nodes(graph: Graph, patterns: Iterable[str], option: str, vanished: Iterable[str] = ()) -> dict[str, str]:
    """The names of all nodes that a pattern matches, each with the pattern. A pattern without a match is an error,
    unless it is the name of a node that a rewrite removed (`vanished`)."""
    gone = [Node(name, "", None, aliases=(name,)) for name in vanished]
    matched: dict[str, str] = {}
    for pattern in patterns:
        named = graph.matching(pattern)
        if not named and not any(graph.matches(pattern, node) for node in (*graph, *gone)):
            known = list(dict.fromkeys(alias for node in graph for alias in node.aliases))
            raise unknown_name(f"{graph.word} ({option})", pattern, known)
        matched.update(dict.fromkeys(named, pattern))
    return matched


class _Selector:
    """The options with every name resolved against one graph."""

    def __init__(self, graph: Graph, options: ChoiceOptions, vanished: list[str]) -> None:
        self._graph = graph
        self._options = options
        self._vanished = vanished
        _check_op_types(graph, options)
        self._op_types: dict[LayerSpec, frozenset[str]] = {}
        # the products that share an embedding's table, by embedding; None if not computed yet
        self._tied: dict[str, list[Node]] | None = None
        selection, words = options.selection, options.selection.words
        self._only = self._matching(selection.nodes, words.nodes)
        self._excluded = self._matching(selection.excluded_nodes, words.excluded_nodes)
        self._by_node: dict[str, tuple[LayerSpec | None, str]] = {
            name: (spec, "the plan") for name, spec in options.by_plan
        }
        for pattern, spec in options.by_node:
            matching = self._matching((pattern,), words.by_node)
            self._by_node.update(dict.fromkeys(matching, (spec, f"'{pattern}'")))
        self._ends = (
            frozenset(name for names in options.ends.layers(graph) for name in names) if options.ends else set()
        )
        self._kept_float = dict(selection.kept_float)
        self._between: set[str] = set()  # nodes between the first and the last nodes of an excluded subgraph
        for starts, ends in selection.excluded_subgraphs:
            first, last = (self._matching(names, "subgraphs_to_exclude") for names in (starts, ends))
            self._between |= self._reachable(first, _followers) & self._reachable(last, _predecessors)
        self._inside = set(graph.by_name)
        if selection.input_nodes:
            self._inside &= self._reachable(self._matching(selection.input_nodes, "input_nodes"), _followers)
        if selection.output_nodes:
            self._inside &= self._reachable(self._matching(selection.output_nodes, "output_nodes"), _predecessors)

    def spec_of(self, node: Node) -> tuple[LayerSpec | None, str]:
        """The spec by name, else by operator, else the default, with wider types for first and last layers if
        requested; and where it comes from."""
        if node.name in self._by_node:
            return self._by_node[node.name]
        result: tuple[LayerSpec | None, str] = (self._options.default, "the configuration")
        for kind, spec in self._options.by_op_type:
            if kind in node.kinds:
                result = spec, f"'{kind}'"
                break
        if self._options.ends is not None and node.name in self._ends:
            result = self._options.ends.of(result[0]), OPTION
        return result

    def obstacle(self, node: Node) -> str:
        """The reason why the node stays in float; empty if it is quantized."""
        return self._unwanted(node) or self._impossible(node)

    def _unwanted(self, node: Node) -> str:
        selection = self._options.selection
        if node.reads_float_for:
            return f"belongs to {node.reads_float_for}: it comes before the quantizer of its result"
        if node.name in self._excluded:
            pattern = self._excluded[node.name]
            return f"excluded by '{pattern}'" if self._options.is_trained else "excluded by name"
        if node.name in self._kept_float:
            return f"protected: {self._kept_float[node.name]}"
        if node.op_type in selection.excluded_op_types:
            return f"operator type {node.op_type} is excluded"
        if node.name in self._between:
            return "inside an excluded subgraph"
        if node.name not in self._inside:
            return "outside the part between input_nodes and output_nodes"
        if selection.nodes and node.name not in self._only:
            return f"not among {selection.words.nodes}"
        spec, source = self.spec_of(node)
        if spec is not None:
            return ""
        if source == OPTION:
            return f"{OPTION} leaves the first and the last layers in float"
        if self._options.is_trained:
            return f"left in float by {source}"
        return "its layer or operator type is configured to stay in float"

    def _impossible(self, node: Node) -> str:
        spec, _ = self.spec_of(node)
        known = facts_of(node, spec, self._options)
        if known is None:
            return node.why_float or "no quantized form is known"
        layer = spec if spec is not None and self._options.is_trained else self._options.default
        if layer not in self._op_types:
            self._op_types[layer] = _selected_op_types(self._options, layer)
        has_table = self._has_table(node, layer)
        if node.op_type not in self._op_types[layer] and not has_table:
            if not self._options.selection.has_embeddings or not is_embedding(node):
                return self._why_not_type(node.op_type)
            if not _has_like_rows(node):
                return (
                    f"half of its rows would use fewer than {FEWEST_ROW_CODES} of 256 codes of one scale for the table"
                )
        data = [
            value
            for index, value in enumerate(node.inputs)
            if value is not None and (known.data is None or index in known.data)
        ]
        if known is OTHER:
            data.sort(key=lambda value: not value.is_quantizable)
        if node.op_type == "Split" and self._options.is_trained and node.outputs[0].is_quantizable:
            return ""  # one of the parts that another node split a tensor into
        if not data or (not data[0].is_quantizable and data[0].type_name is None):
            return "the type of its input is not known"
        if not data[0].is_quantizable:
            return f"computes on {data[0].type_name}"
        is_compute = known.kind in (Kind.COMPUTE, Kind.RECURRENT)
        if is_compute and not self._options.is_trained and all(value.constant for value in node.inputs if value):
            return "computes on constants alone: ONNX Runtime does so once, when it loads the file"
        constants = [] if is_compute else [value.constant for value in data if value.constant]
        if not all(bool(np.isfinite(constant.array().astype(np.float32, copy=False)).all()) for constant in constants):
            return "one of its constants holds NaN or Inf, which has no scale"
        return "" if has_table else self._why_no_table(node) or self._operand_obstacle(node, is_compute)

    def has_lone_table(self, node: Node) -> bool:
        """True for an embedding whose table is quantized as a weight if operators between products are quantized, but
        Gather is not."""
        layer = self._options.default
        return not is_compute_only(self._options, layer) and self._has_table(node, layer)

    def _has_table(self, node: Node, layer: LayerSpec) -> bool:
        """True for an embedding whose table is quantized as a weight although Gather is not: with scales found at run
        time, with weights only, with blocks and floats if `has_embeddings`, and if a quantized product shares the
        table, which would be stored twice."""
        selection = self._options.selection
        if self._options.is_trained or not is_embedding(node):
            return False
        if selection.op_types is not None and "Gather" not in selection.op_types:
            return False
        of_tables = dict(self._options.by_op_type).get("Gather")
        if of_tables is not None and of_tables.activation is None:  # only weights, as in MatMulNBits
            return self._fits_bytes(node)
        is_affine = isinstance(layer.weight, AffineSpec)
        if is_affine and is_compute_only(self._options, layer):
            return isinstance(layer.weight, AffineSpec) and layer.weight.group_size is None
        if selection.has_embeddings and not is_affine and is_compute_only(self._options, layer):
            return True
        if is_affine and ("Gather" in self._op_types[layer] or (selection.has_embeddings and _has_like_rows(node))):
            return False
        if self._tied is None:
            self._tied = tied_tables(self._graph)
        tied = self._tied.get(node.name, ())
        return any(not self.obstacle(product) and self.spec_of(product)[0] == layer for product in tied)

    def _why_no_table(self, node: Node) -> str:
        """The reason why a Gather stays in float if only its table could be quantized."""
        of_tables = dict(self._options.by_op_type).get("Gather")
        if node.op_type != "Gather" or of_tables is None or of_tables.activation is not None:
            return ""
        if not is_embedding(node):
            return f"it does not read rows of a constant matrix with {FEWEST_TABLE_NUMBERS} numbers or more"
        return "" if self._fits_bytes(node) else "the codes of a row would end within a byte"

    def _fits_bytes(self, node: Node) -> bool:
        """True if the rows of an embedding's table end on a byte boundary when codes are packed."""
        spec, table = self.spec_of(node)[0], node.input(0)
        if spec is None or not isinstance(spec.weight, AffineSpec) or table is None or table.constant is None:
            return False
        return table.constant.shape[1] * spec.weight.integer.bits % 8 == 0

    def _why_not_type(self, op_type: str) -> str:
        selection = self._options.selection
        if selection.op_types is not None:
            return f"operator type {op_type} is not among op_types_to_quantize"
        if is_compute_only(self._options, self._options.default):
            return "only Conv, ConvTranspose, Gemm, MatMul and recurrent layers are quantized"
        hint = f"; {selection.words.extra_op_types} adds it" if selection.words.extra_op_types else ""
        return f"operator type {op_type} is not quantized for this target{hint}"

    def _operand_obstacle(self, node: Node, is_compute: bool) -> str:
        spec, _ = self.spec_of(node)
        assert spec is not None
        selection, weight = self._options.selection, node.input(1)
        is_limited = isinstance(spec.activation, (BlockSpec, FloatSpec))
        if not is_compute and is_limited and not self._options.goes_everywhere(spec.activation):
            return f"blocks and floats go on the operands of products{selection.words.everywhere}"
        weights = [value for value in _weights(node) if value.constant is not None] if is_compute else []
        has_weight = bool(weights)
        if any(value.constant is not None and 0 in value.constant.shape for value in weights):
            return "its weight has no element"
        if is_compute and node.op_type in RECURRENT_TYPES and (spec.weight is None or not has_weight):
            return "only constant weights of recurrent layers are quantized"
        if is_compute and not has_weight and selection.needs_constant_matmul_operand:
            return "both operands are activations (MatMulConstBOnly)"
        if selection.needs_weight_matrix and not (is_compute and weight is not None and weight.rank == 2):
            return "MatMulNBits takes a weight of two dimensions only"
        is_trained = self._options.is_trained
        if (
            isinstance(spec.activation, DynamicSpec)
            and not is_trained
            and not (has_weight and node.op_type != "ConvTranspose")
        ):
            return "dynamic quantization needs Conv, Gemm or MatMul with a constant weight"
        if spec.activation is None and spec.output is None and not has_weight:
            return "only weights are quantized, and it has none"
        if has_groups(spec) and not has_weight and not is_trained:
            return "weights are quantized in groups, and it has no constant weight"
        if has_groups(spec) and any(value.rank == 1 for value in weights):
            return "weights are quantized in groups, and its weight is a vector"
        return ""

    def _matching(self, patterns: Iterable[str], option: str) -> dict[str, str]:
        return named_nodes(self._graph, patterns, option, self._vanished)

    def _reachable(self, start: Iterable[str], step: Callable[[Node], Iterable[Node]]) -> set[str]:
        seen = set(start)
        pending = [self._graph.by_name[name] for name in seen]
        while pending:
            for neighbour in step(pending.pop()):
                if neighbour.name not in seen and not neighbour.is_inner:
                    seen.add(neighbour.name)
                    pending.append(neighbour)
        return seen


def has_groups(spec: LayerSpec) -> bool:
    """True if weights have a scale for each group."""
    return isinstance(spec.weight, AffineSpec) and spec.weight.group_size is not None


def _weights(node: Node) -> list[Value]:
    known = OPERATORS[node.op_type]
    return [value for index in known.weights if (value := node.input(index)) is not None]


def tied_tables(graph: Graph) -> dict[str, list[Node]]:
    """The products that have an embedding's table as their weight, possibly transposed, and sum over its rows; by the
    name of the embedding."""
    products = [(node, weight) for node in graph if (weight := node.input(1)) and node.op_type in ("Gemm", "MatMul")]
    products_of: dict[str, list[Node]] = {}
    for embedding in filter(is_embedding, graph):
        table = embedding.input(0)
        tied = [node for node, weight in products if table is not None and _is_same_table(table, node, weight)]
        if tied:
            products_of[embedding.name] = tied
    return products_of


def _is_same_table(table: Value, product: Node, weight: Value) -> bool:
    if table.constant is None or weight.constant is None or len(weight.constant.shape) != 2:
        return False
    is_turned = reduction_axis(product, 1) in (0, -2)
    shape = table.constant.shape
    if (shape[::-1] if is_turned else shape) != weight.constant.shape:
        return False
    if weight is table:
        return True
    rows, others = table.constant.array(), weight.constant.array()
    others = others.T if is_turned else others
    return bool((rows[0] == others[0]).all()) and np.array_equal(rows, others)


def _has_like_rows(embedding: Node) -> bool:
    """True if the median row gets enough codes from one scale for the whole table."""
    table = embedding.inputs[0]
    assert table is not None
    assert table.constant is not None
    low, high = table.constant.extremes(0)
    whole = float(high.max(initial=0)) - float(low.min(initial=0))
    return not np.median(high - low) * 256 < FEWEST_ROW_CODES * whole  # NaN has an error of its own


def _followers(node: Node) -> Iterable[Node]:
    return (reader for output in node.outputs for reader, _ in output.readers)


def _predecessors(node: Node) -> Iterable[Node]:
    return (value.producer for value in node.inputs if value is not None and value.producer is not None)


def _check_op_types(graph: Graph, options: ChoiceOptions) -> None:
    """Raise an error for a type that neither the table nor the graph contains. Types to add may be missing."""
    selection, present = options.selection, {node.op_type for node in graph}
    for op_type in selection.excluded_op_types | (selection.op_types or frozenset()):
        if op_type not in OPERATORS and op_type not in present:
            raise unknown_name("operator type with a quantized form", op_type, OPERATORS)


def _selected_op_types(options: ChoiceOptions, layer: LayerSpec) -> frozenset[str]:
    """The operator types that are quantized with that spec."""
    selection = options.selection
    if selection.op_types is not None:
        return selection.op_types | selection.extra_op_types
    if selection.has_all_op_types:
        return frozenset(OPERATORS) | selection.extra_op_types
    if is_compute_only(options, layer):
        kinds = (Kind.COMPUTE, Kind.RECURRENT)
        op_types = frozenset(name for name, operator in OPERATORS.items() if operator.kind in kinds)
    elif options.target is Target.NPU_TRANSFORMER:
        op_types = TRANSFORMER_TYPES | RECURRENT_TYPES
    elif options.target is Target.NPU_CNN or not isinstance(layer.activation, AffineSpec):
        op_types = frozenset(OPERATORS)
    else:
        op_types = frozenset(name for name, operator in OPERATORS.items() if operator.is_for_runtime)
    return op_types | selection.extra_op_types


def is_compute_only(options: ChoiceOptions, layer: LayerSpec) -> bool:
    """True if only products are quantized: block formats if placed so, dynamic and weight-only quantization, and
    weights in groups, whose products are summed in float."""
    if options.is_trained:
        return not any(options.goes_everywhere(spec) for spec in (layer.activation, layer.output))
    if layer.activation is None or options.is_weights_only or isinstance(layer.activation, DynamicSpec):
        return True
    if has_groups(layer):
        return True
    return isinstance(layer.activation, (BlockSpec, FloatSpec)) and not options.goes_everywhere(layer.activation)
