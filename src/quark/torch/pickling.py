"""Networks as values that pickle can write: the graph as a list of nodes, beside the modules and the state.

torch's own graph modules are pickled as code, and traced once more when they are read, which quantizers do not survive.
Here every node is written with its operator, its arguments and the known facts about its value. Sizes that are free are
written as such (`free_axes`), since torch's symbols belong to the process that traced them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

FREE_AXES = "quark_free_axes"  # the entry of a node's meta that says which axes of a restored value are free
_KEPT = ("nn_module_stack", "stack_trace")
_FREE_SIZE = 2  # stands for a free size if a shape needs a number


@dataclass(frozen=True)
class _Reference:
    """Another node, by its name."""

    name: str


@dataclass(frozen=True)
class _Operator:
    """An operator of torch, such as aten::add.Tensor, by its name."""

    name: str
    overload: str


@dataclass(frozen=True)
class _Value:
    """The known facts about a node's tensor; a free size is None."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype


def free_axes_of(node: fx.Node) -> set[int]:
    """The axes of a node's tensor whose size is free."""
    known: set[int] | None = node.meta.get(FREE_AXES)
    value = node.meta.get("val")
    sizes = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return known if known is not None else {axis for axis, size in enumerate(sizes) if not isinstance(size, int)}


def written_target(target: Any) -> Any:
    """The target of a node as pickle can write it."""
    if isinstance(target, torch._ops.OpOverload):
        return _Operator(target._schema.name, target._overloadname)
    return target


def read_target(target: Any) -> Any:
    """The inverse of `written_target`."""
    if not isinstance(target, _Operator):
        return target
    return operator.attrgetter(f"{target.name.replace('::', '.')}.{target.overload}")(torch.ops)


def written_network(network: fx.GraphModule) -> dict[str, Any]:
    """All that a network consists of, without its class."""
    nodes = []
    for node in network.graph.nodes:
        arguments: Any = fx.node.map_arg((node.args, node.kwargs), _reference)
        meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        known = node.meta.get("val")
        values = [_written_value(item) for item in known] if isinstance(known, (list, tuple)) else _written_value(known)
        meta |= {"val": values, FREE_AXES: free_axes_of(node)}
        nodes.append((node.op, str(node.name), written_target(node.target), _plain(arguments), meta))
    codegen: Any = network.graph._codegen
    return {
        "modules": dict(network._modules),
        "parameters": dict(network._parameters),
        "buffers": dict(network._buffers),
        "meta": dict(network.meta),
        "nodes": nodes,
        "trees": getattr(codegen, "pytree_info", None),
        "training": network.training,
    }


def read_network(kind: type[fx.GraphModule], content: Mapping[str, Any]) -> fx.GraphModule:
    """The inverse of `written_network`, for a class of networks."""
    root = nn.Module()
    root._modules.update(content["modules"])
    root._parameters.update(content["parameters"])
    root._buffers.update(content["buffers"])
    graph = fx.Graph()
    if content["trees"] is not None:
        graph.set_codegen(fx.graph._PyTreeCodeGen(content["trees"]))
    nodes: dict[str, fx.Node] = {}
    for op, name, target, written, meta in content["nodes"]:
        args, kwargs = _with_nodes(written, nodes)
        node = graph.create_node(op, read_target(target), args, kwargs, name)
        node.name = name
        known = meta.pop("val")
        node.meta = {
            **meta,
            "val": [_read_value(item) for item in known] if isinstance(known, list) else _read_value(known),
        }
        nodes[name] = node
    made = kind(root, graph)
    made.meta = content["meta"]
    made.training = content["training"]
    made.recompile()
    return made


def _reference(node: fx.Node) -> Any:
    return _Reference(str(node.name))


def _written_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Value(tuple(size if isinstance(size, int) else None for size in value.shape), value.dtype)
    return value if isinstance(value, (bool, int, float, str, type(None))) else None


def _read_value(value: Any) -> Any:
    if not isinstance(value, _Value):
        return value
    return torch.empty([_FREE_SIZE if size is None else size for size in value.shape], dtype=value.dtype, device="meta")


def _plain(value: Any) -> Any:
    """Arguments in plain containers instead of those of torch.fx."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value] if isinstance(value, list) else tuple(_plain(item) for item in value)
    return value


def _with_nodes(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, _Reference):
        return nodes[value.name]
    if isinstance(value, dict):
        return {key: _with_nodes(item, nodes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_nodes(item, nodes) for item in value)
    return value
