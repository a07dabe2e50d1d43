"""Small networks from text, quantized by hand, as pairs and on codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.onnx.insert import InsertOptions, NodeStyle, insert
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice

MOVING = {
    *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Pad", "Resize"),
    *("Slice", "Split", "Gather", "Expand", "Tile", "MaxPool"),
}
EVERY_INPUT = {"Add", "Mul", "Concat", "MatMul"}
CLIPS = {"Relu", "Clip"}

CONV = "(float[2,8,9,9] x, float[16,8,3,3] w, float[16] b) => (float y) { y = Conv<pads=[1,1,1,1]>(x, w, b) }"
CONV_RELU = "(float[2,8,9,9] x, float[12,8,3,3] w, float[12] b) => (float y) { h = Conv(x, w, b)  y = Relu(h) }"
CONV_RELU6 = """(float[2,8,9,9] x, float[12,8,3,3] w, float[12] b) => (float y)
    <float low = {0.0}, float high = {6.0}> { h = Conv(x, w, b)  y = Clip(h, low, high) }"""
DEPTHWISE = "(float[2,8,9,9] x, float[8,1,3,3] w, float[8] b) => (float y) { h = Conv<group=8>(x, w, b)  y = Relu(h) }"
GEMM = "(float[4,8] x, float[6,8] w, float[6] b) => (float y) { y = Gemm<transB=1>(x, w, b) }"
MATMUL = "(float[2,5,8] x, float[8,6] w) => (float y) { y = MatMul(x, w) }"
RESIDUAL = """(float[1,3,16,16] x, float[8,3,3,3] w1, float[8] b1, float[8,8,3,3] w2, float[8] b2, float[8,1,3,3] w3,
    float[8] b3, float[10,16] w4, float[10] b4) => (float y) <int64[2] s = {1, -1}> {
        c1 = Conv<pads=[1,1,1,1]>(x, w1, b1)  r1 = Relu(c1)  p1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r1)
        c2 = Conv<pads=[1,1,1,1]>(p1, w2, b2)  a = Add(c2, p1)  r2 = Relu(a)
        c3 = Conv<pads=[1,1,1,1], group=8>(r2, w3, b3)  l = LeakyRelu(c3)
        j = Concat<axis=1>(r2, l)  g = GlobalAveragePool(j)  f = Reshape(g, s)  y = Gemm<transB=1>(f, w4, b4) }"""


@dataclass(frozen=True)
class Style:
    """How the tensors of a test are quantized."""

    activation: str = "uint8"
    weight: str = "int8"
    is_per_channel: bool = False
    is_symmetric: bool = False
    has_float_outputs: bool = False
    has_pairs_before_clips: bool = False

    def __str__(self) -> str:
        return f"{self.activation}-{self.weight}{'-channels' if self.is_per_channel else ''}"


U8U8, U8S8 = Style("uint8", "uint8"), Style("uint8", "int8")
U8S8_CHANNELS = replace(U8S8, is_per_channel=True)
S8S8 = Style("int8", "int8", is_symmetric=True)
S8S8_CHANNELS = replace(S8S8, is_per_channel=True)
STYLES = [U8U8, U8S8, U8S8_CHANNELS, S8S8, S8S8_CHANNELS]
TYPES = [U8S8, S8S8]


class Network:
    """A float network from text: its inputs are `x`, `x2` ..., all others become random constants."""

    def __init__(self, text: str, opset: int = 17) -> None:
        graph = onnx.parser.parse_graph(f"net {text}")
        generator = np.random.default_rng(7)
        for value in [each for each in graph.input if not each.name.startswith("x")]:
            array = self._random(value, generator) * np.float32(0.2)
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), value.name))
            graph.input.remove(value)
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")  # it is inferred
        for index, node in enumerate(graph.node):
            node.name = f"{node.op_type}_{index}"
        imports = [onnx.helper.make_opsetid("", opset)]
        self.proto = onnx.shape_inference.infer_shapes(
            onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)
        )
        self.constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        self.graph = self.proto.graph
        self.feeds = [{each.name: self._random(each, generator) for each in self.graph.input} for _ in range(3)]

    def _random(self, value: onnx.ValueInfoProto, generator: np.random.Generator) -> np.ndarray:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        return np.asarray(generator.standard_normal(shape) * 2, np.float32)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest number of every float tensor that is computed."""
        everything = onnx.ModelProto()
        everything.CopyFrom(self.proto)
        names = [name for node in self.graph.node for name in node.output if name]
        del everything.graph.output[:]
        everything.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        results = [dict(zip(names, run(everything, feed, True), strict=True)) | feed for feed in self.feeds]
        return {name: (min(r[name].min() for r in results), max(r[name].max() for r in results)) for name in results[0]}

    def plan(self, style: Style) -> QuantizationPlan:
        ranges = {name: affine(*bounds, style.activation, style.is_symmetric) for name, bounds in self.ranges().items()}
        for node in self.graph.node:
            if node.op_type in MOVING or (style.has_pairs_before_clips and node.op_type in CLIPS):
                ranges |= dict.fromkeys(node.output, ranges.get(node.input[0]))
        before_clips = {node.input[0] for node in self.graph.node if node.op_type in CLIPS}
        readers: dict[str, list[Reader]] = {}
        choices: dict[str, tuple[Role, AffineChoice]] = {}
        for node in self.graph.node:
            for index, name in enumerate(node.input):
                found = self._choice(node, index, ranges, style)
                is_skipped = name in before_clips and name not in self.feeds[0] and not style.has_pairs_before_clips
                if found is not None and not is_skipped:
                    choices[name] = found
                    readers.setdefault(name, []).append(Reader(node.name, index))
        for index, output in enumerate([] if style.has_float_outputs else self.graph.output):
            choices[output.name] = (Role.ACTIVATION, ranges[output.name])
            readers.setdefault(output.name, []).append(Reader("", index))
        return QuantizationPlan(
            tuple(TensorChoice(name, role, choice, tuple(readers[name])) for name, (role, choice) in choices.items())
        )

    def _choice(self, node, index, ranges, style) -> tuple[Role, AffineChoice] | None:
        name = node.input[index]
        array = self.constants.get(name)
        if index == 2 and node.op_type in ("Conv", "Gemm"):
            found = self._choice(node, 1, ranges, style)
            assert found is not None
            weight = found[1]
            scale = tuple(float(np.float32(ranges[node.input[0]].scale[0]) * np.float32(s)) for s in weight.scale)
            axis = 0 if len(scale) > 1 else None
            return Role.BIAS, AffineChoice("int32", scale, (0,) * len(scale), axis)
        if array is not None and index == 1 and node.op_type in {"Conv", "Gemm"} | EVERY_INPUT:
            axis = self._channels(node) if style.is_per_channel else None
            is_operand = node.op_type in ("Add", "Mul", "Concat")
            return Role.WEIGHT, weight_choice(array, style.activation if is_operand else style.weight, axis)
        is_data = index == 0 or node.op_type in EVERY_INPUT
        return (Role.ACTIVATION, ranges[name]) if is_data and name in ranges else None

    def _channels(self, node) -> int | None:
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        return {"Conv": 0, "Gemm": 0 if transposed else 1, "MatMul": 1}.get(node.op_type)

    def quantized(self, style: Style, form: NodeStyle, **options) -> ir.Model:
        model = ir.serde.deserialize_model(self.proto)
        insert(model, self.plan(style), InsertOptions(style=form, **options))
        return model


def affine(low: float, high: float, fmt: str, is_symmetric: bool) -> AffineChoice:
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    high = high if high > low else 1.0  # nothing but zeros
    lowest = -128 if fmt == "int8" else 0
    if is_symmetric:
        return AffineChoice(fmt, (float(np.float32(max(-low, high) / 127)),), (lowest + 128,))
    scale = float(np.float32((high - low) / 255))
    return AffineChoice(fmt, (scale,), (int(np.clip(round(lowest - low / scale), lowest, lowest + 255)),))


def weight_choice(array: np.ndarray, fmt: str, axis: int | None) -> AffineChoice:
    """Codes to 63 in size only: kernels for older processors saturate sums of two products."""
    others = None if axis is None else tuple(i for i in range(array.ndim) if i != axis)
    highest = np.abs(array).max(axis=others).ravel()
    scale = tuple(float(s) for s in np.float32(np.maximum(highest, 1e-6) / 63))
    return AffineChoice(fmt, scale, (0 if fmt == "int8" else 128,) * len(scale), axis)


def run(model: ir.Model | onnx.ModelProto, feed: dict[str, np.ndarray], has_optimizations: bool) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not has_optimizations:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = model if isinstance(model, onnx.ModelProto) else ir.serde.serialize_model(model)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feed)


def op_types(model: ir.Model) -> list[str]:
    """All but the pairs, sorted."""
    return sorted(node.op_type for node in model.graph if node.op_type not in ("QuantizeLinear", "DequantizeLinear"))


def with_plan(network: Network, plan: QuantizationPlan, form: NodeStyle, **options) -> ir.Model:
    model = ir.serde.deserialize_model(network.proto)
    insert(model, plan, InsertOptions(style=form, **options))
    return model


def check(
    network: Network, plan: QuantizationPlan, least_equal: float = 0.95, most_steps: int = 1, **options
) -> ir.Model:
    """That both forms compute the same up to a step of the output's scale, mostly exactly; the form on codes."""
    pairs = with_plan(network, plan, NodeStyle.QDQ, **options)
    codes = with_plan(network, plan, NodeStyle.QOPERATOR, **options)
    onnx.checker.check_model(ir.serde.serialize_model(codes))
    for feed in network.feeds:
        outputs = zip(network.graph.output, run(pairs, feed, False), run(codes, feed, True), strict=True)
        for output, expected, actual in outputs:
            choices = plan.of(output.name)
            step = np.abs(expected).max() / 2**16
            if choices:
                choice = choices[0].choice
                assert isinstance(choice, AffineChoice)
                step = choice.scale[0]
            steps = np.abs(actual - expected) / step
            assert steps.max() <= most_steps + 0.01
            assert (steps < 0.01).mean() >= least_equal
    return codes


def changed(plan: QuantizationPlan, tensor: str, **fields) -> QuantizationPlan:
    def change(each: TensorChoice) -> TensorChoice:
        return replace(each, choice=replace(each.choice, **fields)) if each.tensor == tensor else each

    return QuantizationPlan(tuple(change(tensor) for tensor in plan))
