"""Small networks that 8 bits break, each in one place, and data for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx_models import Net

PADS = [1, 1, 1, 1]


def detector() -> onnx.ModelProto:
    """Two convolutions and a head that joins coordinates up to 640 and scores up to 1 in one output."""
    net = Net()
    y = net.node("Relu", _conv(net, net.input("x", (1, 3, 8, 8)), (3, 32), name="first"), name="relu")
    y = net.node("Relu", _conv(net, y, (32, 32), name="second"), name="relu2")
    boxes, logits = _conv(net, y, (32, 4), name="boxes"), _conv(net, y, (32, 6), name="logits", bias=-5.0, gain=10.0)
    boxes = net.node("Mul", net.node("Sigmoid", boxes, name="sides"), net.constant(640.0), name="to_pixels")
    scores = net.node("Sigmoid", logits, name="scores")
    joined = net.node("Concat", boxes, scores, axis=1, name="joined")
    return net.model(net.node("Reshape", joined, net.integers([1, 10, 64]), name="rows", output="detections"))


def loud_channel(loudness: float = 500.0) -> onnx.ModelProto:
    """Five convolutions. One channel of what `sensitive` reads is that much larger than the others, and all of them
    count alike. `sensitive` has few of the multiply-accumulates, because it works on small maps."""
    net = Net()
    y = net.node("Relu", _conv(net, net.input("x", (1, 3, 16, 16)), (3, 16), name="first"), name="relu")
    y = net.node("Relu", _conv(net, y, (16, 16), name="second"), name="relu2")
    y = net.node("AveragePool", y, kernel_shape=[4, 4], strides=[4, 4], name="pool")
    wide, narrow = (net.random.standard_normal((16, 16, 1, 1)).astype(np.float32) / 4 for _ in range(2))
    wide[3] *= loudness
    narrow[:, 3] /= loudness
    y = net.node("Conv", y, net.constant(wide), name="wide")
    y = net.node("Conv", y, net.constant(narrow), name="sensitive")
    return net.model(net.node("Conv", y, net.weight(8, 16, 1, 1), name="last", output="map"))


def loud_detector() -> onnx.ModelProto:
    """A detector with a loud channel between `loud` and `e`. While these have 8 bits, ranges that clip are better; once
    they are in float, the whole range is."""
    net = Net()
    y = net.node("Relu", _conv(net, net.input("x", (1, 3, 8, 8)), (3, 32), name="first"), name="relu")
    y = net.node("Relu", _conv(net, y, (32, 32), name="second"), name="relu2")
    wide = net.random.standard_normal((16, 32, 1, 1)).astype(np.float32) / 32**0.5
    narrow = net.random.standard_normal((16, 16, 1, 1)).astype(np.float32) / 4
    wide[3] *= 500
    narrow[:, 3] /= 500
    y = net.node("Conv", net.node("Conv", y, net.constant(wide), name="loud"), net.constant(narrow), name="e")
    boxes, logits = _conv(net, y, (16, 4), name="boxes"), _conv(net, y, (16, 6), name="logits", bias=-4.0, gain=8.0)
    boxes = net.node("Mul", net.node("Sigmoid", boxes, name="sides"), net.constant(640.0), name="to_pixels")
    scores = net.node("Sigmoid", logits, name="scores")
    return net.model(net.node("Concat", boxes, scores, axis=1, name="joined", output="detections"))


def images(shape: tuple[int, ...], count: int = 24, seed: int = 5) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((1, *shape)).astype(np.float32)} for _ in range(count)]


def _conv(net: Net, x: str, channels: tuple[int, int], name: str, bias: float = 0.0, gain: float = 1.0) -> str:
    into, out = channels
    weight = gain * net.random.standard_normal((out, into, 3, 3)) / (into * 9) ** 0.5
    constants = (net.constant(array.astype(np.float32)) for array in (weight, np.full(out, bias)))
    return net.node("Conv", x, *constants, pads=PADS, name=name)
