"""A MobileNet-V2 in miniature, and the same network as an ONNX graph.

    stem      conv 3x3, batch norm, relu6
    blocks    expand 1x1, depthwise 3x3, project 1x1, each with its batch norm; relu6 after the first two;
              the input is added where shape allows
    head      conv 1x1, batch norm, relu6, global average pool, linear

The graph is written node by node from the trained weights rather than by torch's exporter: batch norms stay nodes of
their own, which is what a quantizer meets in the wild, and the bytes do not depend on the exporter's version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET_VERSION = 17
IR_VERSION = 8
CLASSES = 10
STEM_CHANNELS = 16
HEAD_CHANNELS = 96


@dataclass(frozen=True)
class BlockShape:
    """One inverted residual block: channels out, stride, and how many times wider it is inside."""

    channels: int
    stride: int
    expansion: int = 4


BLOCKS = (BlockShape(16, 1), BlockShape(24, 2), BlockShape(24, 1), BlockShape(32, 2), BlockShape(32, 1))


@dataclass(frozen=True)
class ConvShape:
    """One convolution with its batch norm."""

    name: str
    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    has_relu: bool = True


@dataclass(frozen=True)
class Stage:
    """Convolutions in a row; `adds_input`: their input is added to what they give."""

    convs: tuple[ConvShape, ...]
    adds_input: bool = False


def stages() -> list[Stage]:
    """The network up to the pooling, as data: the torch module and the ONNX graph are both made from it."""
    result = [Stage((ConvShape("stem", 1, STEM_CHANNELS, kernel=3),))]
    channels = STEM_CHANNELS
    for index, block in enumerate(BLOCKS):
        wide = channels * block.expansion
        convs = (
            ConvShape(f"block{index}.expand", channels, wide),
            ConvShape(f"block{index}.depthwise", wide, wide, kernel=3, stride=block.stride, groups=wide),
            ConvShape(f"block{index}.project", wide, block.channels, has_relu=False),
        )
        result.append(Stage(convs, adds_input=block.stride == 1 and block.channels == channels))
        channels = block.channels
    result.append(Stage((ConvShape("head", channels, HEAD_CHANNELS),)))
    return result


class DigitsMobileNet(nn.Module):
    """The network in torch: images [N, 1, 8, 8] to logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = stages()
        shapes = [conv for stage in self.stages for conv in stage.convs]
        # module names cannot hold dots
        self.convs = nn.ModuleDict({shape.name.replace(".", "_"): _conv_module(shape) for shape in shapes})
        self.classifier = nn.Linear(HEAD_CHANNELS, CLASSES)

    def conv(self, shape: ConvShape) -> nn.Module:
        return self.convs[shape.name.replace(".", "_")]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            y = x
            for shape in stage.convs:
                y = self.conv(shape)(y)
            x = x + y if stage.adds_input else y
        logits: Tensor = self.classifier(x.mean(dim=(2, 3)))
        return logits


def _conv_module(shape: ConvShape) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(
            shape.inputs, shape.outputs, shape.kernel, shape.stride, shape.kernel // 2, groups=shape.groups, bias=False
        ),
        nn.BatchNorm2d(shape.outputs),
    ]
    return nn.Sequential(*layers, nn.ReLU6()) if shape.has_relu else nn.Sequential(*layers)


class _GraphWriter:
    """Nodes and initializers as they come; every method gives the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, value: Tensor | np.float32) -> str:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, name: str, inputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}.output"], name=name, **attributes))
        return f"{name}.output"

    def conv(self, shape: ConvShape, module: nn.Module, x: str) -> str:
        convolution, norm = module.get_submodule("0"), module.get_submodule("1")
        weight = self.constant(f"{shape.name}.conv.weight", convolution.get_parameter("weight"))
        border = shape.kernel // 2
        y = self.node(
            "Conv",
            f"{shape.name}.conv",
            [x, weight],
            kernel_shape=[shape.kernel] * 2,
            strides=[shape.stride] * 2,
            pads=[border] * 4,
            group=shape.groups,
        )
        constants = [
            self.constant(f"{shape.name}.norm.{onnx_name}", getattr(norm, torch_name))
            for onnx_name, torch_name in (
                ("scale", "weight"),
                ("bias", "bias"),
                ("mean", "running_mean"),
                ("variance", "running_var"),
            )
        ]
        y = self.node("BatchNormalization", f"{shape.name}.norm", [y, *constants], epsilon=1e-5)
        return self.node("Clip", f"{shape.name}.relu6", [y, "zero", "six"]) if shape.has_relu else y


def to_onnx(network: DigitsMobileNet, metadata: dict[str, str]) -> onnx.ModelProto:
    """The trained network as an opset-17 model with input `input` and output `logits`; the batch size is free."""
    writer = _GraphWriter()
    writer.constant("zero", np.float32(0))
    writer.constant("six", np.float32(6))
    x = "input"
    for index, stage in enumerate(network.stages):
        y = x
        for shape in stage.convs:
            y = writer.conv(shape, network.conv(shape), y)
        x = writer.node("Add", f"stage{index}.add", [x, y]) if stage.adds_input else y
    x = writer.node("GlobalAveragePool", "pool", [x])
    x = writer.node("Flatten", "flatten", [x], axis=1)
    weight = writer.constant("classifier.weight", network.classifier.weight)
    bias = writer.constant("classifier.bias", network.classifier.bias)
    writer.node("Gemm", "classifier", [x, weight, bias], transB=1)
    writer.nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        writer.nodes,
        "digits_mobilenet",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        writer.initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)], ir_version=IR_VERSION, producer_name="quark.demo"
    )
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    return model
