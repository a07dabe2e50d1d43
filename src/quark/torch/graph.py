"""The few functions through which the steps access an fx graph, and the network that they pass on.

A `Network` is a plain graph module: functional aten operators, parameters under the names that the model gave them,
batch norms and dropouts as modules. Values are named by their nodes; a layer is called by the path of its module where
it came from one.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from quark.torch.pickling import read_network, written_network

CALL = "quark_call"  # the entry of `meta` that has the call a network was captured for (capture/signature.py)


class Network(fx.GraphModule):
    """A captured network. What belongs to it beside the graph lies in `meta`, which copies keep.

    It is called as the model was, by position and by name; its graph takes the tensors of that call.
    """

    # read by the Trainer of Hugging Face: the graph computes no loss, even if the model did
    accepts_loss_kwargs = False

    def recompile(self) -> Any:
        code = super().recompile()
        call = vars(self).get("meta", {}).get(CALL)
        if call is not None:
            kind = type(self)
            flat: Any = kind.forward

            def forward(self: Any, *arguments: Any, **by_name: Any) -> Any:
                return flat(self, *call.tensors(arguments, by_name))

            own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            known = [parameter for parameter in call.signature.python.parameters.values() if parameter.name != "self"]
            vars(forward)["__signature__"] = inspect.Signature([own, *known])
            kind.forward = forward
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _quiet_copies():
            made = super().__deepcopy__(memo)
        made.recompile()  # its meta is copied last
        return made

    def __reduce__(self) -> Any:
        # the class of an instance is made by torch for it alone
        kind = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("quark."))
        return read_network, (kind, written_network(self))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a deep copy of a graph."""
    with _quiet_copies():
        return copy.deepcopy(graph)


@contextmanager
def _quiet_copies() -> Iterator[None]:
    """Without the warning of a class that torch deprecates and copies itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield


def layer_name(node: fx.Node) -> str:
    """The path of the module that the node came from, or the node's own name."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry and entry[0]]
    return _plain(paths[-1]) if paths else str(node.name)


def module_type(node: fx.Node) -> str:
    """The class of the innermost module that the node came from, without its package; empty where it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [entry[1] for entry in stack.values() if isinstance(entry, tuple) and len(entry) > 1]
    if not kinds:
        return ""
    kind = kinds[-1]
    return str(kind).rsplit(".", 1)[-1] if isinstance(kind, str) else str(kind.__name__)


def source_line(node: fx.Node) -> str:
    """The line of the model's own code that made the node, as `file:line`; empty where it is not known."""
    trace = str(node.meta.get("stack_trace") or "")
    places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not places:
        return ""
    parts = places[-1].split(",")
    file = parts[0].removeprefix("File ").strip('"')
    return f"{file}:{parts[1].strip().removeprefix('line ')}"


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The shape that the node's value was traced with; the batch may be a symbol."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def rank_of(node: fx.Node) -> int | None:
    """Return the number of dimensions of a node's tensor; None if it has no known shape."""
    shape = shape_of(node)
    return None if shape is None else len(shape)


def is_float(node: fx.Node) -> bool:
    """True if the node's value is a tensor of real numbers, or is not known."""
    value = node.meta.get("val")
    return value.dtype.is_floating_point if isinstance(value, torch.Tensor) else value is None


def is_call(node: Any, *targets: Any) -> bool:
    """True if the node calls one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def module_of(network: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a call_module node calls."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def attribute_of(network: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Return the parameter or buffer that a get_attr node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(network)
    return value if isinstance(value, torch.Tensor) else None


def readers_of_parameters(network: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The nodes that read a parameter or buffer, by its identity: it may have several names."""
    readers: dict[int, list[fx.Node]] = {}
    for node in network.graph.nodes:
        value = attribute_of(network, node)
        if value is not None:
            readers.setdefault(id(value), []).extend(node.users)
        module = module_of(network, node)
        for parameter in module.parameters() if module is not None else ():
            readers.setdefault(id(parameter), []).append(node)
    return readers


def is_constant(node: Any) -> bool:
    """True if the node reads a parameter or buffer."""
    return isinstance(node, fx.Node) and node.op == "get_attr"


def inputs_of(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The nodes that a node reads, with a number for each place: that of the argument; for a list of tensors, as that
    of a concatenation, the place in the list."""
    for index, argument in enumerate(node.args):
        if isinstance(argument, fx.Node):
            yield index, argument
        elif isinstance(argument, (list, tuple)):
            yield from ((place, item) for place, item in enumerate(argument) if isinstance(item, fx.Node))


def replace_input(node: fx.Node, index: int, old: fx.Node, new: fx.Node) -> None:
    """Replace the node's input in that place, as numbered by `inputs_of`, by `new`."""
    arguments = list(node.args)
    for place, argument in enumerate(arguments):
        if argument is old and place == index:
            arguments[place] = new
        elif isinstance(argument, (list, tuple)) and index < len(argument) and argument[index] is old:
            arguments[place] = [new if i == index else item for i, item in enumerate(argument)]
    node.args = tuple(arguments)


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The graph's outputs, flat and in order."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(graph.output_node().args, lambda node: nodes.append(node))
    return nodes


def set_attribute(network: nn.Module, name: str, value: nn.Module | nn.Parameter | torch.Tensor) -> None:
    """Put a module, parameter or buffer at that path; modules on the way are made where they are missing."""
    *path, last = name.split(".")
    owner = network
    for part in path:
        child = getattr(owner, part, None)
        if not isinstance(child, nn.Module):
            child = nn.Module()
            owner.add_module(part, child)
        owner = child
    if isinstance(value, nn.Module):
        owner.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(last, value)
    else:
        owner.register_buffer(last, value)


def _plain(path: str) -> str:
    """A path as the user wrote it: L['self'].layer1.0 and L__self___layer1_0 are forms that tracers add."""
    return path.removeprefix("L['self'].").removeprefix("L['self']").replace("['", ".").replace("']", "") or path
