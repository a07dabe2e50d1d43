"""An exported program, its module, or a plain module, as a network of our own that trains.

The parameters are copies: the model that it came from is left as it is. Guards on input shapes are gone, and so are
in-place operators; batch norms and dropouts are modules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from quark.errors import ModelError
from quark.torch.capture.batches import Batch
from quark.torch.capture.functional import make_functional
from quark.torch.capture.modules import restore_modules
from quark.torch.capture.program import export_for_training
from quark.torch.graph import Network, attribute_of


def input_names(model: nn.Module | ExportedProgram) -> list[str]:
    """The inputs without which the model does not run."""
    if isinstance(model, ExportedProgram):
        return [str(name) for name in model.graph_signature.user_inputs]
    if isinstance(model, fx.GraphModule):
        return [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, an exported program or its module, got {type(model).__name__}; ONNX files go "
            "to quark.onnx"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name for each in positional if each.default is each.empty]
    return required or [each.name for each in positional[:1]] or ["x"]


def capture(model: nn.Module | ExportedProgram, example: Callable[[], Batch]) -> Network:
    """The model as a network, in eval mode; `example` gives a batch where the model has to be traced."""
    if isinstance(model, fx.GraphModule):
        module: nn.Module = model
    elif isinstance(model, ExportedProgram):
        module = model.module()
    else:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        module = export_for_training(model, tuple(each.to(device) for each in example())).module()
    if not isinstance(module, fx.GraphModule):
        raise ModelError(f"the exported program gave a {type(module).__name__}: expected a graph module")
    return network_of(module)


def network_of(module: fx.GraphModule) -> Network:
    """A network with a copy of the module's graph and parameters."""
    graph = copy.deepcopy(module.graph)
    _remove_guards(module, graph)
    root = _attributes(module, graph)
    network = Network(root, graph)
    make_functional(graph)
    restore_modules(network)
    graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    graph.lint()
    network.recompile()
    return network.eval()


def _remove_guards(module: fx.GraphModule, graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith("_guards")
        is_assertion = node.op == "call_function" and node.target in (
            torch.ops.aten._assert_scalar.default,
            torch.ops.aten.sym_constrain_range_for_size.default,
            torch.ops.aten._assert_tensor_metadata.default,
        )
        if (is_guard or is_assertion) and not node.users:
            graph.erase_node(node)
        elif node.op == "call_module" and not is_guard:
            kind = type(module.get_submodule(str(node.target))).__name__
            raise ModelError(
                f"node '{node.name}' calls a module ({kind}): expected a graph of aten operators, as "
                "quark.torch.export_for_training gives; hand over the model itself instead"
            )


def _attributes(module: fx.GraphModule, graph: fx.Graph) -> dict[str, torch.Tensor | nn.Module]:
    """Copies of the parameters and buffers that the graph reads, by name; what is shared stays shared."""
    copies: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor | nn.Module] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        value = attribute_of(module, node)
        if value is None:
            raise ModelError(
                f"'{node.target}' is no tensor: control flow (torch.cond, map) stays in float only in ONNX"
            )
        if id(value) not in copies:
            fresh = value.detach().clone()
            is_trained = isinstance(value, nn.Parameter)
            copies[id(value)] = nn.Parameter(fresh, requires_grad=value.requires_grad) if is_trained else fresh
        found[str(node.target)] = copies[id(value)]
    return found
