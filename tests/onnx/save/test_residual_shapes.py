"""Shapes that a file does not declare, so that ONNX Runtime keeps its faster kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from quark.onnx import get_default_config, quantize

WIDTH = 32
HEAD = f'<ir_version: 8, opset_import: ["": 17]> net (float[batch, length, {WIDTH}] x) => (float[a, b, c] y)'
BODY = """
    up = MatMul (x, w)
    sizes = Shape (x)
    first = Gather (sizes, zero)
    count = Unsqueeze (first, zeros)
    target = Concat <axis = 0> (count, rest)
    back = Reshape (up, target)
    down = MatMul (back, v)
    sum = Add (x, down)
"""


def network(ends: str) -> onnx.ModelProto:
    """A layer with a residual sum, and a Reshape as exporters write it."""
    model = parser.parse_model(f"{HEAD} {{{BODY}{ends}}}")
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in ("w", "v")}
    constants = {
        **weights,
        "gain": np.ones(WIDTH, np.float32),
        "zero": np.array(0),
        "zeros": np.array([0]),
        "rest": np.array([-1, WIDTH]),
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def free_shapes(model: onnx.ModelProto) -> set[str]:
    shapes = {info.name: info.type.tensor_type for info in model.graph.value_info}
    return {
        name
        for name, tensor in shapes.items()
        if tensor.HasField("shape") and any(not size.HasField("dim_value") for size in tensor.shape.dim)
    }


@pytest.mark.parametrize("preset", ["INT8_TRANSFORMER_DEFAULT", "INT4_WEIGHT_ONLY"])
def test_a_sum_and_its_normalization_stay_two_kernels(preset, tmp_path):
    config = get_default_config(preset)
    config.print_summary = False
    samples = [{"x": np.random.default_rng(1).normal(size=(1, 8, WIDTH)).astype(np.float32)}]
    made = quantize(network("y = LayerNormalization (sum, gain)"), samples, config).model
    assert not free_shapes(made)
    assert made.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kernels = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "LayerNormalization" in kernels
    assert "SkipLayerNormalization" not in kernels


def test_other_networks_keep_their_shapes():
    config = get_default_config("INT4_WEIGHT_ONLY")
    config.print_summary = False
    assert "down" in free_shapes(quantize(network("y = Relu (sum)"), None, config).model)
