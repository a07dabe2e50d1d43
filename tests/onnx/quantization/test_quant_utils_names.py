"""Names of `quark.onnx.quantization.quant_utils` that scripts for AMD Quark import."""

from __future__ import annotations

import types

import numpy as np
import onnx
import pytest
from onnx_models import Net, conv_bn_relu, run_model

from quark.errors import ModelError, UnsupportedTypeError
from quark.onnx.quantization.quant_utils import (
    COP_BFP_OP_NAME,
    COP_DEQUANT_OP_NAME,
    COP_DOMAIN,
    COP_IN_OP_NAME,
    COP_MX_OP_NAME,
    COP_QUANT_OP_NAME,
    convert_fp16_scale_to_fp32,
    get_opset_version,
    is_version_below,
    pos2scale,
    scale2pos,
)


def test_names_of_operators():
    assert (COP_DOMAIN, COP_MX_OP_NAME) == ("com.amd.quark", "MXQuantizeDequantize")
    assert (COP_QUANT_OP_NAME, COP_DEQUANT_OP_NAME) == ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear")
    assert (COP_BFP_OP_NAME, COP_IN_OP_NAME) == ("BFPQuantizeDequantize", "ExtendedInstanceNormalization")
    assert (scale2pos(0.25), pos2scale(2)) == (2, 0.25)


def test_versions_are_compared_as_numbers():
    package = types.ModuleType("package")
    vars(package)["__version__"] = "1.9.2+cpu"
    assert is_version_below(package, "1.10")
    assert not is_version_below(package, "1.9.2")
    with pytest.raises(UnsupportedTypeError, match="an imported module"):
        is_version_below("onnx", "1.0")


def test_the_opset_is_that_of_the_standard_operators():
    model = conv_bn_relu(18)
    model.opset_import.insert(0, onnx.helper.make_opsetid("com.example", 3))
    assert get_opset_version(model) == 18
    with pytest.raises(ModelError, match="opset_import"):
        get_opset_version(onnx.ModelProto())


def test_a_float16_model_becomes_float32_but_for_excluded_nodes(tmp_path):
    net = Net(dtype=np.float16)
    x = net.node("Relu", net.input("x", (1, 4)), name="first")
    model = net.model(net.node("Abs", x, name="second", output="y"))
    onnx.save(model, tmp_path / "half.onnx")
    whole = convert_fp16_scale_to_fp32(str(tmp_path / "half.onnx"))
    assert {each.type.tensor_type.elem_type for each in (*whole.graph.input, *whole.graph.output)} == {1}
    part = convert_fp16_scale_to_fp32(model, nodes_to_exclude=["second"])
    assert [node.op_type for node in part.graph.node] == ["Relu", "Cast", "Abs", "Cast"]
    feed = {"x": np.array([[-1, 2, 0.5, -3]], np.float32)}
    np.testing.assert_array_equal(run_model(part, feed)["y"], run_model(whole, feed)["y"])
