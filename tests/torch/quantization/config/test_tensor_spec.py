"""Specs of tensors: what they come to, and what is refused when they are built."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quark.decide.specs import AffineSpec, Algorithm, BlockSpec, DynamicSpec, FloatSpec, Learning, ThresholdInit
from quark.errors import InvalidValueError, QuarkError, UnsupportedOptionError, UnsupportedTypeError
from quark.formats import get_format
from quark.formats.spec import IntFormat, Rounding, ScaleRule
from quark.ranges import KLJ, Entropy, MinMax, MinMSE, NonOverflow, Percentile, PowerOfTwoMinMSE, ThreeSigma
from quark.torch.quantization.config import named_specs
from quark.torch.quantization.config.config import (
    Bfloat16Spec,
    BFP16Spec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    OCP_MXINT8Spec,
    QuantizationSpec,
    TQTSpec,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
)
from quark.torch.quantization.observer import (
    OBSERVERS,
    LSQObserver,
    PerBlockBFPObserver,
    PerBlockMXObserver,
    PerChannelMinMaxObserver,
    PerChannelPowOf2MinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    PlaceholderObserver,
    TQTObserver,
)

TENSOR, CHANNEL, GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group
KLJ_START = TQTSpec(TQTThresholdInitMeth._KL_J)


def of(**fields: Any) -> dict[str, Any]:
    return fields


# (fields, what the message must say)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (of(dtype=Dtype.int8, qscheme=CHANNEL), "per_channel without ch_axis"),
    (of(dtype=Dtype.int8, observer_cls=PerChannelMinMaxObserver), "per_channel without ch_axis"),
    (of(dtype=Dtype.int4, qscheme=GROUP, ch_axis=1), "per_group without group_size"),
    (of(dtype=Dtype.int4, qscheme=GROUP, ch_axis=1, group_size=0), "group_size 0"),
    (of(dtype=Dtype.int4, qscheme=GROUP, ch_axis=1, group_size=-1), "use per_channel"),
    (of(dtype=Dtype.int4, qscheme=GROUP, ch_axis=0.5, group_size=8), "ch_axis 0.5"),
    (of(dtype=Dtype.int8, qscheme=TENSOR, ch_axis=0), "ch_axis 0 with qscheme per_tensor"),
    (of(dtype=Dtype.int8, group_size=32), "group_size 32 with qscheme per_tensor"),
    (of(dtype=Dtype.int8, qscheme=CHANNEL, ch_axis=0, group_size=32), "group_size 32 with qscheme per_channel"),
    (of(dtype=Dtype.int8, qscheme=CHANNEL, ch_axis=0, observer_cls=PerTensorMinMaxObserver), "serves per_tensor"),
    (of(dtype=Dtype.int8, qscheme=TENSOR, observer_cls=PerChannelMinMaxObserver), "serves per_channel"),
    (of(dtype=Dtype.int8, qscheme=CHANNEL, ch_axis=0, observer_cls=PerGroupMinMaxObserver), "serves per_group"),
    (of(dtype=Dtype.int8, qscheme=GROUP, group_size=8, observer_cls=LSQObserver), "per_tensor or per_channel"),
    (of(dtype=Dtype.int8, observer_cls=PerBlockMXObserver), "mx_element_dtype=Dtype.int8"),
    (of(dtype=Dtype.int8, observer_cls=PerBlockBFPObserver), "types in blocks"),
    (of(dtype=Dtype.int8, observer_cls=PlaceholderObserver), "finds no range"),
    (of(dtype=Dtype.int8, mx_element_dtype=Dtype.fp4), "mx_element_dtype belongs"),
    (of(dtype=Dtype.int8, scale_calculation_mode="even"), "scale_calculation_mode belongs"),
    (of(dtype=Dtype.int8, scale_format="e8m0"), "scale_format belongs"),
    (of(dtype=Dtype.int8, round_method=RoundType.floor), "rounded to the nearest"),
    (of(dtype=Dtype.uint8, observer_cls=PerTensorPowOf2MinMSEObserver, symmetric=False), "use symmetric=True"),
    (of(dtype=Dtype.int8, scale_type=ScaleType.pof2, symmetric=False), "use symmetric=True"),
    (of(dtype=Dtype.int8, scale_type=ScaleType.float16), "scales are kept as float32"),
    (of(dtype=Dtype.int8, scale_type=ScaleType.bfloat16), "scales are kept as float32"),
    (of(dtype=Dtype.int8, zero_point_type=ZeroPointType.float32), "use ZeroPointType.int32"),
    (of(dtype=Dtype.int8, is_scale_quant=True), "is_scale_quant"),
    (of(dtype=Dtype.int8, is_dynamic=True, observer_cls=TQTObserver), "what is learned is fixed"),
    (of(dtype=Dtype.int8, is_dynamic=True, observer_cls=LSQObserver), "what is learned is fixed"),
    (of(dtype=Dtype.int8, is_dynamic=True, observer_cls=PerTensorMSEObserver), "use PerTensorMinMaxObserver"),
    (of(dtype=Dtype.int8, is_dynamic=True, scale_type=ScaleType.pof2), "ScaleType.float"),
    (of(dtype=Dtype.int8, is_dynamic=True, qscheme=CHANNEL, ch_axis=-1), "use ch_axis 1"),
    (of(dtype=Dtype.int8, observer_cls=TQTObserver, symmetric=False), "TQTObserver with symmetric=False"),
    (of(dtype=Dtype.int8, observer_cls=LSQObserver, symmetric=False), "LSQObserver with symmetric=False"),
    (of(dtype=Dtype.uint8, observer_cls=LSQObserver, symmetric=True), "start at 0"),
    (of(dtype=Dtype.int8, observer_cls=LSQObserver, scale_type=ScaleType.pof2), "use TQTObserver"),
    (of(dtype=Dtype.int8, observer_cls=LSQObserver, qat_spec=KLJ_START), "belongs to TQTObserver"),
    (of(dtype=Dtype.int8, qat_spec=TQTSpec()), "belongs to TQTObserver"),
    (of(dtype=Dtype.mx), "no mx_element_dtype"),
    (of(dtype=Dtype.mx, mx_element_dtype=Dtype.int4), "mx_element_dtype int4: expected one of fp8_e4m3"),
    (of(dtype=Dtype.mx6, mx_element_dtype=Dtype.fp4), "belongs to Dtype.mx"),
    (of(dtype=Dtype.mx6, observer_cls=PerTensorMinMaxObserver), "use PerBlockMXObserver or PerBlockBFPObserver"),
    (of(dtype=Dtype.mx, mx_element_dtype=Dtype.fp4, observer_cls=LSQObserver), "use PerBlockMXObserver"),
    (of(dtype=Dtype.mx, mx_element_dtype=Dtype.fp4, observer_cls=PerBlockBFPObserver), "use PerBlockMXObserver"),
    (of(dtype=Dtype.bfp16, observer_cls=TQTObserver), "use PerBlockBFPObserver"),
    (of(dtype=Dtype.fp6_e3m2, qscheme=TENSOR, observer_cls=PerTensorMinMaxObserver), "use PerBlockMXObserver"),
    (of(dtype=Dtype.fp6_e3m2, qscheme=TENSOR), "use per_group"),
    (of(dtype=Dtype.fp4, qscheme=GROUP, ch_axis=-1, group_size=16, scale_format="e4m3"), "use 'e8m0'.*Dtype.nvfp4"),
    (of(dtype=Dtype.nvfp4, scale_format="e8m0"), "use 'e4m3'"),
    (of(dtype=Dtype.fp4, qscheme=GROUP, group_size=True), "group_size True"),
    (of(dtype=Dtype.mx9, scale_calculation_mode="flor"), "Did you mean floor"),
    (of(dtype=Dtype.mx9, symmetric=False), "no zero point"),
    (of(dtype=Dtype.mx9, qscheme=GROUP, group_size=7), "group_size 7: expected a multiple of 2"),
    (of(dtype=Dtype.mx9, round_method=RoundType.floor), "rounded to the nearest"),
    (of(dtype=Dtype.mx9, qat_spec=TQTSpec()), "nothing to learn"),
    (of(dtype=Dtype.float16, observer_cls=PerTensorMinMaxObserver), "a cast needs none"),
    (of(dtype=Dtype.bfloat16, qscheme=TENSOR), "qscheme does nothing for a cast"),
    (of(dtype=Dtype.bfloat16, is_dynamic=True), "do nothing for a cast"),
    (of(dtype=Dtype.bfloat16, round_method=RoundType.floor), "casts round half to even"),
]

WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    (of(dtype="int8"), "expected one of Dtype"),
    (of(dtype=None), "dtype None"),
    (of(dtype=Dtype.int8, qscheme="per_tensor"), "expected one of QSchemeType"),
    (of(dtype=Dtype.int8, symmetric="yes"), "symmetric 'yes'"),
    (of(dtype=Dtype.int8, observer_cls=int), "no observer_cls 'int'"),
    (of(dtype=Dtype.int8, observer_cls=PerTensorMinMaxObserver(QuantizationSpec(Dtype.int8))), "no observer_cls"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_impossible_combinations_are_refused_when_the_spec_is_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidValueError, UnsupportedOptionError), match=message):
        QuantizationSpec(**fields)


@pytest.mark.parametrize(("fields", "message"), WRONG_TYPES, ids=[str(i) for i in range(len(WRONG_TYPES))])
def test_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedTypeError, InvalidValueError), match=message):
        QuantizationSpec(**fields)


def affine(**fields: Any) -> AffineSpec:
    spec = QuantizationSpec(**fields).tensor_spec()
    assert isinstance(spec, AffineSpec)
    return spec


def integer(name: str) -> IntFormat:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    return fmt


@pytest.mark.parametrize(
    ("observer", "method", "is_power_of_two"),
    [
        (PerTensorMinMaxObserver, MinMax(), False),
        (PerTensorHistogramObserver, Entropy(), False),
        (PerTensorPercentileObserver, Percentile(), False),
        (PerTensorMSEObserver, MinMSE(), False),
        (PerTensorPowOf2MinMaxObserver, MinMax(), True),
        (PerTensorPowOf2MinMSEObserver, PowerOfTwoMinMSE(), True),
        (PerTensorPowOf2NonOverflowObserver, NonOverflow(), True),
    ],
)
def test_observers_name_their_method(observer: Any, method: Any, is_power_of_two: bool) -> None:
    # the type that stores a scale does not take its power of two away
    spec = affine(dtype=Dtype.int8, observer_cls=observer, scale_type=ScaleType.float)
    assert spec == AffineSpec("int8", method, is_symmetric=True, is_power_of_two=is_power_of_two)


def test_pof2_makes_a_power_of_two_of_any_observers_scale() -> None:
    assert affine(dtype=Dtype.int8, scale_type=ScaleType.pof2).is_power_of_two
    by_error = affine(dtype=Dtype.int8, scale_type=ScaleType.pof2, observer_cls=PerTensorMSEObserver)
    assert by_error == affine(dtype=Dtype.int8, observer_cls=PerTensorPowOf2MinMSEObserver)


def test_what_is_left_open_is_filled_in() -> None:
    assert affine(dtype=Dtype.int16) == AffineSpec("int16", MinMax(), is_symmetric=True)
    assert affine(dtype=Dtype.uint8) == AffineSpec("uint8", MinMax(), is_symmetric=False)
    channels = affine(dtype=Dtype.int4, observer_cls=PerChannelPowOf2MinMaxObserver, ch_axis=0)
    assert (channels.is_per_channel, channels.axis, channels.is_power_of_two) == (True, 0, True)
    groups = affine(dtype=Dtype.int4, qscheme=GROUP, group_size=32)
    assert (groups.axis, groups.group_size) == (None, 32)
    assert QuantizationSpec(Dtype.uint8, is_dynamic=True).tensor_spec() == DynamicSpec("uint8")


@pytest.mark.parametrize(
    ("initial", "start", "method"),
    [
        (None, None, MinMax()),
        (TQTThresholdInitMeth._3SD, ThresholdInit.THREE_SIGMA, ThreeSigma()),
        (TQTThresholdInitMeth._KL_J, ThresholdInit.KL_J, KLJ()),
        (TQTThresholdInitMeth._MAX, ThresholdInit.MAX, MinMax()),
    ],
)
def test_tqt_learns_a_power_of_two_from_where_it_is_told(initial: Any, start: Any, method: Any) -> None:
    spec = affine(dtype=Dtype.int8, observer_cls=TQTObserver, qat_spec=TQTSpec(initial))
    assert spec.learning == Learning(Algorithm.TQT, start)
    assert (spec.is_power_of_two, spec.method) == (True, method)


def test_lsq_learns_a_step_of_a_tensor_or_of_channels() -> None:
    spec = affine(dtype=Dtype.uint4, observer_cls=LSQObserver)
    assert spec.learning == Learning(Algorithm.LSQ)
    assert (spec.is_power_of_two, spec.is_symmetric) == (False, False)
    channels = affine(dtype=Dtype.int4, observer_cls=LSQObserver, qscheme=CHANNEL, ch_axis=0)
    assert (channels.is_per_channel, channels.axis) == (True, 0)


@pytest.mark.parametrize(
    ("fields", "name", "rule"),
    [
        (of(dtype=Dtype.mx, mx_element_dtype=Dtype.fp4), "mxfp4_e2m1", ScaleRule.EVEN),
        (of(dtype=Dtype.mx, mx_element_dtype=Dtype.int8), "mxint8", ScaleRule.EVEN),
        (of(dtype=Dtype.fp8_e5m2, observer_cls=PerBlockMXObserver, qscheme=GROUP), "mxfp8_e5m2", ScaleRule.EVEN),
        (of(dtype=Dtype.fp6_e2m3, scale_calculation_mode="floor"), "mxfp6_e2m3", ScaleRule.FLOOR),
        (of(dtype=Dtype.mx4), "mx4", ScaleRule.FLOOR),
        (of(dtype=Dtype.mx9, scale_calculation_mode="mse"), "mx9", ScaleRule.MSE),
        (of(dtype=Dtype.bfp16, observer_cls=PerBlockBFPObserver), "bfp16", ScaleRule.FLOOR),
    ],
)
def test_blocks_are_formats_of_the_catalog(fields: dict[str, Any], name: str, rule: ScaleRule) -> None:
    spec = QuantizationSpec(**fields).tensor_spec()
    assert isinstance(spec, BlockSpec)
    assert spec.quantizer.format == get_format(name)
    assert spec.quantizer.scale_rule is rule
    assert spec.follows_reduction
    other = QuantizationSpec(**fields, group_size=64, ch_axis=-1, round_method=RoundType.round).tensor_spec()
    assert isinstance(other, BlockSpec)
    assert (other.quantizer.format.block_size, other.axis) == (64, -1)
    assert other.quantizer.rounding is Rounding.HALF_AWAY


def test_casts() -> None:
    assert QuantizationSpec(Dtype.bfloat16).tensor_spec() == FloatSpec("bfloat16")
    assert QuantizationSpec(Dtype.float16, PlaceholderObserver).tensor_spec() == FloatSpec("float16")


def test_specs_by_name_are_the_specs_that_they_say() -> None:
    assert Int8PerTensorSpec("percentile").to_quantization_spec().observer_cls is PerTensorPercentileObserver
    assert Uint8PerTensorSpec(is_dynamic=True).to_quantization_spec().tensor_spec() == DynamicSpec("uint8")
    assert Int8PerChannelSpec(0).to_quantization_spec().tensor_spec() == affine(
        dtype=Dtype.int8, qscheme=CHANNEL, ch_axis=0, symmetric=False
    )
    group = Int4PerGroupSpec(ch_axis=1, group_size=128, scale_type="power_of_2").to_quantization_spec().tensor_spec()
    assert group == affine(dtype=Dtype.int4, qscheme=GROUP, ch_axis=1, group_size=128, scale_type=ScaleType.pof2)
    for name, spec in {
        "mxfp4_e2m1": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "mxint8": OCP_MXINT8Spec(),
        "mx6": MX6Spec(ch_axis=-1, block_size=16),
        "bfp16": BFP16Spec(ch_axis=1),
    }.items():
        typed = spec.to_quantization_spec().tensor_spec()
        assert isinstance(typed, BlockSpec)
        assert typed.quantizer.format == get_format(name)
    assert Bfloat16Spec().to_quantization_spec() == QuantizationSpec(Dtype.bfloat16)
    with pytest.raises(QuarkError, match="Did you mean percentile"):
        Int8PerTensorSpec("percentil").to_quantization_spec()


@pytest.mark.parametrize("name", OBSERVERS)
def test_json_holds_every_spec(name: str) -> None:
    observer = OBSERVERS[name]
    dtype = {"PlaceholderObserver": Dtype.float16, "PerBlockMXObserver": Dtype.fp4, "PerBlockBFPObserver": Dtype.bfp16}
    spec = QuantizationSpec(
        dtype.get(name, Dtype.int8),
        observer,
        ch_axis=1 if observer.schemes and observer.schemes[0] is not TENSOR else None,
        group_size=32 if observer.schemes[:1] == (GROUP,) else None,
        qat_spec=KLJ_START if observer is TQTObserver else None,
    )
    read = QuantizationSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert read == spec
    assert read.tensor_spec() == spec.tensor_spec()
    assert hash(read) == hash(spec)


def test_what_no_version_says_is_refused_in_json() -> None:
    content = QuantizationSpec(Dtype.int8).to_dict()
    QuantizationSpec.from_dict({**content, "enable_buffer_reuse": False})
    with pytest.raises(QuarkError, match="Did you mean qscheme"):
        QuantizationSpec.from_dict({**content, "qschem": "per_tensor"})
    with pytest.raises(QuarkError, match="no dtype 'int9'"):
        QuantizationSpec.from_dict({**content, "dtype": "int9"})


def test_a_spec_is_a_value() -> None:
    spec = QuantizationSpec(Dtype.int8)
    assert replace(spec, dtype=Dtype.int4) == QuantizationSpec(Dtype.int4)


def test_an_edited_spec_is_checked_when_it_is_used() -> None:
    spec = Int4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()
    spec.set_group_size(32)
    assert spec.group_size == 32
    with pytest.raises(QuarkError, match="group_size -1"):
        spec.set_group_size(-1)
    assert spec.group_size == 32
    spec.symmetric = "yes"  # type: ignore[assignment]
    with pytest.raises(QuarkError, match="symmetric 'yes'"):
        spec.tensor_spec()


def test_rounding_ties_away_from_zero_is_said_not_to_happen(caplog: pytest.LogCaptureFixture) -> None:
    """Scripts for AMD Quark ask for it with every spec."""
    with caplog.at_level("WARNING", logger="quark"):
        spec = QuantizationSpec(Dtype.int8, round_method=RoundType.round)
    assert "ties go to the even code" in caplog.text
    assert spec.tensor_spec() == QuantizationSpec(Dtype.int8).tensor_spec()


# what AMD Quark 0.13 gives for these names without arguments other than the required ones
AMD_DEFAULTS = {
    "Int2PerGroupSpec": True,
    "Int3PerChannelSpec": False,
    "Int3PerGroupSpec": True,
    "Int4PerChannelSpec": True,
    "Int4PerGroupSpec": True,
    "Int4PerTensorSpec": True,
    "Int8PerChannelSpec": False,
    "Int8PerGroupSpec": True,
    "Int8PerTensorSpec": True,
    "Uint4PerChannelSpec": False,
    "Uint4PerGroupSpec": False,
    "Uint4PerTensorSpec": False,
    "Uint8PerChannelSpec": True,
    "Uint8PerGroupSpec": False,
    "Uint8PerTensorSpec": False,
    "FP8E4M3PerTensorSpec": True,
    "FP8E4M3PerChannelSpec": True,
}


@pytest.mark.parametrize("name", AMD_DEFAULTS)
def test_symmetry_by_name_is_that_of_amd(name: str) -> None:
    required = {"ch_axis": 0} if "Channel" in name else {"ch_axis": 1, "group_size": 32} if "Group" in name else {}
    spec = getattr(named_specs, name)(**required)
    assert spec.to_quantization_spec().symmetric is AMD_DEFAULTS[name]
    assert type(spec).from_dict(spec.to_dict()) == spec


def test_groups_of_four_bits_take_is_dynamic_before_the_scale() -> None:
    assert Int4PerGroupSpec(1, 32, True, False, "power_of_2").scale_type == "power_of_2"
    assert named_specs.Int8PerGroupSpec(1, 32, True, "power_of_2").scale_type == "power_of_2"


def test_mx_by_name_says_its_blocks() -> None:
    spec = OCP_MXFP4Spec(ch_axis=-1).to_quantization_spec()
    assert (spec.dtype, spec.group_size, spec.is_dynamic) == (Dtype.fp4, 32, True)
    assert (spec.scale_format, spec.scale_calculation_mode) == ("e8m0", "even")
    blocks = named_specs.FP4PerGroupSpec(-1, 16, scale_format="e8m0").to_quantization_spec().tensor_spec()
    assert isinstance(blocks, BlockSpec)
    assert blocks.quantizer.format.block_size == 16
    with pytest.raises(QuarkError, match="use 'e8m0'"):
        named_specs.FP4PerGroupSpec(-1, 16).to_quantization_spec()


def test_dtypes_know_their_bits_and_their_torch_types() -> None:
    torch = pytest.importorskip("torch")
    expected = {Dtype.int4: 4, Dtype.fp4: 4, Dtype.mx6: 5, Dtype.bfloat16: 16, Dtype.fp6_e3m2: 6, Dtype.uint16: 16}
    assert {each: each.to_bitwidth() for each in expected} == expected
    with pytest.raises(QuarkError, match="mx_element_dtype"):
        Dtype.mx.to_bitwidth()
    assert Dtype.from_torch_dtype(torch.uint8) is Dtype.uint8
    assert Dtype.from_str("INT8") is Dtype.int8
    with pytest.raises(QuarkError, match="no dtype 'float64'"):
        Dtype.from_torch_dtype(torch.float64)
