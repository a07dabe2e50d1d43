"""The network that an export starts from: frozen, in eval mode, on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quark.plan import DynamicChoice
from quark.text import get_logger
from quark.torch.capture import capture, input_names, inputs_of_batch
from quark.torch.export.errors import ExportError
from quark.torch.freeze import freeze
from quark.torch.graph import Network
from quark.torch.train.networks import QuantizedNetwork
from quark.torch.train.quantizers import DynamicQuantizer, Quantizer

_LOG = get_logger(__name__)
_IN_FLOAT32 = (torch.bfloat16, torch.float64)


def deployable(model: nn.Module | ExportedProgram, example_input: Any = None) -> fx.GraphModule:
    """The network to export, in eval mode and on the CPU: the one that came, or a copy that is frozen, moved or brought
    to float32 where it is bfloat16 or float64, which ONNX Runtime computes little in. A float model that is no network
    yet is captured, with the example where it has to be traced."""
    network = frozen(model) if _is_network(model) else _captured(model, example_input)
    tensors = [*network.parameters(), *network.buffers()]
    is_elsewhere = any(each.device.type != "cpu" for each in tensors)
    others = sorted({str(each.dtype) for each in tensors if each.dtype in _IN_FLOAT32})
    if network.training or is_elsewhere or others:
        network = copy.deepcopy(network).cpu().eval()
    if others:
        network = network.float()
        _LOG.info("%s weights are exported as float32, which ONNX Runtime computes in", " and ".join(others))
    _refuse_symmetric_dynamic(network)
    _refuse_plain_outputs(network)
    return network


def _is_network(model: object) -> bool:
    """That it is one of ours, with quantizers or without, and not what torch.export gives."""
    modules = model.modules() if isinstance(model, fx.GraphModule) else ()
    return isinstance(model, Network) or any(isinstance(each, Quantizer) for each in modules)


def _captured(model: nn.Module | ExportedProgram, example_input: Any) -> fx.GraphModule:
    names = input_names(model)
    return capture(model, lambda: inputs_of_batch(example_input, names, "example_input"))


def frozen(model: nn.Module | ExportedProgram) -> fx.GraphModule:
    """The network that came, or a frozen copy of one that still trains."""
    if not isinstance(model, fx.GraphModule):
        raise ExportError(
            f"expected a network that ModelQuantizer.quantize_model or freeze gave, got {type(model).__name__}"
        )
    if not isinstance(model, QuantizedNetwork):
        return model
    _LOG.info("the network was not frozen: a frozen copy of it is exported")
    return freeze(model)


def _refuse_symmetric_dynamic(network: fx.GraphModule) -> None:
    for module in network.modules():
        if not isinstance(module, DynamicQuantizer):
            continue
        choice = module.choice()
        if isinstance(choice, DynamicChoice) and (choice.format != "uint8" or module.is_symmetric):
            raise ExportError(
                f"tensor '{module.tensor}' is quantized dynamically to {'symmetric ' if module.is_symmetric else ''}"
                f"{choice.format}: ONNX's DynamicQuantizeLinear has uint8 with a zero point only. Use Dtype.uint8 with "
                "symmetric=False for dynamic activations"
            )


def _refuse_plain_outputs(network: fx.GraphModule) -> None:
    """A file's outputs are tensors. Beside them the network may return None, which is left out."""
    outputs = pytree.tree_leaves(network.graph.output_node().args)
    if all(each is None for each in outputs):
        raise ExportError("the network returns nothing, and an ONNX file has outputs: let its forward return tensors")
    for number, output in enumerate(outputs):
        value = output.meta.get("val") if isinstance(output, fx.Node) else output
        is_tensor = isinstance(value, torch.Tensor) or (isinstance(output, fx.Node) and value is None)
        if output is None or is_tensor:
            continue
        what = "a size, which follows from the inputs" if isinstance(value, torch.SymInt) else f"{value!r:.40}"
        raise ExportError(
            f"output {number} of the network, counted from 0, is {what}: the outputs of an ONNX file are tensors. Let "
            "the forward return tensors only, or wrap the network in a module that leaves the others out"
        )
