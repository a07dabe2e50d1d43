"""TensorQuantOverrides: what is fixed for a tensor is what the file has, or it is said why not."""

from __future__ import annotations

import onnx
import pytest
from onnx_models import Net, random_feed

from quark.errors import InvalidValueError, UnknownNameError
from quark.onnx import QuantType, get_default_config, quantize


def network():
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = net.node("Conv", x, net.weight(4, 4, 3, 3, name="w"), net.weight(4, name="b"), output="c", name="conv")
    y = net.node("Sigmoid", y, output="s", name="sigmoid")
    return net.model(net.node("Conv", y, net.weight(3, 4, 1, 1, name="w2"), output="y", name="conv2"))


def quantized(preset, overrides):
    config = get_default_config(preset)
    config.extra_options["TensorQuantOverrides"] = overrides
    model = network()
    return quantize(model, [random_feed(model, seed) for seed in range(4)], config)


def choice(result, tensor):
    (found,) = {each.choice for each in result.plan if each.tensor == tensor}
    return found


@pytest.mark.parametrize("preset", ["S8S8_AAWS", "A8W8", "XINT8", "INT8_TRANSFORMER_DEFAULT"])
def test_scale_and_zero_point_are_what_the_file_has(preset):
    result = quantized(preset, {"c": [{"scale": 0.125, "zero_point": 3}], "w": [{"scale": 0.5, "zero_point": 0}]})
    assert (choice(result, "c").scale, choice(result, "c").zero_point) == ((0.125,), (3,))
    assert choice(result, "w").scale == (0.5,)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    assert stored["c_scale"] == 0.125
    assert stored["c_zero_point"] == 3


@pytest.mark.parametrize(("preset", "scale"), [("A8W8", 1 / 127), ("XINT8", 2.0**-6)])
def test_a_range_decides_the_scale(preset, scale):
    result = quantized(preset, {"c": [{"rmin": -1.0, "rmax": 1.0}]})
    assert choice(result, "c").scale == pytest.approx((scale,), rel=1e-6)


@pytest.mark.parametrize(("preset", "largest"), [("A8W8", 2**-10), ("XINT8", 2**-10)])
def test_another_type_is_calibrated_for(preset, largest):
    found = choice(quantized(preset, {"c": [{"quant_type": QuantType.QInt16}]}), "c")
    assert found.format == "int16"
    assert found.scale[0] <= largest


def test_a_weight_can_have_channels():
    assert len(choice(quantized("S8S8_AAWS", {"w": [{"axis": 0}]}), "w").scale) == 4


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "MXINT8"])
def test_a_tensor_that_is_not_there_is_an_error(preset):
    with pytest.raises(UnknownNameError, match="TensorQuantOverrides.*'nonsense'"):
        quantized(preset, {"nonsense": [{"scale": 0.5, "zero_point": 0}]})


@pytest.mark.parametrize(
    ("tensor", "entry", "message"),
    [
        ("c", {"scale": 0.5, "zero_point": 1000}, "zero point"),
        ("c", {"scale": 0.0, "zero_point": 0}, "scale"),
        ("c", {"scale": float("nan"), "zero_point": 0}, "scale"),
        ("c", {"axis": 1}, "one scale"),
        ("w", {"axis": 9}, "axis 9"),
        ("w", {"scale": [0.5, 0.5], "zero_point": [0, 0]}, "expected . of each"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tensor, entry, message):
    with pytest.raises(InvalidValueError, match=f"{tensor}.*{message}"):
        quantized("S8S8_AAWS", {tensor: [entry]})


@pytest.mark.parametrize(("preset", "tensor"), [("MXINT8", "w"), ("BF16", "c"), ("S8S8_AAWS", "b")])
def test_an_override_without_effect_is_remarked_on(preset, tensor):
    remarks = quantized(preset, {tensor: [{"scale": 0.5, "zero_point": 0}]}).report.remarks
    assert any("TensorQuantOverrides" in remark and f"'{tensor}'" in remark for remark in remarks)
