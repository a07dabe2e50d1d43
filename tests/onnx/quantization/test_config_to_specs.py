"""Types, methods and fields of a QuantizationConfig as specs, or as errors that name the culprit."""

from __future__ import annotations

import pytest

from quark.decide.specs import AffineSpec, FloatSpec
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.onnx import CLEConfig, Config, DistillationConfig, Int8Spec, QConfig, QLayerConfig
from quark.onnx.insert.pairs import NodeStyle
from quark.onnx.quantization.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.data_type import parse_data_type
from quark.onnx.quantization.config.options import settings_of, with_algorithms
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
    VitisQuantFormat,
    VitisQuantType,
)
from quark.onnx.settings import Settings
from quark.ranges import (
    Distribution,
    Entropy,
    LayerwisePercentile,
    MinMax,
    MinMSE,
    NonOverflow,
    Percentile,
    PowerOfTwoMinMSE,
)


def settings(**options) -> Settings:
    return settings_of(QuantizationConfig(extra_options=options))


def mx_settings(**options) -> Settings:
    config = get_default_config("MXINT8")
    config.extra_options.update(options)
    return settings_of(config)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        (CalibrationMethod.MinMax, {}, MinMax()),
        (CalibrationMethod.MinMax, {"CalibMovingAverage": True}, MinMax(0.01)),
        (CalibrationMethod.MinMax, {"CalibMovingAverage": True, "CalibMovingAverageConstant": 0.2}, MinMax(0.2)),
        (CalibrationMethod.Entropy, {}, Entropy()),
        (CalibrationMethod.Distribution, {}, Distribution()),
        (CalibrationMethod.Percentile, {"Percentile": 99.5}, Percentile(99.5)),
        (LayerWiseMethod.LayerWisePercentile, {"PercentileCandidates": [99, 99.9]}, LayerwisePercentile((99, 99.9))),
        (ExtendedCalibrationMethod.MinMSE, {}, MinMSE()),
    ],
)
def test_methods_with_float_scales(method, options, expected):
    spec = settings_of(QuantizationConfig(calibrate_method=method, extra_options=options)).choose.default
    assert spec.activation == AffineSpec("int8", expected, is_symmetric=False)
    assert spec.weight == AffineSpec("int8", MinMax())


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        (PowerOfTwoMethod.NonOverflow, {}, NonOverflow()),
        (PowerOfTwoMethod.MinMSE, {}, PowerOfTwoMinMSE()),
        (PowerOfTwoMethod.MinMSE, {"MinMSEModePof2Scale": "MostCommon"}, PowerOfTwoMinMSE(has_most_common=True)),
    ],
)
def test_methods_with_power_of_two_scales(method, options, expected):
    spec = settings_of(QuantizationConfig(calibrate_method=method, extra_options=options)).choose.default
    assert spec.activation == spec.weight == AffineSpec("int8", expected, is_power_of_two=True)
    assert spec.bias == AffineSpec("int32")


def test_power_of_two_scales_stay_symmetric_and_say_so():
    config = QuantizationConfig(calibrate_method=PowerOfTwoMethod.MinMSE, extra_options={"ActivationSymmetric": False})
    assert settings_of(config).choose.default.activation.is_symmetric
    assert settings_of(config).remarks == (
        "ActivationSymmetric: power-of-two scales always have their zero in the middle",
    )


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, AffineSpec("int32")),
        ({"Int32Bias": False}, AffineSpec("int8")),
        ({"Int16Bias": True}, AffineSpec("int16")),
        ({"Int16Bias": True, "Int16Scale": True}, AffineSpec("int16", has_int16_scale=True)),
        ({"QuantizeBias": False}, None),
    ],
)
def test_biases_of_integers(options, bias):
    assert settings(**options).choose.default.bias == bias


def test_biases_of_blocks_follow_placement():
    assert mx_settings().choose.default.bias is None
    spec = mx_settings(BlockPlacement="all").choose.default
    assert spec.bias == spec.weight
    assert mx_settings(BlockPlacement="all", QuantizeBias=False).choose.default.bias is None


def test_the_npu_has_biases_of_8_bits_unless_told():
    config = get_default_config("XINT8")
    assert settings_of(config).choose.default.bias.format == "int8"
    config.extra_options["Int32Bias"] = True
    assert settings_of(config).choose.default.bias == AffineSpec("int32")


def test_options_of_block_specs():
    assert not mx_settings(RefineBlockAxis=False).choose.default.weight.follows_reduction
    attributes = {"element_dtype": "fp4_e2m1", "axis": 2, "block_size": 16}
    spec = mx_settings(MXAttributes=attributes).choose.default.weight
    assert (spec.axis, spec.quantizer.format.block_size, spec.quantizer.scale_rule.value) == (2, 16, "floor")


def test_options_of_floats():
    config = get_default_config("BF16")
    config.extra_options.update(BF16WithClip=True, ActivationScaled=True)
    spec = settings_of(config).choose.default
    assert spec.activation == FloatSpec("bfloat16", is_saturating=True, is_scaled=True)
    assert spec.weight == FloatSpec("bfloat16", is_saturating=True)
    with pytest.raises(UnsupportedOptionError, match="blocks have scales of their own"):
        mx_settings(ActivationScaled=True)


@pytest.mark.parametrize("enum", [QuantType, ExtendedQuantType, VitisQuantType])
@pytest.mark.parametrize("name", ["QInt8", "QUInt8", "QInt16", "QUInt16"])
def test_a_type_means_the_same_in_every_enum(enum, name):
    spec = settings_of(QuantizationConfig(activation_type=enum[name], weight_type=enum[name])).choose.default
    assert spec.activation.format == spec.weight.format == name[1:].lower()
    assert spec.weight.is_symmetric == (not name.startswith("QU"))


@pytest.mark.parametrize("quant_format", [QuantFormat.QDQ, ExtendedQuantFormat.QDQ, VitisQuantFormat.QDQ])
def test_node_formats(quant_format):
    assert settings_of(QuantizationConfig(quant_format=quant_format)).insert.style is NodeStyle.QDQ


def test_operators_for_integers_only():
    assert settings_of(QuantizationConfig(quant_format=QuantFormat.QOperator)).insert.style is NodeStyle.QOPERATOR
    config = get_default_config("MXINT8")
    config.quant_format = ExtendedQuantFormat.QOperator
    with pytest.raises(InvalidValueError, match="integers only"):
        settings_of(config)


def test_formats_of_single_nodes_are_pairs_and_say_types():
    plain = settings_of(QuantizationConfig())
    assert settings_of(QuantizationConfig(quant_format=VitisQuantFormat.FixNeuron)).choose == plain.choose
    for fix_neuron, quant_type in ((VitisQuantFormat.BFPFixNeuron, "QBFP"), (VitisQuantFormat.MXFixNeuron, "QMX")):
        types = dict.fromkeys(("activation_type", "weight_type"), ExtendedQuantType[quant_type])
        assert (
            settings_of(QuantizationConfig(quant_format=fix_neuron)).choose
            == settings_of(QuantizationConfig(**types)).choose
        )
        (remark,) = settings_of(QuantizationConfig(quant_format=fix_neuron)).remarks
        assert remark.startswith(f"quant_format {fix_neuron.name}: ")
        assert quant_type in remark


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"include_rotation": True, "extra_options": {"RotationSize": 70000}}, InvalidValueError, "RotationSize = 7"),
        ({"include_auto_mp": True}, InvalidValueError, "AutoMixprecision with ActTargetQuantType"),
        ({"crypto_mode": True, "use_external_data_format": True}, InvalidValueError, "nothing is written to disk"),
        ({"calibrate_method": "MinMax"}, UnsupportedTypeError, "field 'calibrate_method': 'MinMax' has type str"),
        ({"weight_type": CalibrationMethod.MinMax}, UnsupportedTypeError, "like QuantType.QInt8"),
        (
            {"weight_type": QuantType.QFLOAT8E4M3FN, "extra_options": {"QuantizeBias": True}},
            InvalidValueError,
            "biases stay float",
        ),
        (
            {"activation_type": QuantType.QFLOAT8E4M3FN, "calibrate_method": CalibrationMethod.Entropy},
            InvalidValueError,
            "use MinMax or Percentile",
        ),
        ({"extra_options": {"WeightGroupSize": 24}}, InvalidValueError, "16, 32, 64, 128 or 256"),
        (
            {"weight_type": ExtendedQuantType.QInt16, "extra_options": {"WeightGroupSize": 32}},
            InvalidValueError,
            "int4, uint4, int8, uint8",
        ),
        ({"extra_options": {"KeepFirstLast": "mxfp4_e2m1"}}, InvalidValueError, "mxfp8_e4m3"),
        (
            {
                "activation_type": ExtendedQuantType.QMX,
                "weight_type": ExtendedQuantType.QMX,
                "extra_options": {
                    "MXAttributes": {"element_dtype": "fp4_e2m1"},
                    "KeepFirstLast": "int8",
                },
            },
            InvalidValueError,
            "use a type in blocks",
        ),
        ({"per_channel": 1}, UnsupportedTypeError, "field 'per_channel': 1 has type int, expected True or False"),
        ({"nodes_to_exclude": "conv"}, UnsupportedTypeError, "a list of strings"),
        ({"subgraphs_to_exclude": ["conv"]}, UnsupportedTypeError, "pairs of lists of names"),
        ({"extra_options": [1]}, UnsupportedTypeError, "field 'extra_options'"),
        ({"enable_npu_cnn": True, "enable_npu_transformer": True}, InvalidValueError, "exclude each other"),
        ({"calibrate_method": PowerOfTwoMethod.MinMSE, "per_channel": True}, InvalidValueError, "per_channel"),
        ({"calibrate_method": PowerOfTwoMethod.MinMSE, "reduce_range": True}, InvalidValueError, "reduce_range"),
        ({"use_dynamic_quant": True, "weight_type": QuantType.QInt16}, InvalidValueError, "use_dynamic_quant"),
    ],
)
def test_fields_that_cannot_be(fields, error, message):
    with pytest.raises(error) as caught:
        settings_of(QuantizationConfig(**fields))
    assert message in str(caught.value)


def test_fields_reach_the_settings():
    settings = settings_of(
        QuantizationConfig(
            per_channel=True,
            reduce_range=True,
            nodes_to_exclude=["a.*"],
            subgraphs_to_exclude=[(["a"], ["b"])],
            op_types_to_quantize=["Conv"],
            use_external_data_format=True,
            convert_fp16_to_fp32=True,
            print_summary=False,
        )
    )
    assert settings.choose.default.weight == AffineSpec("int8", is_per_channel=True, has_reduced_range=True)
    assert settings.choose.selection.excluded_nodes == ("a.*",)
    assert settings.choose.selection.excluded_subgraphs == ((("a",), ("b",)),)
    assert settings.choose.selection.op_types == frozenset({"Conv"})
    assert settings.save.has_external_data
    assert settings.load.has_fp16_converted
    assert not settings.has_summary
    assert settings.name == "custom"


def test_fields_that_cannot_matter_are_remarked_on():
    config = get_default_config("MXINT8")
    config.per_channel, config.debug_mode = True, True
    assert [remark.split(":")[0] for remark in settings_of(config).remarks] == ["debug_mode", "per_channel"]


def test_pairs_on_weights_without_integer_weights_are_remarked_on():
    config = get_default_config("MXINT8")
    config.extra_options["AddQDQPairToWeight"] = True
    assert [remark.split(":")[0] for remark in settings_of(config).remarks] == ["AddQDQPairToWeight"]
    assert settings_of(get_default_config("A8W8")).remarks == ()


def test_the_config_is_not_changed():
    config = get_default_config("A16W8")
    settings_of(config)
    assert config == get_default_config("A16W8")


def test_what_is_no_config_is_refused():
    with pytest.raises(UnsupportedTypeError, match="expected a Config"):
        settings_of(5)


def test_where_things_are_kept_meanwhile_is_not_in_the_file():
    here, there = (get_default_config("XINT8_ADAROUND") for _ in range(2))
    there.extra_options |= {"CalibCacheDir": "ranges", "TmpDir": "scratch"}
    there.extra_options["FastFinetune"] = {**there.extra_options["FastFinetune"], "CacheDir": "layers"}
    assert settings_of(there).config == settings_of(here).config
    here, there = (get_default_config("XINT8_DISTILL") for _ in range(2))
    there.extra_options["DistillationFolder"] = "states"
    assert settings_of(there).features["distillation"].folder == "states"
    assert settings_of(there).config == settings_of(here).config
    layer = QLayerConfig(activation=Int8Spec(), weight=Int8Spec())
    first, second = (QConfig(layer, algo_config=[DistillationConfig(folder=value)]) for value in ("", "states"))
    assert settings_of(first).config == settings_of(second).config


def test_algorithms_can_be_given_beside_a_config() -> None:
    run = QuantizationConfig(extra_options={"CLESteps": 3})
    found = with_algorithms(Config(run), [CLEConfig(cle_steps=3)])
    listed = QuantizationConfig(include_cle=True, extra_options={"CLESteps": 3})
    assert found.equalize == settings_of(listed).equalize
    assert found.equalize != settings_of(run).equalize
    assert not run.include_cle
    with pytest.raises(InvalidValueError, match="list them in its algo_config"):
        with_algorithms(QConfig(QLayerConfig(weight=Int8Spec())), [CLEConfig()])


@pytest.mark.parametrize(
    ("name", "bits", "least", "most"),
    [("Int8", 8, -128, 127), ("UInt16", 16, 0, 65535), ("MXFP8E4M3", 8, -448.0, 448.0), ("MXFP4E2M1", 4, -6.0, 6.0)],
)
def test_a_data_type_says_its_bits_and_its_range(name: str, bits: int, least: float, most: float) -> None:
    """As the classes of AMD Quark do."""
    found = parse_data_type(name)
    assert (found.__name__, found.bitwidth, found.min_value, found.max_value) == (name, bits, least, most)
    assert (parse_data_type("MX6").bitwidth, parse_data_type("BFP16").bitwidth) == (13, 16)
    with pytest.raises(AttributeError, match="that of its block"):
        _ = parse_data_type("MX6").max_value
