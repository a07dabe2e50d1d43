"""A network of any size with its weights in a file beside it: convolutions, then products of both kinds.

    x [1, 1024, 4, 4] -> Conv 3x3, Relu ... -> mean over space -> Gemm, Relu, MatMul, Relu ... -> classes

The weights are random, as a layer's would be at its start, and written one by one: building needs the memory of one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

CHANNELS, WIDTH, CLASSES = 1024, 4096, 1000
CONV_SHARE = 0.2  # of the bytes, in convolutions
ALIGNMENT = 4096


@dataclass
class Builder:
    """Nodes and initializers so far; weights go to the stream at once."""

    stream: BinaryIO
    location: str
    generator: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def weight(self, name: str, *shape: int, fan_in: int) -> str:
        array = self.generator.standard_normal(shape, np.float32)
        array *= np.float32(math.sqrt(2 / fan_in))
        self.stream.write(b"\0" * (-self.stream.tell() % ALIGNMENT))
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, raw_data=b"")
        offset = self.stream.tell()
        onnx.external_data_helper.set_external_data(tensor, self.location, offset, array.nbytes)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        self.stream.write(array.data)
        self.initializers.append(tensor)
        return name

    def node(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def conv(self, x: str) -> str:
        name = f"conv{len(self.nodes)}"
        weight = self.weight(f"{name}.weight", CHANNELS, CHANNELS, 3, 3, fan_in=9 * CHANNELS)
        bias = self.weight(f"{name}.bias", CHANNELS, fan_in=CHANNELS)
        return self.node("Relu", [self.node("Conv", [x, weight, bias], kernel_shape=[3, 3], pads=[1, 1, 1, 1])])

    def gemm(self, x: str, inputs: int, outputs: int) -> str:
        name = f"gemm{len(self.nodes)}"
        weight = self.weight(f"{name}.weight", outputs, inputs, fan_in=inputs)
        return self.node("Gemm", [x, weight, self.weight(f"{name}.bias", outputs, fan_in=outputs)], transB=1)

    def matmul(self, x: str, inputs: int, outputs: int) -> str:
        name = f"matmul{len(self.nodes)}"
        return self.node("MatMul", [x, self.weight(f"{name}.weight", inputs, outputs, fan_in=inputs)])


def build_network(path: Path, size_bytes: int, seed: int = 0) -> list[Path]:
    """Write a model of at least that size, and of little more; the files that belong to it."""
    data = path.with_suffix(".data")
    with data.open("wb") as stream:
        builder = Builder(stream, data.name, np.random.default_rng(seed))
        output = _layers(builder, size_bytes)
    info = [("x", [1, CHANNELS, 4, 4]), (output, [1, CLASSES])]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)] for name, dims in info)
    graph = helper.make_graph(builder.nodes, path.stem, inputs, outputs, builder.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return [path, data]


def _layers(builder: Builder, size_bytes: int) -> str:
    x = "x"
    while builder.stream.tell() < CONV_SHARE * size_bytes:
        x = builder.conv(x)
    x = builder.node("Flatten", [builder.node("GlobalAveragePool", [x])])
    x = builder.node("Relu", [builder.gemm(x, CHANNELS, WIDTH)])
    for make in _alternating(builder, size_bytes):
        x = builder.node("Relu", [make(x, WIDTH, WIDTH)])
    return builder.gemm(x, WIDTH, CLASSES)


def _alternating(builder: Builder, size_bytes: int) -> Iterator[Callable[[str, int, int], str]]:
    while builder.stream.tell() < size_bytes:
        yield builder.gemm
        yield builder.matmul


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    arguments = parser.parse_args()
    build_network(arguments.path, round(arguments.gigabytes * 1e9))


if __name__ == "__main__":
    main()
