"""The network that an export starts from: frozen, in eval mode, on the CPU."""

from __future__ import annotations

import copy
import logging

import torch
from torch import fx, nn

from quark.plan import DynamicChoice
from quark.torch.export.errors import ExportError
from quark.torch.freeze import freeze
from quark.torch.train.networks import QuantizedNetwork
from quark.torch.train.quantizers import DynamicQuantizer

_LOG = logging.getLogger(__name__)


def deployable(model: nn.Module) -> fx.GraphModule:
    """The network to export, in eval mode and on the CPU: the one that came, or a copy that is frozen, moved or
    widened. bfloat16 becomes float32, since ONNX Runtime computes little in it."""
    network = frozen(model)
    tensors = [*network.parameters(), *network.buffers()]
    is_elsewhere = any(each.device.type != "cpu" for each in tensors)
    is_bfloat16 = any(each.dtype is torch.bfloat16 for each in tensors)
    if network.training or is_elsewhere or is_bfloat16:
        network = copy.deepcopy(network).cpu().eval()
    if is_bfloat16:
        network = network.float()
        _LOG.info("bfloat16 weights are exported as float32, which holds the same numbers")
    _refuse_symmetric_dynamic(network)
    return network


def frozen(model: nn.Module) -> fx.GraphModule:
    """The network that came, or a frozen copy of one that still trains."""
    if not isinstance(model, fx.GraphModule):
        raise ExportError(
            f"expected a network that ModelQuantizer.quantize_model or freeze gave, got {type(model).__name__}; "
            "quark.torch.capture makes one of a float model"
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
