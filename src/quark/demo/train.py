"""Train the demo network and write its ONNX file: python -m quark.demo.train [OUTPUT.onnx]

It is a miniature MobileNet-V2:

    stem      conv 3x3, batch norm, relu6
    blocks    expand 1x1, depthwise 3x3, project 1x1, each with its batch norm; relu6 after the first two;
              the input is added if the shapes allow
    head      conv 1x1, batch norm, relu6, global average pool, linear

Training uses cross entropy with label smoothing, AdamW and one cosine cycle; each image is shifted by up to one pixel.
Seeds are fixed and one thread is used, so that runs on a machine are equal; another kind of CPU may round differently.

The graph is written node by node from the trained weights rather than by torch's exporter: batch norms stay nodes, as
in many real models, and the bytes do not depend on the exporter's version.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from quark.demo.digits import GREY_LEVELS, HELD_OUT_COUNT, SPLIT_SEED, Digits, load_digits
from quark.demo.network import network_path

OPSET_VERSION = 17
IR_VERSION = 8
CLASSES = 10
STEM_CHANNELS = 16
HEAD_CHANNELS = 96


@dataclass(frozen=True)
class BlockShape:
    """One inverted residual block: output channels, stride, and expansion."""

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
    """A sequence of convolutions; `adds_input` is True if their input is added to their output."""

    convs: tuple[ConvShape, ...]
    adds_input: bool = False


def stages() -> list[Stage]:
    """Return the network up to the pooling as data, from which the torch module and the ONNX graph are made."""
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
    """Collects nodes and initializers; every method returns the name of its output."""

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
    """Return the trained network as an opset-17 model with input `input`, output `logits` and any batch size."""
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


LOG_EPOCHS = 10


@dataclass(frozen=True)
class Training:
    """Settings of the training."""

    seed: int = 0
    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 4e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.05


def train(digits: Digits, options: Training) -> DigitsMobileNet:
    """Return a network trained on `digits`, in evaluation mode."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    network = DigitsMobileNet()
    optimizer = torch.optim.AdamW(network.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * (len(digits) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    for epoch in range(options.epochs):
        total = 0.0
        # the incomplete last batch is left out; its images differ between epochs
        order = torch.randperm(len(digits))[: steps // options.epochs * options.batch_size]
        for batch in order.reshape(-1, options.batch_size):
            loss = loss_of(network(shifted(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        if (epoch + 1) % LOG_EPOCHS == 0:
            sys.stderr.write(f"epoch {epoch + 1} of {options.epochs}: loss {total / len(order):.4f}\n")
    return network.eval()


def shifted(images: Tensor) -> Tensor:
    """Shift each image by -1, 0 or 1 pixel in both directions, filling with zeros."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    rows = torch.randint(0, 3, (count, 1)) + torch.arange(height)
    columns = torch.randint(0, 3, (count, 1)) + torch.arange(width)
    lines = padded[torch.arange(count)[:, None], 0, rows]
    return lines.gather(2, columns[:, None].expand(-1, height, -1))[:, None]


def accuracy(network: DigitsMobileNet, digits: Digits) -> float:
    """Return the share of `digits` that the network predicts correctly."""
    with torch.no_grad():
        named = network(torch.from_numpy(digits.images)).argmax(1).numpy()
    return float(np.mean(named == digits.labels))


def main(output: Path) -> None:
    """Train, measure on the held-out part, write."""
    training, held_out = load_digits()
    options = Training()
    network = train(training, options)
    percent = 100 * accuracy(network, held_out)
    metadata = {
        "data": "scikit-learn load_digits: 1797 images of 8x8 pixels",
        "preprocessing": f"grey values divided by {GREY_LEVELS:g}, float32 [N, 1, 8, 8]",
        "split": f"numpy.random.RandomState(split_seed).permutation(1797); the last {HELD_OUT_COUNT} are held out",
        "split_seed": str(SPLIT_SEED),
        "training_seed": str(options.seed),
        "held_out_accuracy_percent": f"{percent:.2f}",
        "made_by": "python -m quark.demo.train",
    }
    onnx.save(to_onnx(network, metadata), output)
    sys.stderr.write(f"{output}: {output.stat().st_size} bytes, {percent:.2f} % of {len(held_out)} held-out images\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else network_path())
