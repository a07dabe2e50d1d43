"""Taps: places of a network that are found again in what an exporter makes of it.

A tap is an operator of torch that hands on its input, with a number:

    x -> Quantizer -> conv      becomes      x -> tap(17) -> conv

The exporter translates it into a node that no optimization touches. On the other side the number says which quantizer
belongs there, so that the plan, and not the exporter, decides what nodes a quantizer becomes. Taps that stand for no
quantizer are marks: they carry the names of parameters and layers through.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quark.plan import Choice, Role
from quark.torch.export.quiet import quiet
from quark.torch.graph import attribute_of, copy_graph, is_float, layer_name, module_of
from quark.torch.train.quantizers import Quantizer


@dataclass(frozen=True)
class Tap:
    """A place in the network. `tensor` is the node or the parameter that is read there, `layer` the path of the module
    that it came from; a mark has no `choice`."""

    number: int
    tensor: str
    layer: str
    role: Role
    choice: Choice | None = None

    @property
    def is_mark(self) -> bool:
        return self.choice is None


def with_taps(network: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Tap, ...]]:
    """The network with taps in the place of its quantizers, and marks on its parameters and on the results of its
    layers. The network is not changed; the result shares its parameters."""
    with quiet():
        graph = copy_graph(network.graph)
    taps: list[Tap] = []
    for node in list(graph.nodes):
        quantizer = module_of(network, node)
        if isinstance(quantizer, Quantizer):
            _replace_quantizer(node, quantizer, taps)
    for node in list(graph.nodes):
        if _is_markable(network, node):
            _insert_mark(node, taps)
    return fx.GraphModule(network, graph), tuple(taps)


def tap_operator() -> Any:
    """The operator `quark::tap(x, number)`, which is made when it is first asked for."""
    _define_tap()
    return torch.ops.quark.tap.default


@functools.cache
def _define_tap() -> torch.library.Library:
    """The library, which has to live as long as its operator does. What comes out is a copy: operators that hand out
    their inputs are not allowed."""
    library = torch.library.Library("quark", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("tap(Tensor x, int number) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("tap", lambda x, number: x.clone(), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("quark::tap", lambda x, number: torch.empty_like(x), lib=library)
    return library


def _replace_quantizer(node: fx.Node, quantizer: Quantizer, taps: list[Tap]) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    tap = Tap(len(taps), tensor_name(source), layer_name(source), quantizer.role, quantizer.choice())
    with node.graph.inserting_before(node):
        new = node.graph.call_function(tap_operator(), (source, tap.number))
    new.meta["val"] = node.meta.get("val", source.meta.get("val"))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    taps.append(tap)


def _insert_mark(node: fx.Node, taps: list[Tap]) -> None:
    role = Role.WEIGHT if node.op == "get_attr" else Role.ACTIVATION
    others = [user for user in node.users if not _is_tap(user)]
    with node.graph.inserting_after(node):
        mark = node.graph.call_function(tap_operator(), (node, len(taps)))
    mark.meta["val"] = node.meta.get("val")
    for user in others:
        user.replace_input_with(node, mark)
    taps.append(Tap(len(taps), tensor_name(node), layer_name(node), role))


def _is_markable(network: fx.GraphModule, node: fx.Node) -> bool:
    """That a node is a parameter, or computes with one or with what a quantizer gave, and that someone reads it who is
    no quantizer."""
    if not is_float(node) or all(_is_tap(user) for user in node.users):
        return False
    if node.op == "get_attr":
        value = attribute_of(network, node)
        return value is not None and value.is_floating_point()
    computes = _gives_one_tensor(node.target) and not _is_tap(node)
    return computes and any(each.op == "get_attr" or _is_tap(each) for each in node.all_input_nodes)


def _gives_one_tensor(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _is_tap(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is tap_operator()


def tensor_name(node: fx.Node) -> str:
    """What a plan calls the value: a parameter by its path, all else by its node."""
    return str(node.target) if node.op == "get_attr" else str(node.name)
