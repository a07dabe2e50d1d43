"""Whatever the config, an option does something: it changes the settings, is refused, or is remarked on.

One value of an option may ask for what happens anyway. So two that differ are tried, and one of them has to be noticed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quark.errors import QuarkError
from quark.onnx.quantization.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.option_kinds import BOOL
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import CalibrationMethod, ExtendedCalibrationMethod, QuantType

TWO_VALUES = {
    "WeightScaleRule": ("mse", "floor"),
    "MXAttributes": ({"block_size": 16}, {"block_size": 64}),
    "WeightMXAttributes": ({"block_size": 16}, {"block_size": 64}),
    "NVFP4Attributes": ({"block_size": 32}, {"block_size": 64}),
    "TensorScale": ("calibrated", "dynamic"),
    "WeightGroupSize": (32, 64),
    "KeepFirstLast": ("mxfp8_e4m3", "int16"),
    "BFPAttributes": ({"block_size": 16}, {"block_size": 32}),
    "BlockPlacement": ("compute", "all"),
    "Percentile": (99.0, 98.0),
    "PercentileCandidates": ([99.0], [98.0]),
    "CalibMovingAverageConstant": (0.1, 0.2),
    "MinMSEModePof2Scale": ("All", "MostCommon"),
    "MinMSEMode": ("All", "Percentile"),
    "MinMSEModeFloatScale": ("Percentile", "All"),
    "LWPMetric": ("mae", "mse"),
    "RandomDataReaderInputShape": ({"x": [1]}, {"x": [2]}),
    "RandomDataReaderInputDataRange": ({"x": [0, 1]}, {"x": [0, 2]}),
    "SaveAndRestore": ("a.json", "b.json"),
    "TensorsRangeFile": ("a.json", "b.json"),
    "NumBins": (64, 128),
    "CalibPassthroughOpTypes": (["Reshape"], ["Slice"]),
    "PreprocessYAML": ("xint8", "a8w8"),
    "ShapeShifterYaml": ("xint8", "a8w8"),
    "PreprocessedModelPath": ("a.onnx", "b.onnx"),
    "SimplifyModelOptions": ({"verbose": True}, {"verbose": False}),
    "EvalDataReader": ([{"x": 1}], [{"x": 2}]),
    "UserCustomOpLibPath": ("a.so", "b.so"),
    "EncryptionAlgorithm": ("AES-256", None),
    "WeightCalibrateMethod": (CalibrationMethod.Entropy, ExtendedCalibrationMethod.MinMSE),
    "CalibDataSize": (3, 4),
    "CalibWorkerNum": (1, 2),
    "TmpDir": ("a", "b"),
    "CalibCacheDir": ("a", "b"),
    "OpTypesToQuantize": (["Conv"], ["Gemm"]),
    "ExtraOpTypesToQuantize": (["Erf"], ["Exp"]),
    "NodesToQuantize": (["a"], ["b"]),
    "InputNodes": (["a"], ["b"]),
    "OutputNodes": (["a"], ["b"]),
    "OpTypesToExclude": (["Conv"], ["Gemm"]),
    "OpTypesToExcludeOutputQuantization": (["Conv"], ["Gemm"]),
    "NodesToExcludeOutputQuantization": (["a"], ["b"]),
    "QuantizationPreference": ("accuracy", "speed"),
    "TensorQuantOverrides": ({"x": [{"symmetric": True}]}, {"y": [{"symmetric": True}]}),
    "MixedPrecisionTensor": ({QuantType.QInt16: ["x"]}, {QuantType.QInt16: ["y"]}),
    "NodesWithMixedPrecision": (["a"], ["b"]),
    "QDQOpTypePerChannelSupportToAxis": ({"MatMul": 0}, {"MatMul": 1}),
    "MatMulNBitsParams": ({"GroupSize": 32}, {"GroupSize": 64}),
    "RemoveQDQBetweenOps": ([("Mul", "Add")], [("Conv", "Tanh")]),
    "ConvertOpsetVersion": (17, 18),
    "FixShapes": ("x:[1]", "x:[2]"),
    "CopySharedInit": ([], ["Conv"]),
    "CopyBiasInit": ([], ["Conv"]),
    "FastFinetune": ({"NumIterations": 1}, {"NumIterations": 2}),
    "AutoMixprecision": (
        {"TargetQuantType": QuantType.QInt8, "OutputIndex": 1},
        {"TargetQuantType": QuantType.QInt8, "OutputIndex": 2},
    ),
    "CLESteps": (1, -1),
    "CLETotalLayerDiffThreshold": (1e-6, 1e-5),
    "CLEWeightThreshold": (0, 1.0),
    "CLEBalanceMethod": ("max", "mean"),
    "CLEClip": ("per_channel", "skip"),
    "SmoothAlpha": (0, "auto"),
    "GPTQParams": ({"PercDamp": 0.1}, {"PercDamp": 0.2}),
    "CompensationDamping": (0.1, 0.2),
    "CompensationSamples": (1, 2),
    "DistillationSteps": (1, 2),
    "DistillationSamples": (16, 32),
    "DistillationBatch": (1, 2),
    "DistillationRate": (0.1, 0.2),
    "DistillationFeatures": (0.2, 0.3),
    "DistillationMixing": (0.1, 0.2),
    "DistillationUnrounded": (0.1, 0.2),
    "DistillationAugmentation": ("images", "none"),
    "DistillationDevice": ("cuda", "cuda:1"),
    "DistillationSeed": (1, 2),
    "DistillationFolder": ("a", "b"),
    "AWQSamples": (1, 2),
    "RMatrixDim": (16, 32),
    "RConfigPath": ("a.json", "b.json"),
    "R2": (True, False),
    "RotationSize": (16, 32),
    "BiasCorrectionInputs": ("float", "quantized"),
    "BiasCorrectionSamples": (1, 2),
    "MaxLoopNum": (0, 3),
    "VerdictMemoryLimit": (1, 2),
    "Protect": ("auto", "none"),
    "ProtectBudget": (0.1, 0.2),
    "ExecutionProviders": (["A"], ["B"]),
    "InferDevice": ("cpu", "cuda:1"),
}


def with_algorithms(preset: str) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_cle = config.include_sq = True
    config.extra_options.update(BiasCorrection=True, Compensation=True)
    return config


def with_mixed_precision(preset: str) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_auto_mp = True
    config.extra_options["AutoMixprecision"] = {"ActTargetQuantType": QuantType.QInt8, "SQNRTarget": 20}
    return config


def with_finetuning(preset: str) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_fast_ft = True
    return config


CONFIGS = {
    "plain": QuantizationConfig(),
    **{name: get_default_config(name) for name in ("XINT8", "VINT8", "MXINT8", "BF16", "U8S8_AAWS", "MATMUL_NBITS")},
    "UINT8_DYNAMIC_QUANT": get_default_config("UINT8_DYNAMIC_QUANT"),
    "A16W8 with mixed precision": with_mixed_precision("A16W8"),
    "A8W8 with finetuning": with_finetuning("A8W8"),
    "MXINT8_ADAQUANT": get_default_config("MXINT8_ADAQUANT"),
    "XINT8 with algorithms": with_algorithms("XINT8"),
    "MXINT8 with algorithms": with_algorithms("MXINT8"),
}


def outcome(config: QuantizationConfig):
    """The settings without the record of what was asked for, or the error."""
    try:
        return replace(settings_of(config), config={}, name="")
    except QuarkError as error:
        return str(error)


@pytest.mark.parametrize("base", CONFIGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_one_of_two_values_is_noticed(name, base):
    config = CONFIGS[base]
    others = {key: value for key, value in config.extra_options.items() if key != name}
    values = (True, False) if OPTIONS[name].kind is BOOL else TWO_VALUES[name]
    without = outcome(replace(config, extra_options=others))
    assert any(outcome(replace(config, extra_options={**others, name: value})) != without for value in values)
