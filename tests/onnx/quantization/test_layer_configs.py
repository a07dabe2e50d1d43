"""QConfig: specs, layers by name and type, exclusions."""

from __future__ import annotations

import pytest

from quark.decide.options import Target
from quark.decide.specs import AffineSpec, BlockSpec, FloatSpec
from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.onnx.quantization.config import QConfig, spec
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoMixprecisionConfig,
)
from quark.onnx.quantization.config.data_type import DATA_TYPES, Int8, UInt8, parse_data_type
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    MX9Spec,
    MXInt8Spec,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    UInt8Spec,
    XInt8Spec,
)
from quark.ranges import Entropy, MinMax, MinMSE, NonOverflow, Percentile, PowerOfTwoMinMSE

SPECS = [each for name, each in vars(spec).items() if name.endswith("Spec")]
INT8 = QLayerConfig(activation=Int8Spec(), weight=Int8Spec())


def test_there_is_a_spec_for_every_data_type():
    assert len(SPECS) == 24
    assert {cls().data_type.name for cls in SPECS} == set(DATA_TYPES)


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__name__)
def test_specs_have_the_defaults_of_their_type(cls):
    one = cls()
    # 4 bits and 8-bit floats have no long tails to cut off: every step counts
    is_cut = one.data_type.format in ("int8", "uint8", "int16", "uint16", "int32", "uint32")
    assert one.symmetric == (not one.data_type.format.startswith("u"))
    assert one.quant_granularity is QuantGranularity.Tensor
    if cls is XInt8Spec:
        assert (one.scale_type, one.calibration_method) == (ScaleType.PowerOf2, CalibMethod.MinMSE)
    else:
        assert one.scale_type is ScaleType.Float32
        assert one.calibration_method is (CalibMethod.Percentile if is_cut else CalibMethod.MinMax)


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__name__)
def test_specs_survive_dictionaries_and_become_settings(cls):
    assert QTensorConfig.from_dict(cls().to_dict()) == cls()
    settings = settings_of(QConfig(QLayerConfig(input_tensors=cls(), weight=cls())))
    assert settings.choose.default.activation.format == settings.choose.default.weight.format
    assert isinstance(settings.choose.default.weight, AffineSpec | BlockSpec | FloatSpec)
    assert settings.remarks == ()


def test_a_lone_data_type_is_its_usual_spec():
    assert QTensorConfig.from_dict({"data_type": "UInt8"}) == UInt8Spec()
    assert QTensorConfig.from_dict({"data_type": "MX9"}) == MX9Spec()


def test_specs_are_edited_in_place():
    one = Int8Spec()
    one.set_symmetric(False)
    one.set_calibration_method(CalibMethod.Entropy)
    one.set_scale_type(ScaleType.Float32)
    one.set_quant_granularity(QuantGranularity.Tensor)
    one.set_data_type(UInt8)
    expected = AffineSpec("uint8", Entropy(), is_symmetric=False)
    assert (
        settings_of(QConfig(QLayerConfig(input_tensors=one, weight=Int8Spec()))).choose.default.activation == expected
    )
    assert Int8Spec() != one


@pytest.mark.parametrize(
    ("method", "scale", "activation", "weight"),
    [
        (CalibMethod.Percentile, ScaleType.Float32, Percentile(), MinMax()),
        (CalibMethod.MinMax, ScaleType.Float32, MinMax(), MinMax()),
        (CalibMethod.MinMSE, ScaleType.Float32, MinMSE(), MinMSE()),
        (CalibMethod.Entropy, ScaleType.Float32, Entropy(), Entropy()),
        (CalibMethod.MinMax, ScaleType.PowerOf2, NonOverflow(), NonOverflow()),
        (CalibMethod.MinMSE, ScaleType.PowerOf2, PowerOfTwoMinMSE(), PowerOfTwoMinMSE()),
    ],
)
def test_methods(method, scale, activation, weight):
    one = Int8Spec(calibration_method=method, scale_type=scale)
    default = settings_of(QConfig(QLayerConfig(one, weight=one))).choose.default
    assert (default.activation.method, default.weight.method) == (activation, weight)


def test_power_of_two_specs_mean_the_npu_unless_told():
    layer = QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec())
    assert settings_of(QConfig(layer)).choose.target is Target.NPU_CNN
    assert settings_of(QConfig(layer)).choose.default.bias.format == "int8"
    assert settings_of(QConfig(layer, EnableNPUCnn=False)).choose.target is Target.ONNX_RUNTIME
    assert settings_of(QConfig(INT8)).choose.target is Target.ONNX_RUNTIME


def test_places_of_a_layer():
    layer = QLayerConfig(Int8Spec(), weight=Int8Spec(), bias=Int16Spec(), output_tensors=Int16Spec())
    default = settings_of(QConfig(layer)).choose.default
    assert default.bias == AffineSpec("int16")
    assert default.output == AffineSpec("int16", Percentile())
    layer = QLayerConfig(Int8Spec(), weight=Int8Spec(), bias=Int32Spec(), output_tensors=Int8Spec())
    default = settings_of(QConfig(layer)).choose.default
    assert default.bias == AffineSpec("int32")
    assert default.output is None


def test_weights_per_channel():
    weight = Int8Spec(quant_granularity=QuantGranularity.Channel)
    assert settings_of(QConfig(QLayerConfig(Int8Spec(), weight=weight))).choose.default.weight.is_per_channel


def test_layers_by_name_and_by_type():
    int16 = QLayerConfig(weight=Int16Spec())
    config = QConfig(INT8, {int16: ["a", "b.*"], None: ["c"]}, {int16: ["Gemm"], None: ["Softmax"]})
    choose = settings_of(config).choose
    expected = choose.by_node[0][1]
    assert expected.weight == AffineSpec("int16")
    assert expected.activation == choose.default.activation
    assert choose.by_node == (("a", expected), ("b.*", expected), ("c", None))
    assert choose.by_op_type == (("Gemm", expected), ("Softmax", None))


def test_layers_may_be_written_the_other_way_round():
    one = QLayerConfig(weight=Int16Spec())
    assert (
        settings_of(QConfig(INT8, {"a": one, "b": None})).choose
        == settings_of(QConfig(INT8, {one: ["a"], None: ["b"]})).choose
    )
    assert settings_of(QConfig(INT8, {one: "a"})).choose == settings_of(QConfig(INT8, {one: ["a"]})).choose


def test_equal_layer_configs_stay_two_entries():
    layers = {QLayerConfig(weight=Int16Spec()): ["a"], QLayerConfig(weight=Int16Spec()): ["b"]}
    assert [name for name, _ in settings_of(QConfig(INT8, layers)).choose.by_node] == ["a", "b"]


def test_exclusions():
    selection = settings_of(QConfig(INT8, exclude=["a", "b.*", (["c"], ["d"]), [(["e"], ["f"])]])).choose.selection
    assert selection.excluded_nodes == ("a", "b.*")
    assert selection.excluded_subgraphs == ((("c",), ("d",)), (("e",), ("f",)))


def test_block_specs_take_attributes_from_options():
    layer = QLayerConfig(MXInt8Spec(), weight=MXInt8Spec())
    assert settings_of(QConfig(layer)).choose.default.weight.quantizer.format.block_size == 32
    config = QConfig(layer, extra_options={"MXAttributes": {"block_size": 16}})
    assert settings_of(config).choose.default.weight.quantizer.format.block_size == 16


def test_options_by_keyword_and_by_dictionary_are_the_same():
    assert QConfig(INT8, CalibDataSize=3) == QConfig(INT8, extra_options={"CalibDataSize": 3})
    assert settings_of(QConfig(INT8, CalibDataSize=3)).calibrate.sample_limit == 3


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (QConfig(QLayerConfig(weight=Int8Spec())), InvalidValueError, "global_config"),
        (
            QConfig(QLayerConfig(Int8Spec(), Int16Spec(), Int8Spec())),
            InvalidValueError,
            "both input_tensors and activation",
        ),
        (QConfig(QLayerConfig(Int8Spec, weight=Int8Spec())), UnsupportedTypeError, "such as Int8Spec()"),
        (QConfig(INT8, {5: ["a"]}), UnsupportedTypeError, "expected {QLayerConfig or None: [names]}"),
        (QConfig(INT8, exclude=[5]), InvalidValueError, "exclude: 5"),
        (QConfig(INT8, CalibDataSise=3), UnknownNameError, "Did you mean CalibDataSize"),
        (
            QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec(quant_granularity=QuantGranularity.Group))),
            InvalidValueError,
            "goes with the size of a group",
        ),
        (
            QConfig(QLayerConfig(Int8Spec(quant_granularity=QuantGranularity.Channel), weight=Int8Spec())),
            InvalidValueError,
            "QuantGranularity.Channel for activations",
        ),
    ],
)
def test_mistakes_are_named(config, error, message):
    with pytest.raises(error) as caught:
        settings_of(config)
    assert message in str(caught.value)


def test_algorithms_keep_their_settings():
    assert AdaQuantConfig().num_iterations == 3000
    assert AdaRoundConfig().learning_rate == 0.1
    one = AutoMixprecisionConfig(INT8, data_size=5)
    again = AutoMixprecisionConfig.from_dict(one.to_dict())
    assert again.to_dict() == one.to_dict()
    with pytest.raises(InvalidValueError, match="'metric_evaluate_fn' is a function"):
        AutoMixprecisionConfig(INT8, metric_evaluate_fn=max).to_dict()


def test_data_types():
    assert parse_data_type("Int8") is Int8
    assert Int8() is Int8
    assert str(Int8) == "Int8"
    with pytest.raises(UnknownNameError, match="Did you mean MXInt8"):
        parse_data_type("MXInt9")
