"""Every operator that a quantizer knows, at the opset that is asked for: three networks between them.

`newest` gives the last opset that both the installed onnx and the installed ONNX Runtime know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import onnx
import onnxruntime
from onnx_models import Net

SINCE = {"HardSwish": 14, "LayerNormalization": 17, "Mish": 18, "Gelu": 20, "GroupNormalization": 21}
REMOVED = {"Upsample": 10}
WITHOUT_KERNEL = {"Swish"}  # ONNX Runtime 1.31 knows the operator of opset 24 and cannot run it
_REFUSED = (
    onnxruntime.capi.onnxruntime_pybind11_state.Fail,
    onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
)


@cache
def newest() -> int:
    """The last opset in which the runtime loads a Relu."""
    for opset in range(onnx.defs.onnx_opset_version(), 12, -1):
        net = Net(opset)
        model = net.model(net.node("Relu", net.input("x", (1,))))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        except _REFUSED:
            continue
        return opset
    raise AssertionError("ONNX Runtime loads no opset from 13 on")


def has(opset: int, op_type: str) -> bool:
    return SINCE.get(op_type, 1) <= opset < REMOVED.get(op_type, 1000)


def on_images(opset: int) -> onnx.ModelProto:
    """Convolutions and what stands between them: pools, activations, sizes, normalizations."""
    net = Net(opset)
    y = net.batch_norm(net.conv(net.input("x", (1, 4, 12, 12)), (4, 8), pads=[1] * 4), 8)
    y = net.node("PRelu", net.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2]), net.weight(8, 1, 1))
    y = net.node("LeakyRelu", net.conv(y, (8, 8), op_type="ConvTranspose"), alpha=0.1)
    y = net.node("SpaceToDepth", net.node("DepthToSpace", y, blocksize=2), blocksize=2)
    y = net.node("Clip", net.conv(y, (8, 4), 1), net.constant(0.0), net.constant(6.0))
    y = net.node("Pad", y, net.integers([0, 0, 1, 1, 0, 0, 1, 1]))
    y = net.node("Resize", y, "", net.constant([1.0, 1.0, 2.0, 2.0]), mode="linear")
    y = net.node("InstanceNormalization", y, net.weight(4), net.weight(4))
    if has(opset, "GroupNormalization"):
        y = net.node("GroupNormalization", y, net.weight(4), net.weight(4), num_groups=2)
    y = net.node("AveragePool", net.node("HardSigmoid", y), kernel_shape=[2, 2])
    if has(opset, "HardSwish"):
        y = net.node("HardSwish", net.conv(y, (4, 4), 1))
    high, mean = net.node("GlobalMaxPool", y), net.node("GlobalAveragePool", y)
    y = net.node("Flatten", net.node("Concat", high, mean, axis=1))
    return net.model(net.node("Gemm", y, net.weight(8, 3), net.weight(3)))


def on_vectors(opset: int) -> onnx.ModelProto:
    """Products and what stands between them: arithmetic, activations, reductions."""
    net = Net(opset)
    x = net.input("x", (2, 5, 8))
    y = net.node("MatMul", x, net.weight(8, 8))
    curves = ("Sigmoid", "Tanh", "Elu", "Softplus", "Erf", "Relu", "Mish", "Gelu")
    for op_type in (curve for curve in curves if has(opset, curve)):
        y = net.node("MatMul", net.node(op_type, y), net.weight(8, 8))
    if has(opset, "LayerNormalization"):
        y = net.node("LayerNormalization", y, net.weight(8), net.weight(8))
    y = net.node("LpNormalization", y, axis=-1, p=2)
    y = net.node("Sub", net.node("Mul", net.node("Add", y, x), net.weight(8)), x)
    y = net.node("Div", y, net.node("Add", net.node("Mul", x, x), net.constant(1.0)))
    y = net.node("Mean", net.node("Max", y, x), net.node("Min", y, x), net.node("Sum", y, x, y))
    y = net.node("Softmax", net.node("MatMul", y, net.weight(8, 8)))
    parts = [net.reduce(op_type, y, [1]) for op_type in ("ReduceMean", "ReduceMax", "ReduceSum")]
    return net.model(net.node("MatMul", net.node("Concat", *parts, axis=1), net.weight(8, 3)))


def on_shapes(opset: int) -> onnx.ModelProto:
    """Everything that moves values between two products."""
    net = Net(opset)
    y = net.node("MatMul", net.input("x", (2, 6, 8)), net.weight(8, 8))
    y = net.node("Transpose", net.node("Reshape", y, net.integers([2, 6, 2, 4])), perm=[0, 2, 1, 3])
    y = net.node("Slice", y, *(net.integers([value]) for value in (1, 5, 2)))
    y = net.node("Gather", y, net.integers([2, 0, 1]), axis=2)
    y = net.node("Unsqueeze", net.node("Squeeze", net.node("Gather", y, net.integers([1]), axis=1), net.integers([1])),
                 net.integers([0]))  # fmt: skip
    size = {"num_outputs": 2} if opset >= 18 else {}
    first, second = net.nodes_of("Split", y, outputs=["first", "second"], axis=3, **size)
    y = net.node("Concat", net.node("Tile", first, net.integers([1, 1, 1, 2])),
                 net.node("Expand", second, net.integers([1, 2, 3, 2])), axis=3)  # fmt: skip
    y = net.node("Pad", net.node("Flatten", y, axis=2), net.integers([0, 1, 0, 1]))
    return net.model(net.node("Gemm", y, net.weight(20, 3), net.weight(3)))


def operators_at(opset: int) -> Mapping[str, Callable[[], onnx.ModelProto]]:
    makers = {"images": on_images, "vectors": on_vectors, "shapes": on_shapes}
    return {f"operators of {kind} {opset}": partial(make, opset) for kind, make in makers.items()}


OPSETS = (13, 17, 21, newest())
OPERATOR_NETWORKS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    name: make for opset in dict.fromkeys(OPSETS) for name, make in operators_at(opset).items()
}
