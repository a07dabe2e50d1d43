"""A plain network of any depth and width in one file, to see how costs grow with either.

    x [N, 3, size, size] -> Conv, Relu -> (Conv, Relu, Conv, Add, Relu) ... -> mean over space -> Gemm

Every second convolution closes a residual path, with less weight the deeper the network is, so that activations neither
vanish nor blow up: thousands of layers work. The weights are random, as a layer's would be at its start, and seeded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INPUT, CLASSES = "x", 10


@dataclass(frozen=True)
class Shape:
    """How many convolutions there are, how many channels each has, and the pixels of an image along one side."""

    layers: int
    width: int
    size: int

    def __str__(self) -> str:
        return f"{self.layers} convolutions of {self.width} channels, images of {self.size} x {self.size}"


@dataclass
class Builder:
    """Nodes and constants so far; every method gives the name of a tensor."""

    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def weight(self, *shape: int, gain: float = 1.0) -> str:
        fan_in = math.prod(shape[1:]) or 1
        array = self.random.standard_normal(shape, np.float32) * np.float32(gain * math.sqrt(2 / fan_in))
        self.constants.append(numpy_helper.from_array(array, f"weight_{len(self.constants)}"))
        return self.constants[-1].name

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        output = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def conv(self, x: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        weight, bias = self.weight(outputs, inputs, 3, 3, gain=gain), self.weight(outputs, gain=0.01)
        return self.node("Conv", x, weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def build(path: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the network to the path."""
    builder = Builder(np.random.default_rng(seed))
    x = builder.node("Relu", builder.conv(INPUT, 3, shape.width))
    around = x
    closing_gain = min(0.3, 3.0 / math.sqrt(shape.layers))  # each path adds gain**2 of the variance
    for number in range(1, shape.layers):
        closes = number % 2 == 0
        x = builder.conv(x, shape.width, shape.width, gain=closing_gain if closes else 1.0)
        x = builder.node("Relu", builder.node("Add", x, around) if closes else x)
        around = x if closes else around
    x = builder.node("Flatten", builder.node("GlobalAveragePool", x))
    y = builder.node("Gemm", x, builder.weight(CLASSES, shape.width), builder.weight(CLASSES), transB=1)
    infos = [(INPUT, ["N", 3, shape.size, shape.size]), (y, ["N", CLASSES])]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)] for name, dims in infos)
    graph = helper.make_graph(builder.nodes, "layered", inputs, outputs, builder.constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
