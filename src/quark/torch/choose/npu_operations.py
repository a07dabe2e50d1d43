"""What the rules of `quark.npu` are about, by the names of quantizers.

It depends on where quantizers are and not on their numbers, so that it is found once; `train/positions.py` moves
numbers by it when the network is quantized, and once more when training has moved them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from quark.npu import Operation
from quark.npu.rules import RULES
from quark.onnx.choose.operators import Kind
from quark.plan import Reader
from quark.torch.choose.choose import Decisions
from quark.torch.choose.operators import operator_of
from quark.torch.graph import layer_name

_RULED = frozenset(op_type for rule in RULES for op_type in rule.op_types)
_FOLLOWERS = ("LeakyRelu", "PRelu", "Gelu")  # beside Relu and Clip, computed with the operator before them


def npu_operations(network: fx.GraphModule, decisions: Decisions) -> tuple[Operation, ...]:
    """The operators that rules are about, in the order of the graph."""
    read = {each.request.consumer: each.quantizer for each in decisions.chosen}
    written = {each.request.tensor: each.quantizer for each in decisions.chosen}
    found = [_operation(network, node, read, written) for node in network.graph.nodes]
    return tuple(each for each in found if each is not None)


def _operation(
    network: fx.GraphModule, node: fx.Node, read: Mapping[Reader, str], written: Mapping[str, str]
) -> Operation | None:
    op_type = operator_of(network, node).op_type
    if op_type not in _RULED:
        return None
    count = 1 if op_type in ("Conv", "Gemm") else len(node.all_input_nodes)
    inputs = tuple(read.get(Reader(str(node.name), index)) for index in range(count))
    last = _computed_with(network, node, written)
    return Operation(
        layer_name(node),
        op_type,
        inputs,
        written.get(str(last.name)),
        weight=read.get(Reader(str(node.name), 1)) if op_type in ("Conv", "Gemm") else None,
        bias=read.get(Reader(str(node.name), 2)) if op_type in ("Conv", "Gemm") else None,
        is_before_leaky_relu=operator_of(network, last).op_type == "LeakyRelu",
        is_swish=op_type == "Mul" and _is_swish(network, node),
        alpha=1 / 6 if op_type == "HardSigmoid" else 0.0,
        beta=0.5 if op_type == "HardSigmoid" else 0.0,
    )


def _computed_with(network: fx.GraphModule, node: fx.Node, written: Mapping[str, str]) -> fx.Node:
    """The node whose value is quantized: the activation behind the operator where nothing is in between."""
    last = node
    while str(last.name) not in written and len(last.users) == 1:
        following = next(iter(last.users))
        known = operator_of(network, following)
        if known.kind is not Kind.ACTIVATION and known.op_type not in _FOLLOWERS:
            break
        last = following
    return last


def _is_swish(network: fx.GraphModule, node: fx.Node) -> bool:
    """A product of x and HardSigmoid(x)."""
    sources = node.all_input_nodes
    gates = [each for each in sources if operator_of(network, each).op_type == "HardSigmoid"]
    return any(each.all_input_nodes[0] in sources for each in gates)
