"""A part of a model as a model of its own: it computes some tensors from any others.

piece      the part between two sets of tensors
frontier   the tensors that cross the gap behind a node: what the rest of the network needs of what was computed
read_by    what a node reads, also by capture
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from quark.onnx.graph import remove_dead

COMPUTED = "/computed"  # ends the name of a tensor that is computed although it is given as well


def piece(model: ir.Model, inputs: Collection[str], outputs: Sequence[str]) -> ir.Model:
    """The part of a model that computes `outputs` from `inputs`, any tensors of it. Weights are shared.

    A tensor can be both: what is given is read by the nodes behind it, what is computed is an output whose name ends in
    COMPUTED.
    """
    part = model.clone()
    graph = part.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    values |= {str(value.name): value for value in graph.inputs}
    graph.outputs.clear()
    own = {str(value.name) for value in graph.inputs}
    for name in inputs:
        if name in own:
            continue
        old = values[name]
        given = ir.Value(name=name, type=old.type)
        old.name = f"{name}{COMPUTED}"
        old.replace_all_uses_with(given)
        graph.inputs.append(given)
    graph.outputs.extend(values[name] for name in outputs)
    _remove_dead(part)
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    return part


def frontier(model: ir.Model, last: int) -> list[str]:
    """What the nodes behind number `last` read of inputs, and of what that node and those before it compute."""
    nodes = list(model.graph)
    given = model.graph.initializers
    known = {id(value) for value in model.graph.inputs if value.name not in given}
    known |= {id(value) for node in nodes[: last + 1] for value in node.outputs}
    read = (value for node in nodes[last + 1 :] for value in read_by(node))
    return list(dict.fromkeys(str(value.name) for value in read if id(value) in known))


def read_by(node: ir.Node) -> Iterable[ir.Value]:
    """The values that a node reads, also those that its branches capture."""
    yield from (value for value in node.inputs if value is not None)
    for graph in _branches(node):
        inner = list(graph.all_nodes())
        own = [graph, *(each.graph for each in inner)]
        read = (value for each in inner for value in each.inputs if value is not None)
        yield from (value for value in read if not any(value.graph is each for each in own))


def _branches(node: ir.Node) -> Iterable[ir.Graph]:
    for attr in node.attributes.values():
        for graph in attr.value if attr.type is ir.AttributeType.GRAPHS else [attr.value]:
            if isinstance(graph, ir.Graph):
                yield graph


def _remove_dead(part: ir.Model) -> None:
    """The branches of a node that is gone still count as readers of what they capture: they let go of it, and then that
    is looked at again."""
    branching = [node for node in part.graph if any(True for _ in _branches(node))]
    while remove_dead(part):
        gone = [node for node in branching if node.graph is None]
        branching = [node for node in branching if node.graph is not None]
        for inner in (each for node in gone for graph in _branches(node) for each in graph.all_nodes()):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
