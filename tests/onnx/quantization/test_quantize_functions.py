"""`quantize_static` and `quantize_dynamic` do what ModelQuantizer does with the same fields."""

from __future__ import annotations

import inspect

import onnx
import pytest
from onnx_models import conv_bn_relu, random_feed, transformer_block

from quark.errors import InvalidValueError
from quark.onnx import (
    CalibrationMethod,
    ModelQuantizer,
    QuantFormat,
    QuantizationConfig,
    QuantType,
    quantize_dynamic,
    quantize_static,
)


@pytest.fixture(scope="module")
def model():
    return conv_bn_relu()


@pytest.fixture(scope="module")
def data(model):
    return [random_feed(model, seed) for seed in range(3)]


def test_static_with_positions_of_amd_quark(model, data):
    result = quantize_static(
        *(model, None, data, None, QuantFormat.QDQ, CalibrationMethod.Entropy, [], []),
        *(["Conv"], [], True, False, QuantType.QUInt8),
        include_cle=False,
        print_summary=False,
    )
    config = QuantizationConfig(
        calibrate_method=CalibrationMethod.Entropy,
        op_types_to_quantize=["Conv"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        print_summary=False,
    )
    assert result == ModelQuantizer(config).quantize_model(model, None, data)


def test_static_equalizes_unless_told_otherwise(model, data, tmp_path):
    assert quantize_static(model, tmp_path / "out.onnx", data, print_summary=False) is None
    config = QuantizationConfig(include_cle=True, print_summary=False)
    assert onnx.load(tmp_path / "out.onnx") == ModelQuantizer(config).quantize_model(model, None, data)


def test_enable_dpu_is_enable_npu_cnn(model, data):
    of_dpu, of_npu = (
        quantize_static(model, None, data, print_summary=False, **{name: True}, extra_options={"CalibDataSize": 2})
        for name in ("enable_dpu", "enable_npu_cnn")
    )
    assert of_dpu == of_npu


def test_static_needs_data_or_the_option(model):
    with pytest.raises(InvalidValueError, match="UseRandomData"):
        quantize_static(model)
    assert quantize_static(model, print_summary=False, extra_options={"UseRandomData": True}) is not None


def test_a_reader_comes_before_a_path(model, data, tmp_path, caplog):
    first = quantize_static(model, None, data, tmp_path / "unused", print_summary=False)
    assert first == quantize_static(model, None, data, print_summary=False)
    assert "calibration_data_path is not used" in caplog.text


def test_dynamic(tmp_path):
    model = transformer_block()
    result = quantize_dynamic(model, None, ["MatMul"], True, False, QuantType.QUInt8)
    config = QuantizationConfig(
        use_dynamic_quant=True, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QUInt8
    )
    assert result == ModelQuantizer(config).quantize_model(model)
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= {node.op_type for node in result.graph.node}
    assert quantize_dynamic(model, tmp_path / "out.onnx") is None
    assert (tmp_path / "out.onnx").is_file()


def test_every_argument_but_three_is_a_field():
    fields = set(QuantizationConfig.__dataclass_fields__)
    own = {"model_input", "model_output"}
    assert set(inspect.signature(quantize_dynamic).parameters) - fields == own
    others = {"calibration_data_reader", "calibration_data_path", "enable_dpu"}
    assert set(inspect.signature(quantize_static).parameters) - fields == own | others
