"""TensorQuantOverrides: what is fixed for a tensor is what the file has, or it is said why not."""

from __future__ import annotations

import onnx
import pytest
from onnx_models import Net, random_feed

from quark.errors import InvalidValueError, UnknownNameError
from quark.onnx import ExtendedQuantType, QConfig, QuantType, get_default_config, quantize
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig
from quark.plan import AffineChoice, BlockChoice, FloatChoice

BFP, MX = ExtendedQuantType.QBFP, ExtendedQuantType.QMX
BF16, F16, S8 = ExtendedQuantType.QBFloat16, ExtendedQuantType.QFloat16, ExtendedQuantType.QInt8


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


@pytest.mark.parametrize("preset", ["S8S8_AAWS", "A8W8", "XINT8", "U8S8_AAWS"])
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


@pytest.mark.parametrize(("value", "scales"), [(None, 1), (True, 1), (False, 4)])
def test_a_weight_can_have_one_scale_among_others_with_channels(value, scales):
    config = get_default_config("S8S8_AAWS")
    config.per_channel = True
    config.extra_options["TensorQuantOverrides"] = {"w": [{"per_tensor": value}]}
    model = network()
    result = quantize(model, [random_feed(model, seed) for seed in range(4)], config)
    assert len(choice(result, "w").scale) == scales
    assert len(choice(result, "w2").scale) == 3


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
        ("w", {"axis": 0, "per_tensor": None}, "exclude each other"),
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


# ---------------------------------------------------------------- types that are not other integers
@pytest.mark.parametrize("preset", ["A8W8", "BF16", "MXINT8", "S8S8_AAWS"])
@pytest.mark.parametrize(
    ("tensor", "quant_type", "kind", "format"),
    [
        ("w", BFP, BlockChoice, "bfp16"),
        ("s", MX, BlockChoice, "mxint8"),
        ("c", MX, BlockChoice, "mxint8"),
        ("w2", F16, FloatChoice, "float16"),
        ("s", BF16, FloatChoice, "bfloat16"),
        ("s", S8, AffineChoice, "int8"),
    ],
)
def test_blocks_floats_and_integers_in_any_surroundings(preset, tensor, quant_type, kind, format):
    result = quantized(preset, {tensor: [{"quant_type": quant_type}]})
    found = choice(result, tensor)
    assert isinstance(found, kind)
    assert found.format == format
    assert not any("TensorQuantOverrides" in remark for remark in result.report.remarks)
    assert result.report.outputs[0].sqnr_db > 20


def test_attributes_say_which_blocks():
    config = get_default_config("A8W8")
    config.extra_options["TensorQuantOverrides"] = {"w": [{"quant_type": MX}], "s": [{"quant_type": BFP, "axis": 2}]}
    config.extra_options["MXAttributes"] = {"element_dtype": "fp4_e2m1", "block_size": 16}
    config.extra_options["BFPAttributes"] = {"bfp_method": "to_bfp", "bit_width": 13, "block_size": 4}
    model = network()
    result = quantize(model, [random_feed(model, seed) for seed in range(4)], config)
    assert (choice(result, "w").quantizer.format.name, choice(result, "w").quantizer.format.block_size) == (
        "mxfp4_e2m1",
        16,
    )
    assert (choice(result, "s").axis, choice(result, "s").quantizer.format.block_size) == (2, 4)
    assert not result.report.remarks


def test_types_to_tensors_is_the_same_the_other_way_round():
    model = network()
    data = [random_feed(model, seed) for seed in range(4)]
    config = get_default_config("A8W8")
    config.specific_tensor_precision = True
    config.extra_options["MixedPrecisionTensor"] = {MX: ["w", "s"], QuantType.QInt16: ["x"]}
    old = quantize(model, data, config)
    new = quantized(
        "A8W8", {"w": [{"quant_type": MX}], "s": [{"quant_type": MX}], "x": [{"quant_type": QuantType.QInt16}]}
    )
    assert old.plan == new.plan
    options = {"SpecificTensorPrecision": True, "MixedPrecisionTensor": {MX: ["w"]}}
    by_specs = QConfig(QLayerConfig(activation=Int8Spec(), weight=Int8Spec()), extra_options=options)
    assert isinstance(choice(quantize(model, data, by_specs), "w"), BlockChoice)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_type": MX, "symmetric": True}, "no range or zero point"),
        ({"quant_type": BF16, "scale": 0.5, "zero_point": 0}, "no range or zero point"),
        ({"quant_type": BF16, "axis": 1}, "has no axis"),
    ],
)
def test_blocks_and_floats_have_no_ranges(entry, message):
    with pytest.raises(InvalidValueError, match=f"TensorQuantOverrides.w.*{message}"):
        quantized("A8W8", {"w": [entry]})


# ---------------------------------------------------------------- two types for one tensor
def converted(**convert):
    """A network whose input goes to two convolutions; `second` reads it in another type."""
    net = Net()
    x = net.node("Sigmoid", net.input("x", (1, 4, 8, 8)), output="s", name="sigmoid")
    y = net.node("Conv", x, net.weight(4, 4, 1, 1, name="w"), output="a", name="first")
    z = net.node("Conv", x, net.weight(4, 4, 1, 1, name="w2"), output="b", name="second")
    model = net.model(net.node("Add", y, z, output="y", name="add"))
    config = get_default_config("A8W8")
    config.extra_options["TensorQuantOverrides"] = {"s": [{"convert": {"quant_type": QuantType.QInt16, **convert}}]}
    result = quantize(model, [random_feed(model, seed) for seed in range(4)], config)
    formats: dict[str, str] = {}
    for tensor in result.plan:
        if tensor.tensor == "s":
            formats |= {reader.node: tensor.choice.format for reader in tensor.readers}
    return formats, result


@pytest.mark.parametrize("names", [{"second"}, ["second"]])
def test_some_readers_see_a_tensor_converted(names):
    formats, result = converted(recv_nodes=names)
    assert formats == {"first": "int8", "second": "int16"}
    nodes = {each.output[0]: each for each in result.model.graph.node}
    reader = next(each for each in result.model.graph.node if each.name == "second")
    chain = []
    name = reader.input[0]
    while name in nodes and nodes[name].name != "sigmoid":
        chain.append(nodes[name].op_type)
        name = nodes[name].input[0]
    assert len([each for each in chain if each.endswith("QuantizeLinear")]) == 2  # int8 first, then int16


def test_without_names_all_readers_do():
    assert converted()[0] == {"first": "int16", "second": "int16"}


def test_names_of_receivers_are_checked():
    with pytest.raises(UnknownNameError, match="recv_nodes.*'secnd'"):
        converted(recv_nodes={"secnd"})
    with pytest.raises(InvalidValueError, match="convert': expected a quant_type"):
        quantized("A8W8", {"c": [{"convert": {}}]})
