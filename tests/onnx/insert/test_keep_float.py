"""A layer left in float is float in ONNX Runtime too, which quantizes float weights behind a single scale by itself."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session

RANDOM = np.random.default_rng(0)


def weight(name, *shape):
    """Channels of very different size: int8 with one scale would lose most of them."""
    sizes = np.logspace(-3, 0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return numpy_helper.from_array((RANDOM.standard_normal(shape) * sizes).astype(np.float32), name)


def chain(kind):
    """Three layers; the middle one is to stay in float."""
    middle, attributes, shape = {
        "conv": ("Conv", {}, (8, 8, 1, 1)),
        "grouped": ("Conv", {"group": 4}, (8, 2, 1, 1)),
        "transposed": ("ConvTranspose", {}, (8, 8, 1, 1)),
        "gemm": ("Gemm", {"transB": 1}, (8, 8)),
        "gemm_plain": ("Gemm", {}, (8, 8)),
    }[kind]
    outer, outer_shape = ("Gemm", (8, 8)) if middle == "Gemm" else ("Conv", (8, 8, 1, 1))
    nodes = [
        helper.make_node(outer, ["x", "w0"], ["a"], "first"),
        helper.make_node(middle, ["a", "w1", "b1"], ["b"], "middle", **attributes),
        helper.make_node(outer, ["b", "w2"], ["y"], "last"),
    ]
    size = ["n", 8] if middle == "Gemm" else ["n", 8, 4, 4]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, size)],
        [weight("w0", *outer_shape), weight("w1", *shape), weight("b1", 8), weight("w2", *outer_shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("preset", ["INT8_CNN_DEFAULT", "A8W8", "XINT8", "A16W8"])
@pytest.mark.parametrize("kind", ["conv", "grouped", "transposed", "gemm", "gemm_plain"])
def test_integer_kernels_leave_it_alone(kind, preset):
    model = chain(kind)
    data = RANDOM.standard_normal((8, 8) if "gemm" in kind else (8, 8, 4, 4)).astype(np.float32)
    config = get_default_config(preset)
    config.nodes_to_exclude = ["middle"]
    result = quantize(model, data, config).model
    node = next(each for each in result.graph.node if each.name == "middle")
    assert node.input[1] in {each.name for each in result.graph.initializer}

    def middle(has_integer_kernels):
        session = open_session(result, extra_outputs=[node.output[0]], has_integer_kernels=has_integer_kernels)
        return session.run([node.output[0]], {"x": data})[0]

    expected = middle(False)
    assert np.abs(middle(True) - expected).max() <= 1e-3 * np.abs(expected).max()
    small = expected.std(axis=tuple(i for i in range(expected.ndim) if i != 1)).argmin()
    assert expected[:, small].any()  # int8 with one scale would make this channel zero
