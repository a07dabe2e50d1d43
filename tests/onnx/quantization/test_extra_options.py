"""Every extra option is carried out, refused with a reason, or remarked on; nothing is ignored in silence."""

from __future__ import annotations

import re

import pytest

from quark.errors import InvalidValueError, QuarkError, UnknownNameError, UnsupportedOptionError, UnsupportedTypeError
from quark.onnx.quantization.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.option_kinds import BOOL
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.option_treatments import Refused, Remark, Steers
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import (
    QuantType,
)
from quark.onnx.settings import Settings

# The public surface: the documents' options, ours, and the common ones.
PUBLISHED = re.findall(
    r"\w+",
    """
    BlockPlacement PortableFunctions MXAttributes BFPAttributes FastFinetune AutoMixprecision ReplaceClip6Relu
    CLESteps CLEScaleAppendBias CLETotalLayerDiffThreshold SmoothAlpha BiasCorrection ActivationSymmetric
    WeightSymmetric WeightsSymmetric Int32Bias Int16Bias QuantizeBias Percentile ActivationScaled WeightScaled
    UseRandomData CalibDataSize CalibMovingAverage CalibMovingAverageConstant CalibTensorRangeSymmetric
    CalibOptimizeMem CalibWorkerNum MinMSEModePof2Scale WeightsOnly OpTypesToQuantize ExtraOpTypesToQuantize
    NodesToQuantize OpTypesToExcludeOutputQuantization DedicatedQDQPair QDQOpTypePerChannelSupportToAxis
    AddQDQPairToWeight ForceQuantizeNoInputCheck MatMulConstBOnly QuantizeAllOpTypes TensorQuantOverrides
    SimplifyModel FoldBatchNorm FoldRelu ConvertBNToConv ConvertReduceMeanToGlobalAvgPool ConvertSplitToSlice
    ConvertClipToRelu ConvertOpsetVersion SplitLargeKernelPool FuseInstanceNorm FuseL2Norm FuseGelu
    FuseLayerNorm RemoveQDQConvRelu RemoveQDQConvClip RemoveQDQConvLeakyRelu RemoveQDQConvPRelu
    RemoveQDQConvGelu RemoveQDQMulAdd RemoveQDQBetweenOps RemoveQDQInstanceNorm SimulateDPU
    ConvertLeakyReluToDPUVersion ConvertSigmoidToHardSigmoid ConvertHardSigmoidToDPUVersion
    ConvertAvgPoolToDPUVersion ConvertReduceMeanToDPUVersion ConvertSoftmaxToDPUVersion ConvertClipToDPUVersion
    NPULimitationCheck MaxLoopNum AdjustShiftCut AdjustShiftBias AdjustShiftRead AdjustShiftWrite
    AdjustHardSigmoid AdjustShiftSwish AlignConcat AlignPool AlignPad AlignSlice AlignTranspose AlignReshape
    AlignEltwiseQuantType AdjustBiasScale CopySharedInit CopyBiasInit RemoveInputInit FixShapes QuantizeFP16
    UseFP32Scale UseUnsignedReLU Int16Scale BF16WithClip BF16QDQToCast RefineBlockAxis EvalMetrics TmpDir
    PrintSummary CLEClip CLEBiasAbsorption CLEWeightThreshold BiasCorrectionInputs BiasCorrectionSamples
    """,
)


def settings(**options) -> Settings:
    return settings_of(QuantizationConfig(extra_options=options))


def mx_settings(**options) -> Settings:
    config = get_default_config("MXINT8")
    config.extra_options.update(options)
    return settings_of(config)


def test_every_published_option_has_a_row():
    assert set(PUBLISHED) <= set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_every_row_explains_itself(option):
    assert option.doc
    assert option.kind.expected


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelt_option_offers_the_right_one(name):
    with pytest.raises(UnknownNameError, match=f"no extra option '{name}_'.*{name}"):
        settings(**{name + "_": True})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_of_the_wrong_type_is_named(name):
    with pytest.raises(UnsupportedTypeError, match=rf"option '{name}': .* has type object, expected"):
        settings(**{name: object()})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"MXAttributes": {"element_dtpye": "int8"}}, "Did you mean element_dtype"),
        ({"MXAttributes": {"element_dtype": "int9"}}, "expected one of"),
        ({"MXAttributes": {"block_size": 0}}, "at least 1"),
        ({"MXAttributes": {"block_size": "32"}}, "has type str"),
    ],
)
def test_mistakes_in_block_attributes_are_named(option, message):
    with pytest.raises(QuarkError, match=message) as error:
        mx_settings(**option)
    assert "option 'MXAttributes'" in str(error.value)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        (
            {"FastFinetune": {"DataSise": 1}},
            UnknownNameError,
            "no key of option 'FastFinetune' 'DataSise'. Did you mean DataSize",
        ),
        ({"FastFinetune": {"DataSize": "1"}}, UnsupportedTypeError, "option 'FastFinetune.DataSize': '1' has type str"),
        ({"FastFinetune": {"OptimAlgorithm": "adam"}}, InvalidValueError, "expected one of adaround, adaquant"),
        ({"AutoMixprecision": {"OutputIdx": 1}}, UnknownNameError, "Did you mean OutputIndex"),
        ({"MatMulNBitsParams": {"Bits": 5}}, InvalidValueError, "option 'MatMulNBitsParams.Bits': 5 is not possible"),
        ({"TensorQuantOverrides": {"x": [{"quant_tipe": 1}]}}, UnknownNameError, "Did you mean quant_type"),
        ({"TensorQuantOverrides": {"x": {}}}, UnsupportedTypeError, "TensorQuantOverrides.x"),
        (
            {"TensorQuantOverrides": {"x": [{"scale": 1.0}]}},
            InvalidValueError,
            "give both scale and zero_point, or neither",
        ),
        ({"TensorQuantOverrides": {"x": [{"rmin": 1.0, "rmax": 0.0}]}}, InvalidValueError, "rmin 1 above rmax 0"),
        ({"TensorQuantOverrides": {"x": [{"convert": {}}]}}, InvalidValueError, "x.convert': expected a quant_type"),
        ({"UseGPTQ": True, "Compensation": False}, InvalidValueError, "'UseGPTQ' and 'Compensation' are the same"),
        (
            {"Percentile": 101},
            InvalidValueError,
            "option 'Percentile': 101 is not possible, expected a number above 50",
        ),
        ({"CalibDataSize": 0}, InvalidValueError, "an integer of at least 1"),
        ({"CLESteps": -2}, InvalidValueError, "an integer of at least -1"),
        ({"CLEWeightThreshold": -0.1}, InvalidValueError, "a number of at least 0"),
        ({"CLEClip": "drop"}, InvalidValueError, "expected one of per_channel, calibrated, skip"),
        ({"SmoothAlpha": 1.5}, InvalidValueError, "a number from 0 to 1, or 'auto'"),
        ({"SmoothAlpha": "best"}, InvalidValueError, "a number from 0 to 1, or 'auto'"),
        ({"SmoothAlpha": float("nan")}, InvalidValueError, "a number from 0 to 1"),
        ({"BiasCorrectionInputs": "prefix"}, InvalidValueError, "expected one of float, quantized"),
        ({"BiasCorrectionSamples": 0}, InvalidValueError, "an integer of at least 1"),
        ({"MaxLoopNum": -1}, InvalidValueError, "an integer of at least 0"),
        ({"CalibDataSize": True}, UnsupportedTypeError, "an integer of at least 1"),
        ({"BlockPlacement": "some"}, InvalidValueError, "expected one of compute, all"),
        ({"MinMSEModePof2Scale": "Most"}, InvalidValueError, "expected one of All, MostCommon"),
        ({"FixShapes": "x=1,2"}, InvalidValueError, "NAME:"),
        ({"ConvertOpsetVersion": 9}, InvalidValueError, "at least 13"),
        (
            {"WeightSymmetric": True, "WeightsSymmetric": False},
            InvalidValueError,
            "are the same, with different values",
        ),
    ],
)
def test_impossible_values_are_named(option, error, message):
    with pytest.raises(error) as caught:
        settings(**option)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS.values() if isinstance(o.treatment, Refused)], ids=lambda o: o.name
)
def test_what_is_refused_says_why_and_what_asks_for_nothing_is_fine(option):
    wanted, harmless = (True, False) if option.kind is BOOL else ("mean", "max")
    with pytest.raises(UnsupportedOptionError, match=f"option '{option.name}' = {wanted!r}: .{{20,}}"):
        settings(**{option.name: wanted})
    assert settings(**{option.name: harmless}) == settings_with_config_of(settings(), {option.name: harmless})


def settings_with_config_of(base: Settings, options: dict[str, object]) -> Settings:
    """base, as if those options had been given and meant nothing."""
    from dataclasses import replace

    config = {**base.config, "extra_options": options}
    return replace(base, config=config, name="custom")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CalibOptimizeMem", True),
        ("CalibWorkerNum", 4),
        ("TmpDir", "/tmp"),
        ("CalibOptimizeDisk", True),
        ("EncryptionAlgorithm", "AES-256"),
        ("SimplifyModelOptions", {"verbose": True}),
        ("LWPMetric", "mae"),
        ("LWPUseHistogram", False),
        ("MinMSEModeFloatScale", "All"),
        ("EvalDataReader", [{"x": 1}]),
        ("MaxLoopNum", 5),
        ("AdjustBiasScale", False),
        ("CLESteps", 2),
        ("CLEScaleAppendBias", True),
        ("CLETotalLayerDiffThreshold", 1e-7),
        ("CLEWeightThreshold", 0.1),
        ("CLEScaleUseThreshold", False),
        ("CLEClip", "skip"),
        ("CLEBiasAbsorption", True),
        ("SmoothAlpha", 0.5),
        ("GPTQParams", {"Bits": 4}),
        ("CompensationDamping", 0.1),
        ("CompensationActOrder", True),
        ("CompensationSamples", 8),
        ("DistillationSteps", 8),
        ("DistillationSamples", 32),
        ("DistillationBatch", 8),
        ("DistillationRate", 0.1),
        ("DistillationFeatures", 0.5),
        ("DistillationMixing", 0.1),
        ("DistillationUnrounded", 0.1),
        ("DistillationAugmentation", "none"),
        ("DistillationDevice", "cuda"),
        ("DistillationSeed", 1),
        ("DistillationFolder", "state"),
        ("AWQScales", False),
        ("AWQClip", False),
        ("AWQSamples", 8),
        ("RMatrixDim", 64),
        ("UseRandomHad", True),
        ("RConfigPath", "rotation.json"),
        ("R1", False),
        ("R2", False),
        ("R3", True),
        ("R4", True),
        ("RotationSize", 32),
        ("OnlineR1Rotation", True),
        ("BiasCorrectionInputs", "quantized"),
        ("BiasCorrectionSamples", 8),
        ("NPULimitationCheck", True),
        ("AdjustShiftCut", True),
        ("FastFinetune", {"DataSize": 10}),
        ("AutoMixprecision", {"OutputIndex": 0}),
        ("Percentile", 99.0),
        ("PercentileCandidates", [99.0]),
        ("MinMSEModePof2Scale", "All"),
        ("MXAttributes", {"element_dtype": "int8"}),
        ("BFPAttributes", {"bit_width": 16}),
        ("RefineBlockAxis", True),
        ("BF16WithClip", True),
        ("ActivationScaled", True),
        ("MatMulNBitsParams", {"Bits": 4}),
        ("CalibMovingAverageConstant", 0.1),
        ("MixedPrecisionTensor", {QuantType.QInt16: ["x"]}),
        ("NodesWithMixedPrecision", ["x"]),
    ],
)
def test_what_cannot_matter_is_remarked_on_and_changes_nothing(name, value):
    remarked = settings(**{name: value})
    assert len(remarked.remarks) == 1
    assert remarked.remarks[0].startswith(f"{name}: ")
    usual = settings()
    for step in ("choose", "load", "optimize", "equalize", "calibrate", "simulate", "refine", "insert", "save"):
        assert getattr(remarked, step) == getattr(usual, step)


def test_remarks_and_algorithm_settings_are_all_tested():
    """The list above and the refusals cover every row of those kinds."""
    rows = {o.name for o in OPTIONS.values() if isinstance(o.treatment, (Remark, Steers))}
    cases = next(
        m for m in test_what_cannot_matter_is_remarked_on_and_changes_nothing.pytestmark if m.name == "parametrize"
    )
    assert rows <= {name for name, _ in cases.args[1]}
