"""Small float models for tests, built node by node, and the runtime's answer to them.

net = Net(opset=17)
x = net.input("x", (1, 3, 8, 8))
y = net.conv(x, 4, name="conv")
model = net.model(net.node("Relu", y))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Shape = Sequence[int | str | None]
OPSETS = (13, 17, 21)
IR_VERSION = 8
HALF = np.dtype(np.float16)


class Net:
    """A graph that grows; every method returns the name of a value. Weights are random and differ from each other."""

    def __init__(self, opset: int = 17, seed: int = 0, dtype: Any = np.float32) -> None:
        self.opset = opset
        self.dtype = np.dtype(dtype)
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.domains: dict[str, int] = {}

    def input(self, name: str, shape: Shape, dtype: Any = None) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def constant(self, array: Any, name: str | None = None) -> str:
        """An initializer: an array as it is, or a number or list in the type of the net."""
        array = array if isinstance(array, np.ndarray) else np.array(array, self.dtype)
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, numbers: Sequence[int]) -> str:
        return self.constant(np.array(numbers, np.int64))

    def weight(self, *shape: int, name: str | None = None) -> str:
        return self.constant((self.random.standard_normal(shape) / 2).astype(self.dtype), name)

    def node(
        self, op_type: str, *inputs: str, name: str | None = None, output: str | None = None, **attributes: Any
    ) -> str:
        return self.nodes_of(op_type, *inputs, name=name, outputs=[output] if output else None, **attributes)[0]

    def nodes_of(
        self,
        op_type: str,
        *inputs: str,
        name: str | None = None,
        outputs: Sequence[str] | None = None,
        **attributes: Any,
    ) -> list[str]:
        label = name or f"{op_type.lower()}{len(self.nodes)}"
        made = list(outputs or [f"{label}_out"])
        domain = attributes.pop("domain", "")
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=label, domain=domain, **attributes))
        return made

    def conv(
        self,
        x: str,
        channels: tuple[int, int],
        kernel: int = 3,
        *,
        has_bias: bool = True,
        group: int = 1,
        op_type: str = "Conv",
        **attributes: Any,
    ) -> str:
        into, out = channels
        shape = (out, into // group) if op_type == "Conv" else (into, out // group)
        inputs = [x, self.weight(*shape, kernel, kernel)] + ([self.weight(out)] if has_bias else [])
        return self.node(op_type, *inputs, group=group, **attributes)

    def batch_norm(self, x: str, channels: int, **attributes: Any) -> str:
        variance = self.constant(self.random.uniform(0.2, 2.0, channels).astype(self.dtype))
        gamma, beta, mean = (self.weight(channels) for _ in range(3))
        return self.node("BatchNormalization", x, gamma, beta, mean, variance, **attributes)

    def reduce(self, op_type: str, x: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """A reduction: its axes are an attribute before opset 18 (13 for ReduceSum)."""
        if self.opset >= 18 or op_type == "ReduceSum":
            return self.node(op_type, x, self.integers(axes), keepdims=keepdims)
        return self.node(op_type, x, axes=list(axes), keepdims=keepdims)

    def normalized(self, x: str, axes: Sequence[int], epsilon: float = 1e-5) -> str:
        """A normalization, taken apart as exporters do."""
        centred = self.node("Sub", x, self.reduce("ReduceMean", x, axes))
        variance = self.reduce("ReduceMean", self.node("Pow", centred, self.constant(2.0)), axes)
        return self.node("Div", centred, self.node("Sqrt", self.node("Add", variance, self.constant(epsilon))))

    def model(self, *outputs: str, output_shape: Shape | None = None) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(name, self._type_of(name), output_shape) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, infos, self.initializers)
        opsets = [helper.make_opsetid(domain, version) for domain, version in {"": self.opset, **self.domains}.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def _type_of(self, name: str) -> int:
        declared = {info.name: info.type.tensor_type.elem_type for info in self.inputs}
        return int(declared.get(name, helper.np_dtype_to_tensor_dtype(self.dtype)))


def conv_bn_relu(opset: int = 17, dtype: Any = np.float32, *, batch: int | str = 2) -> onnx.ModelProto:
    """Two convolutions with batch norms, the second depthwise and without a bias."""
    net = Net(opset, dtype=dtype)
    x = net.input("x", (batch, 3, 8, 8))
    y = net.node("Relu", net.batch_norm(net.conv(x, (3, 4), pads=[1, 1, 1, 1]), 4))
    y = net.conv(y, (4, 4), group=4, has_bias=False)
    return net.model(net.node("Clip", net.batch_norm(y, 4), net.constant(0.0), net.constant(6.0), output="y"))


def residual(opset: int = 17) -> onnx.ModelProto:
    """A block with a shortcut, global pooling and a classifier."""
    net = Net(opset)
    x = net.input("x", ("N", 4, 8, 8))
    y = net.batch_norm(net.conv(x, (4, 4), pads=[1, 1, 1, 1]), 4)
    y = net.reduce("ReduceMean", net.node("Relu", net.node("Add", y, x)), [2, 3], keepdims=0)
    return net.model(net.node("Gemm", y, net.weight(5, 4), net.weight(5), transB=1, output="y"))


def transformer_block(opset: int = 17, width: int = 8) -> onnx.ModelProto:
    """Attention of one head and a feed-forward part, with norms and Gelu taken apart."""
    net = Net(opset)
    x = net.input("x", (2, 5, width))
    y = _layer_norm(net, x, width)
    q, k, v = (net.node("MatMul", y, net.weight(width, width)) for _ in range(3))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]))
    mixed = net.node("MatMul", net.node("Softmax", net.node("Mul", scores, net.constant(0.35)), axis=-1), v)
    x = net.node("Add", x, mixed)
    hidden = net.node("Add", net.node("MatMul", _layer_norm(net, x, width), net.weight(width, 16)), net.weight(16))
    y = net.node("MatMul", gelu_erf(net, hidden), net.weight(16, width))
    return net.model(net.node("Add", x, y, output="y"))


def gelu_erf(net: Net, x: str) -> str:
    """0.5 * x * (1 + erf(x / sqrt(2))), taken apart."""
    plus_one = net.node("Add", net.node("Erf", net.node("Div", x, net.constant(2**0.5))), net.constant(1.0))
    return net.node("Mul", net.node("Mul", x, plus_one), net.constant(0.5))


def _layer_norm(net: Net, x: str, width: int) -> str:
    return net.node("Add", net.node("Mul", net.normalized(x, [-1]), net.weight(width)), net.weight(width))


def with_if(opset: int = 17) -> onnx.ModelProto:
    """A convolution whose result both branches of an If read from outside."""
    net = Net(opset)
    x = net.input("x", (1, 2, 4, 4))
    flag = net.input("flag", (), dtype=np.bool_)
    y = net.conv(x, (2, 2), 1)
    branches = {}
    for key, op_type in (("then_branch", "Relu"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{key}_out", TensorProto.FLOAT, None)
        inner = helper.make_node(op_type, [y], [out.name], name=f"{key}_inner")
        branches[key] = helper.make_graph([inner], key, [], [out])
    return net.model(net.node("If", flag, name="choice", output="y", **branches))


def random_feed(model: onnx.ModelProto, seed: int = 1) -> dict[str, Array]:
    """Values for every input that is no initializer; a symbolic size becomes 2."""
    random = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for info in model.graph.input:
        if info.name in constants:
            continue
        kind = info.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feed[info.name] = np.asarray(random.standard_normal(shape) * 2).astype(dtype)
    return feed


def run_model(model: onnx.ModelProto, feed: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name, from ONNX Runtime without its own rewrites."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))
