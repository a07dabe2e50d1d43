"""Models and images small enough for tests of the commands: two classes, dark and bright."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

SIZE = 16
DARK, BRIGHT = 60, 190


def brightness_model(batch="N", size=SIZE, classes=2):
    """A convolution, a pooling and a Gemm that tell bright images from dark ones."""
    rng = np.random.default_rng(0)
    # every channel sees the mean of the pixels and a little else
    kernel = np.full((4, 3, 3, 3), 1 / 27) + rng.normal(0, 0.01, (4, 3, 3, 3))
    weight = np.zeros((classes, 4))
    weight[0], weight[1] = -1, 1
    constants = {"kernel": kernel, "bias": np.full(4, 3.0), "weight": weight, "offset": np.linspace(12, -12, classes)}
    nodes = [
        helper.make_node("Conv", ["input", "kernel", "bias"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "weight", "offset"], ["logits"], name="gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "brightness",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, classes])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def save_brightness_model(path, **options):
    onnx.save(brightness_model(**options), path)
    return path


def image(level, seed=0, size=40):
    """An image of about that brightness."""
    pixels = np.clip(np.random.default_rng(seed).normal(level, 20, (size, size + 8, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def save_images(folder, count=6):
    """Class folders `a_dark` and `b_bright` with `count` images each."""
    for name, level in (("a_dark", DARK), ("b_bright", BRIGHT)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image(level, number).save(folder / name / f"{number:03d}.png")
    return folder
