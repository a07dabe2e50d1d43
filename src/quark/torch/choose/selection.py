"""Which nodes are quantized, and by which specs; for every other one, the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import fx

from quark.errors import unknown_name
from quark.onnx.choose.operators import Kind
from quark.plan import SkippedNode
from quark.torch.choose.operators import Operator, is_transparent, operator_of
from quark.torch.graph import is_constant, is_float, layer_name, module_type
from quark.torch.specs import AffineSpec, BlockSpec, LayerSpecs, Settings

# What users call layers that have no module of that name in the graph.
_CLASSES = {"Conv": ("Conv1d", "Conv2d", "Conv3d"), "Gemm": ("Linear",)}


class Selection:
    """`specs` has the nodes that are quantized, in the order of the graph."""

    def __init__(self, network: fx.GraphModule, settings: Settings) -> None:
        self.operators = {node: operator_of(network, node) for node in network.graph.nodes}
        self.specs: dict[fx.Node, LayerSpecs] = {}
        self.skipped: list[SkippedNode] = []
        _refuse_unknown(network, settings)
        for node in network.graph.nodes:
            if node.op not in ("call_function", "call_module") or not is_float(node) or is_transparent(network, node):
                continue
            found, reason = self._decide(node, settings)
            if found is not None:
                self.specs[node] = found
            else:
                self.skipped.append(SkippedNode(layer_name(node), self.operators[node].op_type, reason))
        self._drop_idle_moves(network)

    def kind(self, node: fx.Node) -> Kind | None:
        return self.operators[node].kind

    def _decide(self, node: fx.Node, settings: Settings) -> tuple[LayerSpecs | None, str]:
        known = self.operators[node]
        for pattern in settings.exclude:
            if _matches(pattern, node):
                return None, f"excluded by '{pattern}'"
        rule, specs = _rule(node, known, settings)
        if specs is None:
            return None, f"left in float by {rule}"
        if known.facts is None:
            return None, "no quantized form of this operator"
        if known.kind is not Kind.COMPUTE and not _goes_everywhere(specs):
            return None, "these formats go on products only"
        if not known.facts.is_for_runtime and not settings.applies_npu_rules and isinstance(specs.input, AffineSpec):
            return None, "ONNX Runtime has no integer form of it"
        return specs, ""

    def _drop_idle_moves(self, network: fx.GraphModule) -> None:
        """Operators that only move values are quantized where a neighbour is."""
        moving = [node for node in self.specs if self.kind(node) is Kind.PASS]
        useful = set(self.specs) - set(moving)
        for ordered in (moving, list(reversed(moving))):
            for node in ordered:
                neighbours = [*node.all_input_nodes, *node.users]
                if any(each in useful or _passes_to(network, each, useful) for each in neighbours):
                    useful.add(node)
        for node in moving:
            if node not in useful:
                del self.specs[node]
                reason = "only moves values between float nodes"
                self.skipped.append(SkippedNode(layer_name(node), self.operators[node].op_type, reason))


def _rule(node: fx.Node, known: Operator, settings: Settings) -> tuple[str, LayerSpecs | None]:
    """What goes for the node, and which entry says so: the narrowest."""
    for pattern, specs in settings.by_name.items():
        if _matches(pattern, node):
            return f"'{pattern}'", specs
    if node.name in settings.by_node:
        return "the plan", settings.by_node[node.name]
    for kind, specs in settings.by_type.items():
        if _is_of_type(kind, node, known):
            return f"'{kind}'", specs
    return "the configuration", settings.specs


def _passes_to(network: fx.GraphModule, node: fx.Node, useful: set[fx.Node]) -> bool:
    return is_transparent(network, node) and any(each in useful for each in (*node.users, *node.all_input_nodes))


def _goes_everywhere(specs: LayerSpecs) -> bool:
    """Integers with known scales and small floats go on every tensor; blocks and dynamic scales on products alone."""
    static = [each for each in (specs.input, specs.output) if each is not None and not isinstance(each, BlockSpec)]
    return any(not (isinstance(each, AffineSpec) and each.is_dynamic) for each in static)


def _names(node: fx.Node) -> Iterator[str]:
    """What a pattern may mean: the node, its module's path, the layer that its weight belongs to."""
    yield str(node.name)
    yield layer_name(node)
    if node.op == "call_module":
        yield str(node.target)
    for each in node.args:
        if is_constant(each):
            yield str(each.target).rpartition(".")[0]  # type: ignore[union-attr]


def _matches(pattern: str, node: fx.Node) -> bool:
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in _names(node) if name)


def _is_of_type(key: str, node: fx.Node, known: Operator) -> bool:
    return key in (module_type(node), known.op_type) or key in _CLASSES.get(known.op_type, ())


def _refuse_unknown(network: fx.GraphModule, settings: Settings) -> None:
    """A pattern that matches nothing is a mistake, and would pass unnoticed."""
    nodes = [node for node in network.graph.nodes if node.op in ("call_function", "call_module")]
    known = sorted({name for node in nodes for name in _names(node) if name})
    listed: Mapping[str, tuple[str, ...]] = {"exclude": settings.exclude, "layer_quant_config": tuple(settings.by_name)}
    for option, patterns in listed.items():
        for pattern in patterns:
            if not any(_matches(pattern, node) for node in nodes):
                raise unknown_name(f"layer for {option}", pattern, known)
