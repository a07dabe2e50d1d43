"""Layers of a network as equalization sees them: by group, so many channels into so many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from quark.equalization.channels import CannotScaleError, Channels
from quark.torch.graph import attribute_of, is_call, module_of, rank_of, shape_of
from quark.torch.train.conv_batch_norm import CONVOLUTIONS, TRANSPOSED, ConvBatchNorm

aten = torch.ops.aten
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, aten.linear.default)
_GROUPS = 3  # the argument that counts groups, behind input, weight and bias


@dataclass(frozen=True, eq=False)
class Layer:
    """A node that multiplies by a weight of its own: in every group, `inputs` channels into `outputs`. With `module`,
    the batch norm behind it belongs to it, and it is that which is divided."""

    node: fx.Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    module: ConvBatchNorm | None
    groups: int
    outputs: int
    inputs: int
    is_input_first: bool  # the weight counts its input channels before its output channels
    is_linear: bool

    @property
    def count(self) -> int:
        """Output channels, over all groups."""
        return self.groups * self.outputs

    @property
    def is_depthwise(self) -> bool:
        """That each channel becomes one channel."""
        return self.outputs == self.inputs == 1

    @property
    def norm(self) -> _BatchNorm | None:
        return None if self.module is None else self.module.batch_norm

    def axis_of(self, value: fx.Node) -> int:
        """Where a tensor that the layer reads or makes has its channels."""
        rank = rank_of(value)
        if rank is None:
            raise CannotScaleError("the rank of its tensors is not known")
        return rank - 1 if self.is_linear else 1

    def view(self, weight: Any) -> Any:
        """A weight by group, output channel, input channel, and the rest; as a view where it can be one."""
        sizes = (self.inputs, self.outputs) if self.is_input_first else (self.outputs, self.inputs)
        by_group = weight.reshape(self.groups, *sizes, -1)
        return by_group.swapaxes(1, 2) if self.is_input_first else by_group

    def folded_weight(self) -> NDArray[Any]:
        """What inference multiplies by, by group, output and input channel, and the rest."""
        weight = self.weight if self.module is None else self.module.folded_weight()
        return np.asarray(self.view(weight.detach().double().cpu().numpy()))

    def bias_reach(self) -> NDArray[Any] | None:
        """The magnitude of what inference adds."""
        bias = self.bias if self.module is None else self.module.folded_bias()
        return None if bias is None else np.abs(bias.detach().double().cpu().numpy())


class Readers:
    """Which nodes read a parameter, under whatever name."""

    def __init__(self, network: fx.GraphModule) -> None:
        self._nodes: dict[int, set[fx.Node]] = {}
        for node in network.graph.nodes:
            value = attribute_of(network, node)
            if value is not None:
                self._nodes.setdefault(id(value), set()).update(node.users)
            module = module_of(network, node)
            for each in module.parameters() if module is not None else ():
                self._nodes.setdefault(id(each), set()).add(node)

    def other_than(self, node: fx.Node, value: torch.Tensor) -> list[fx.Node]:
        return [each for each in self._nodes.get(id(value), ()) if each is not node]


def is_layer(network: fx.GraphModule, node: fx.Node) -> bool:
    return is_call(node, *LAYERS) or isinstance(module_of(network, node), ConvBatchNorm)


def layer_of(network: fx.GraphModule, node: fx.Node, readers: Readers) -> Layer:
    """The node as a layer; CannotScaleError where its weight is not a parameter that it alone reads."""
    found = module_of(network, node)
    module = found if isinstance(found, ConvBatchNorm) else None
    target: Any = node.target if module is None else module.operation.target
    arguments = tuple(node.args[3:]) if module is None else module.operation.arguments
    weight = _parameter(network, node, 1) if module is None else module.weight
    bias = _parameter(network, node, 2) if module is None else module.bias
    if weight is None or node.kwargs:
        raise CannotScaleError("its weight is not constant")
    for each in (weight, bias):
        others = readers.other_than(node, each) if each is not None else []
        if others:
            raise CannotScaleError(f"its weight or bias is also read by '{others[0].name}'")
    return Layer(node, weight, bias, module, *_sizes(target, arguments, node, weight))


def _parameter(network: fx.GraphModule, node: fx.Node, index: int) -> torch.Tensor | None:
    given = node.args[index] if len(node.args) > index else None
    value = attribute_of(network, given)
    if given is not None and value is None and index == 2:
        raise CannotScaleError("its bias is not constant")
    return value


Sizes: TypeAlias = tuple[int, int, int, bool, bool]


def _sizes(target: Any, arguments: tuple[Any, ...], node: fx.Node, weight: torch.Tensor) -> Sizes:
    """(groups, outputs, inputs, is_input_first, is_linear)"""
    if target is aten.linear.default:
        return 1, int(weight.shape[0]), int(weight.shape[1]), False, True
    groups = int(arguments[_GROUPS]) if len(arguments) > _GROUPS else 1
    if rank_of(node) != weight.dim() or weight.shape[0] % groups or not weight.numel():
        raise CannotScaleError("its weight does not fit its data")
    first, second = int(weight.shape[0]) // groups, int(weight.shape[1])
    if target in TRANSPOSED:
        return groups, second, first, True, False
    return groups, first, second, False, False


def size_of(value: fx.Node, axis: int) -> int | None:
    """The size along an axis, where it is known."""
    sizes = sizes_of(value)
    return sizes[axis] if sizes is not None and 0 <= axis < len(sizes) else None


def sizes_of(value: fx.Node) -> list[int | None] | None:
    """The shape; None for what is only known at run time."""
    shape = shape_of(value)
    return None if shape is None else [size if isinstance(size, int) else None for size in shape]


__all__ = ["CannotScaleError", "Channels", "Layer", "Readers", "is_layer", "layer_of", "size_of", "sizes_of"]
