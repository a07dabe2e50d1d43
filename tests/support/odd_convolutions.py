"""Networks on images that a quantizer stumbles over: paddings, pools, sizes, weights that are no constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
from onnx_models import Net

EVEN = [1, 1, 1, 1]


def auto_pad(kind: str) -> onnx.ModelProto:
    """A convolution, a pool and a transposed convolution that say how to pad by a word."""
    net = Net()
    y = net.node("Relu", net.conv(net.input("x", (1, 3, 11, 10)), (3, 4), auto_pad=kind, strides=[2, 2]))
    y = net.node("MaxPool", y, kernel_shape=[2, 2], auto_pad=kind)
    return net.model(net.conv(y, (4, 2), op_type="ConvTranspose", auto_pad=kind, strides=[2, 2]))


def depthwise_multiplier() -> onnx.ModelProto:
    """Three outputs for every input channel, dilated, with strides that differ."""
    net = Net()
    y = net.conv(net.input("x", (2, 4, 12, 12)), (4, 12), group=4, dilations=[1, 2], strides=[2, 1], pads=[1, 0, 2, 1])
    return net.model(net.conv(net.node("Relu", y), (12, 5), 1))


def transposed_1d_3d() -> onnx.ModelProto:
    net = Net()
    flat = net.node("ConvTranspose", net.input("x", (1, 4, 6)), net.weight(4, 3, 3), net.weight(3), strides=[2])
    deep = net.node("ConvTranspose", net.input("v", (1, 2, 3, 3, 3)), net.weight(2, 3, 2, 2, 2), strides=[2] * 3)
    return net.model(net.node("Relu", flat), deep)


def transposed_output_shape() -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.input("x", (1, 3, 4, 4)), (3, 4), op_type="ConvTranspose", strides=[2, 2], output_shape=[8, 8])
    return net.model(net.node("Tanh", y))


def computed_weight() -> onnx.ModelProto:
    """Weights that are inputs, that come out of a Constant node, and that are computed from one."""
    net = Net()
    x = net.input("x", (1, 3, 6, 6))
    y = net.node("Conv", x, net.input("kernel", (4, 3, 3, 3)), net.weight(4), pads=EVEN)
    held = net.node(
        "Constant", value=onnx.numpy_helper.from_array(net.random.normal(size=(4, 4, 1, 1)).astype(np.float32))
    )
    y = net.node("Conv", net.node("Relu", y), held)
    scaled = net.node("Mul", net.weight(2, 4, 1, 1), net.node("ReduceMax", net.node("Abs", x), keepdims=0))
    return net.model(net.node("Conv", y, scaled))


def shared_kernel() -> onnx.ModelProto:
    """One kernel and one bias in two convolutions of different strides, and in a branch of its own."""
    net = Net()
    x, kernel, bias = net.input("x", (1, 4, 9, 9)), net.weight(4, 4, 3, 3), net.weight(4)
    near = net.node("Conv", x, kernel, bias, pads=EVEN)
    far = net.node("Conv", net.node("Relu", near), kernel, bias, strides=[2, 2])
    return net.model(far, net.node("Add", near, net.node("ReduceMean", kernel, axes=[0, 2, 3], keepdims=1)))


def residual_tower() -> onnx.ModelProto:
    """Shortcuts into shortcuts: one tensor is read by three additions."""
    net = Net()
    x = net.input("x", ("N", 4, 7, 7))
    y = x
    for _ in range(3):
        y = net.node("Relu", net.node("Add", net.batch_norm(net.conv(y, (4, 4), pads=EVEN), 4), x))
    joined = net.node("Concat", y, x, net.conv(y, (4, 2), 1), axis=1)
    return net.model(net.node("Gemm", net.node("Flatten", joined), net.weight(490, 3), net.weight(3)))


def pools() -> onnx.ModelProto:
    """Padded averages that count the padding and that do not, pools of ceiled size, a pool that also tells where."""
    net = Net()
    y = net.conv(net.input("x", (2, 3, 9, 9)), (3, 4), pads=EVEN)
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": EVEN}
    counted = net.node("AveragePool", y, count_include_pad=1, **window)
    parts = [counted, net.node("AveragePool", y, **window), net.node("MaxPool", y, ceil_mode=1, **window)]
    highest, where = net.nodes_of("MaxPool", y, outputs=["highest", "where"], **window)
    total = net.node("Sum", *parts, highest)
    several = net.node("LpPool", net.node("Relu", total), kernel_shape=[2, 2])
    proto = net.model(several, net.node("GlobalMaxPool", y), where)
    proto.graph.output[2].type.tensor_type.elem_type = onnx.TensorProto.INT64
    return proto


def normalizations() -> onnx.ModelProto:
    """A batch norm before the convolution and one that stands alone, instance and L2 norms."""
    net = Net()
    y = net.conv(net.batch_norm(net.input("x", (2, 4, 6, 6)), 4), (4, 4), pads=EVEN)
    y = net.batch_norm(net.node("LeakyRelu", y, alpha=0.2), 4)
    y = net.node("LpNormalization", net.node("InstanceNormalization", y, net.weight(4), net.weight(4)), axis=1)
    return net.model(net.conv(y, (4, 3), 1))


def group_norm() -> onnx.ModelProto:
    net = Net(21)
    y = net.conv(net.input("x", (2, 6, 5, 5)), (6, 6), pads=EVEN)
    y = net.node("GroupNormalization", y, net.weight(6), net.weight(6), num_groups=3)
    return net.model(net.conv(net.node("Relu", y), (6, 2), 1))


def upsample_opset_9() -> onnx.ModelProto:
    net = Net(9)
    y = net.node("Relu", net.conv(net.input("x", (1, 3, 5, 5)), (3, 4), pads=EVEN))
    return net.model(net.conv(net.node("Upsample", y, net.constant([1.0, 1.0, 2.0, 2.0]), mode="nearest"), (4, 2)))


def resize_to_sizes() -> onnx.ModelProto:
    """To sizes, down and up, aligned at corners and by half pixels; a size that comes from another tensor."""
    net = Net()
    x, like = net.input("x", (1, 3, 8, 8)), net.input("like", (1, 3, 11, 5))
    y = net.conv(x, (3, 3), pads=EVEN)
    linear = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    small = net.node("Resize", y, "", "", net.integers([1, 3, 5, 4]), **linear)
    follows = net.node("Resize", y, "", "", net.node("Shape", like), mode="nearest", nearest_mode="floor")
    return net.model(net.conv(small, (3, 2), 1), net.node("Add", follows, like))


def one_pixel() -> onnx.ModelProto:
    """One channel, one pixel, one output: every scale is that of a single number."""
    net = Net()
    y = net.node("Relu", net.conv(net.input("x", (1, 1, 1, 1)), (1, 1), 1))
    return net.model(net.node("GlobalAveragePool", net.conv(y, (1, 1), 1)))


def squeeze_and_excite() -> onnx.ModelProto:
    net = Net()
    y = net.node("HardSwish", net.conv(net.input("x", (1, 4, 8, 8)), (4, 8), pads=EVEN))
    gate = net.node("Relu", net.conv(net.node("GlobalAveragePool", y), (8, 2), 1))
    gate = net.node("HardSigmoid", net.conv(gate, (2, 8), 1), alpha=1 / 6, beta=0.5)
    swish = net.node("Mul", net.node("Mul", y, gate), net.node("Sigmoid", y))
    return net.model(net.conv(swish, (8, 3), 1))


def shuffled_channels() -> onnx.ModelProto:
    """Grouped convolutions with a shuffle between them, and slices with steps that are negative."""
    net = Net()
    y = net.conv(net.input("x", (1, 6, 4, 4)), (6, 6), 1, group=3)
    y = net.node("Transpose", net.node("Reshape", y, net.integers([1, 3, 2, 4, 4])), perm=[0, 2, 1, 3, 4])
    y = net.conv(net.node("Reshape", y, net.integers([0, -1, 4, 4])), (6, 6), 1, group=2)
    starts, ends, axes, steps = (net.integers([value]) for value in (-1, -100, 2, -2))
    return net.model(net.node("Slice", y, starts, ends, axes, steps))


_PLAIN: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(depthwise_multiplier, transposed_1d_3d, transposed_output_shape, computed_weight, shared_kernel, residual_tower),
    *(pools, normalizations, group_norm, upsample_opset_9, resize_to_sizes, one_pixel, squeeze_and_excite),
    shuffled_channels,
)
CONVOLUTIONS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **{make.__name__: make for make in _PLAIN},
    **{f"auto_pad {kind}": partial(auto_pad, kind) for kind in ("SAME_UPPER", "SAME_LOWER", "VALID")},
}
