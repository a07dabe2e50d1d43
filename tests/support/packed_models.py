"""Small models with weights in block formats, as quantizing leaves them: rounded, and marked."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import ScaleRule
from quark.ops.onnx_nodes import CONSTANT_DOMAIN, block_attributes, define_constant_marks

# (shape, axis): whole blocks, a short last one, one block of the whole axis, axis not last, a kernel of one element
# for each channel, and a number of elements that fills no words
SHAPES = (((24, 64, 3, 3), 1), ((12, 72), 1), ((64, 16), 1), ((64, 24), 0), ((96, 1, 3, 3), 1), ((23, 31), 1))


def rounded(shape, axis, fmt, rule="floor", seed=0, dtype=np.float32):
    """Numbers of very different sizes in a block format."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(random.standard_normal(shape))
    scale = tensor_scale_of(fmt)
    return np.asarray(quantize_dequantize(x.astype(dtype), fmt, axis, scale_rule=rule, tensor_scale=scale))


def tensor_scale_of(fmt):
    """The tensor scale of all weights here, for formats that have one: some blocks saturate, and some vanish."""
    return float(np.float32(0.0037)) if get_format(fmt).has_tensor_scale else None


def mark(name, fmt, axis, output, rule="floor", domain=CONSTANT_DOMAIN):
    fmt = get_format(fmt)
    op_type, attributes = block_attributes(BlockQuantizer(fmt, ScaleRule(rule), nonfinite=fmt.default_nonfinite), axis)
    inputs = [name] if tensor_scale_of(fmt) is None else [name, f"{name}_{fmt}_scale"]
    return helper.make_node(op_type, inputs, [output], name=f"{name}_mark", domain=domain, **attributes)


def model_of(weights, nodes=(), opset=17, inputs=(), outputs=()):
    """A model whose output `y_NAME` is the marked weight NAME plus the input x; `weights` has name: (array, mark)."""
    body, results, constants = [], [], []
    for name, (array, node) in weights.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        constants.append(numpy_helper.from_array(array, name))
        scale = np.array(tensor_scale_of("nvfp4"), np.float32)
        constants += [numpy_helper.from_array(scale, each) for each in node.input[1:]]
        cast = helper.make_node("Cast", ["x"], [f"{name}_x"], to=kind)
        add = helper.make_node("Add", [node.output[0], f"{name}_x"], [f"y_{name}"])
        body += [node, cast, add]
        results.append(helper.make_tensor_value_info(f"y_{name}", kind, array.shape))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [])
    graph = helper.make_graph([*body, *nodes], "net", [x, *inputs], [*results, *outputs], constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONSTANT_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    define_constant_marks(model)
    return model


def marked_model(fmt, rule="floor", dtype=np.float32, opset=17, shapes=SHAPES):
    """Weights of all shapes in one format."""
    weights = {}
    for index, (shape, axis) in enumerate(shapes):
        name = f"w{index}"
        weights[name] = (rounded(shape, axis, fmt, rule, index, dtype), mark(name, fmt, axis, f"{name}_marked", rule))
    return model_of(weights, opset=opset)


def outputs_of(path, library=None, optimized=None):
    """What a session with no options set gives for x = -0, to which everything adds up to itself."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": np.array(-0.0, np.float32)}), strict=True))


def initializers(path):
    """Names, in their order, with type, shape and bytes."""
    tensors = onnx.load(path).graph.initializer
    return [(t.name, t.data_type, tuple(t.dims), numpy_helper.to_array(t).tobytes()) for t in tensors]
