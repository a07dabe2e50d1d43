"""Extra options that are carried out reach the typed options of their step."""

from __future__ import annotations

import numpy as np
import pytest

from quark.decide.options import BlockPlacement, Target, TensorOverride
from quark.decide.specs import AffineSpec, GroupRule
from quark.onnx.insert.pairs import NBitsOptions
from quark.onnx.optimize import FOR_NPUS, FUSIONS, REWRITE_OF_OPTION, REWRITES
from quark.onnx.quantization.config import QuantizationConfig
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import (
    QuantType,
)
from quark.onnx.settings import Settings


def settings(**options) -> Settings:
    return settings_of(QuantizationConfig(extra_options=options))


@pytest.mark.parametrize(
    ("option", "step", "field", "expected"),
    [
        ({"CalibDataSize": 12}, "calibrate", "sample_limit", 12),
        ({"UseRandomData": True}, "calibrate", "has_random_data", True),
        ({"CalibTensorRangeSymmetric": True}, "calibrate", "has_symmetric_ranges", True),
        ({"ExecutionProviders": ["X"]}, "calibrate", "providers", ("X",)),
        ({"WeightsOnly": True}, "choose", "is_weights_only", True),
        ({"BlockPlacement": "all"}, "choose", "block_placement", BlockPlacement.ALL),
        ({"UseUnsignedReLU": True}, "choose", "has_unsigned_relu", True),
        ({"AlignEltwiseQuantType": True}, "choose", "has_activation_constants", True),
        ({"ForceQuantizeNoInputCheck": True}, "choose", "has_forced_movers", True),
        ({"OpTypesToExcludeOutputQuantization": ["Conv"]}, "choose", "op_types_with_float_output", {"Conv"}),
        ({"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1}}, "choose", "channel_axes", (("MatMul", 1),)),
        ({"QDQOpTypePerChannelSupportToAxis": {"MatMul": {"axis": 0}}}, "choose", "channel_axes", (("MatMul", 0),)),
        ({"RemoveQDQMulAdd": True}, "choose", "unquantized_between", (("Mul", "Add"),)),
        ({"RemoveQDQBetweenOps": [("Conv", "Tanh")]}, "choose", "unquantized_between", (("Conv", "Tanh"),)),
        ({"QuantizeBias": False}, "choose", "has_quantized_bias", False),
        ({"AddQDQPairToWeight": True}, "insert", "has_pairs_on_weights", True),
        ({"DedicatedQDQPair": True}, "insert", "has_dedicated_pairs", True),
        ({"FoldRelu": True}, "insert", "has_folded_relu", True),
        ({"BF16QDQToCast": True}, "insert", "has_casts", True),
        ({"ConvertOpsetVersion": 17}, "load", "opset", 17),
        ({"FixShapes": "x:[1,3]; y:[2]"}, "load", "fixed_shapes", (("x", (1, 3)), ("y", (2,)))),
        ({"FixShapes": "[1,3]"}, "load", "fixed_shapes", (("", (1, 3)),)),
        ({"RemoveInputInit": False}, "load", "has_initializers_as_inputs", True),
        ({"ConvertFP16ToFP32": True}, "load", "has_fp16_converted", True),
        ({"QuantizeFP16": True}, "load", "is_fp16_kept", True),
        ({"PortableFunctions": False}, "save", "has_portable_functions", False),
    ],
)
def test_options_reach_their_field(option, step, field, expected):
    assert getattr(getattr(settings(**option), step), field) == expected
    assert getattr(getattr(settings(), step), field) != expected


@pytest.mark.parametrize(
    ("option", "field", "expected"),
    [
        ({"OpTypesToQuantize": ["Conv"]}, "op_types", {"Conv"}),
        ({"ExtraOpTypesToQuantize": ["Erf"]}, "extra_op_types", {"Erf"}),
        ({"NodesToQuantize": ["a"]}, "nodes", ("a",)),
        ({"InputNodes": ["a"]}, "input_nodes", ("a",)),
        ({"OutputNodes": ["b"]}, "output_nodes", ("b",)),
        ({"QuantizeAllOpTypes": True}, "has_all_op_types", True),
        ({"MatMulConstBOnly": True}, "needs_constant_matmul_operand", True),
    ],
)
def test_options_reach_the_selection(option, field, expected):
    assert getattr(settings(**option).choose.selection, field) == expected


@pytest.mark.parametrize(
    ("name", "op_type", "field"),
    [
        ("AlignConcat", "Concat", "aligned"),
        ("AlignPool", "AveragePool", "aligned"),
        ("AlignPad", "Pad", "aligned"),
        ("AlignSlice", "Slice", "aligned"),
        ("AlignTranspose", "Transpose", "aligned"),
        ("AlignReshape", "Reshape", "aligned"),
        ("RemoveQDQConvRelu", "Relu", "fused_activations"),
        ("RemoveQDQConvClip", "Clip", "fused_activations"),
        ("RemoveQDQConvLeakyRelu", "LeakyRelu", "fused_activations"),
        ("RemoveQDQConvPRelu", "PRelu", "fused_activations"),
        ("RemoveQDQConvGelu", "Gelu", "fused_activations"),
    ],
)
def test_switches_of_operator_types(name, op_type, field):
    assert op_type in getattr(settings(**{name: True}).choose, field)
    assert op_type not in getattr(settings(**{name: False}).choose, field)


def test_a_field_and_its_option_are_the_same():
    assert not settings(PrintSummary=False).has_summary
    assert settings(EnableNPUCnn=True).choose.target is Target.NPU_CNN
    assert settings(EnableNPUTransformer=True).choose.target is Target.NPU_TRANSFORMER
    assert settings(CryptoMode=True).save.is_in_memory


REWRITE_OPTIONS = [name for name in OPTIONS if name in REWRITE_OF_OPTION and not name.startswith("Copy")]


@pytest.mark.parametrize("name", REWRITE_OPTIONS)
def test_rewrites_are_switched(name):
    rewrite = REWRITE_OF_OPTION[name]
    assert rewrite in settings(**{name: True}).optimize.enabled
    assert rewrite in settings(**{name: False}).optimize.disabled


@pytest.mark.parametrize("off", [{"SimplifyModel": False, "OptimizeModel": False}, {"OptimizeModel": False}])
def test_without_optimizing_only_fusions_and_what_is_asked_for_run(off):
    optimize = settings(**off, FoldBatchNorm=True, FuseGelu=False).optimize
    usual = {rewrite.name for rewrite in REWRITES if rewrite.is_default}
    assert optimize.disabled == usual - {"fold_batch_norm", *FUSIONS} | {"fuse_gelu"}
    assert optimize.enabled == {"fold_batch_norm"}


def test_either_of_two_options_asks_for_rewrites():
    assert not settings().optimize.disabled
    assert not settings(OptimizeModel=False, SimplifyModel=True).optimize.disabled
    found = settings(SimplifyModel=False)
    assert not found.optimize.disabled
    assert found.remarks == ("SimplifyModel: optimize_model is True and asks for the same rewrites; set both to False",)


@pytest.mark.parametrize("field", ["EnableNPUCnn", "EnableNPUTransformer"])
def test_npus_get_rewrites_of_their_own(field):
    assert settings(**{field: True}).optimize.enabled == FOR_NPUS == {"split_to_slice", "split_large_kernel_pool"}
    assert settings(**{field: True, "ConvertSplitToSlice": False}).optimize.enabled == {"split_large_kernel_pool"}
    assert not settings(**{field: True, "SkipPreprocess": True}).optimize.enabled


def test_a_clip_becomes_a_relu_after_calibration_if_asked_for():
    assert settings(ConvertClipToRelu=True).simulate.substitutions == {"bounded_clip_to_relu"}
    assert not settings(ConvertClipToRelu=False).simulate.substitutions


def test_copies_of_constants():
    assert settings(CopySharedInit=[]).optimize.enabled == {"copy_shared_init"}
    assert settings(CopyBiasInit=["Conv"]).optimize.bias_init_op_types == ("Conv",)
    assert settings(CopyBiasInit=None).optimize == settings().optimize


def test_overrides_of_tensors():
    overrides = {
        "x": [{"quant_type": QuantType.QUInt8, "symmetric": False, "rmin": -1.0, "rmax": 2.0}],
        "y": [{"scale": np.float32(0.5), "zero_point": np.uint8(3)}],
        "w": [{"axis": 0, "scale": 0.5, "zero_point": 0}, {"scale": 0.25, "zero_point": 1}],
    }
    assert settings(TensorQuantOverrides=overrides).choose.overrides == (
        TensorOverride("x", "uint8", False, (-1.0, 2.0)),
        TensorOverride("y", scale=(0.5,), zero_point=(3,)),
        TensorOverride("w", scale=(0.5, 0.25), zero_point=(0, 1), axis=0),
    )


def test_types_of_tensors_by_name():
    config = QuantizationConfig(
        specific_tensor_precision=True, extra_options={"MixedPrecisionTensor": {QuantType.QInt16: ["a", "b"]}}
    )
    assert settings_of(config).choose.overrides == (TensorOverride("a", "int16"), TensorOverride("b", "int16"))


def test_matmul_nbits():
    params = {"GroupSize": 32, "Symmetric": False, "Bits": 8, "AccuracyLevel": 4}
    nbits = settings(UseMatMulNBits=True, MatMulNBitsParams=params)
    assert nbits.insert.matmul_nbits == NBitsOptions(8, 32, False, 4)
    rule = GroupRule.SEARCHED
    assert nbits.choose.default.weight == AffineSpec("uint8", is_symmetric=False, group_size=32, group_rule=rule)
    assert nbits.choose.selection.op_types == frozenset({"MatMul", "Gemm"})
