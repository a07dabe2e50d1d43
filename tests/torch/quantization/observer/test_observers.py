"""Observers by themselves: the scales that quark.formats gives for the same data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quark.errors import InvalidValueError, QuarkError
from quark.formats import choose_affine, find_ranges, get_format, min_mse_position, non_overflow_position
from quark.formats.spec import IntFormat
from quark.ops.fake_quantize import lsq_initial_scale
from quark.ranges import range_of, three_sigma
from quark.torch.quantization.config.config import QuantizationSpec, TQTSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, TQTThresholdInitMeth
from quark.torch.quantization.observer import (
    OBSERVERS,
    LSQObserver,
    PerBlockBFPObserver,
    PerBlockMXObserver,
    PerChannelMinMaxObserver,
    PerChannelPowOf2MinMaxObserver,
    PerChannelPowOf2MinMSEObserver,
    PerGroupMinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorMinMaxObserver,
    PerTensorMovingAverageMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    PlaceholderObserver,
    TQTObserver,
)

INT8, UINT8 = QuantizationSpec(Dtype.int8), QuantizationSpec(Dtype.uint8)


def data(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(4, shape or (4, 6, 50)).astype(np.float32))


def integer(spec: QuantizationSpec) -> IntFormat:
    fmt = get_format(spec.dtype.value)
    assert isinstance(fmt, IntFormat)
    return fmt


@pytest.mark.parametrize(
    "observer",
    [PerTensorMinMaxObserver, PerTensorHistogramObserver, PerTensorPercentileObserver, PerTensorMSEObserver],
)
@pytest.mark.parametrize("spec", [INT8, UINT8], ids=["int8", "uint8"])
def test_batches_lead_to_the_scale_of_all_data(observer: Any, spec: QuantizationSpec) -> None:
    x = data()
    watching = observer(spec)
    for batch in x:
        assert watching(batch) is batch
    scale, zero_point = watching.calculate_qparams()
    fmt, is_symmetric = integer(spec), spec is INT8
    found = range_of(x, observer.method, fmt, is_symmetric)
    expected = choose_affine(np.float32([found.lowest]), np.float32([found.highest]), fmt, symmetric=is_symmetric)
    np.testing.assert_array_equal(scale.numpy(), expected[0])
    np.testing.assert_array_equal(zero_point.numpy(), expected[1])
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)


def test_a_moving_average_is_that_of_the_ranges_of_batches() -> None:
    x = torch.randn(6, 1, 5000, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7.0).reshape(6, 1, 1)
    watching = PerTensorMovingAverageMinMaxObserver(QuantizationSpec(Dtype.int8, symmetric=False))
    for batch in x:
        watching(batch)
    lowest, highest = (value.double().mean().item() for value in (x.amin((1, 2)), x.amax((1, 2))))
    scale, _ = watching.calculate_qparams()
    assert float(scale) == pytest.approx((highest - lowest) / 255, rel=1e-5)


@pytest.mark.parametrize("factor", [0.01, 1.0, 1.4, 300.0])
def test_powers_of_two_are_those_of_the_positions(factor: float) -> None:
    x = factor * data(1)
    for observer, position in (
        (PerTensorPowOf2MinMaxObserver, non_overflow_position(x)),
        (PerTensorPowOf2NonOverflowObserver, non_overflow_position(x)),
        (PerTensorPowOf2MinMSEObserver, min_mse_position(x)),
    ):
        watching = observer(INT8)
        watching(x)
        assert watching.calculate_qparams() == (torch.tensor([2.0**-position]), torch.tensor([0]))
        unsigned = observer(QuantizationSpec(Dtype.uint8, symmetric=True))
        unsigned(x)
        assert unsigned.calculate_qparams()[1] == 128


def test_channels_and_groups_have_scales_of_their_own() -> None:
    x = data(2, 6, 40)
    channels = QuantizationSpec(Dtype.int8, PerChannelMinMaxObserver, ch_axis=0)
    watching = PerChannelMinMaxObserver(channels)
    watching(x[:, :20])
    watching(x[:, 20:])
    expected = choose_affine(*find_ranges(x.numpy(), 0), "int8", symmetric=True)[0]
    np.testing.assert_array_equal(watching.calculate_qparams()[0].numpy(), expected)
    for observer, position_of in (
        (PerChannelPowOf2MinMaxObserver, non_overflow_position),
        (PerChannelPowOf2MinMSEObserver, min_mse_position),
    ):
        powers = observer(QuantizationSpec(Dtype.int8, observer, ch_axis=0))
        powers(x)
        assert powers.calculate_qparams()[0].tolist() == [2.0 ** -position_of(row) for row in x]
    groups = PerGroupMinMaxObserver(QuantizationSpec(Dtype.int4, PerGroupMinMaxObserver, ch_axis=1, group_size=16))
    groups(x)
    scale, _ = groups.calculate_qparams()
    assert scale.shape == (6, 3)
    assert scale[2, 1].item() == pytest.approx(x[2, 16:32].abs().max().item() / 7)


def test_blocks_have_the_scales_of_their_format() -> None:
    x = data(3, 3, 64)
    mx = PerBlockMXObserver(QuantizationSpec(Dtype.fp4, scale_calculation_mode="floor"))
    mx(torch.zeros(5))
    mx(x)
    scale, zero_point = mx.calculate_qparams()
    largest = x.reshape(3, 2, 32).abs().amax(2)
    assert torch.equal(scale, torch.exp2(torch.floor(torch.log2(largest)) - 2))
    assert not zero_point.any()
    bfp = PerBlockBFPObserver(QuantizationSpec(Dtype.bfp16, ch_axis=0))
    bfp(x)
    assert bfp.calculate_qparams()[0].shape == (64, 1)
    microexponents = PerBlockMXObserver(QuantizationSpec(Dtype.mx6))
    microexponents(x)
    assert microexponents.calculate_qparams()[0].shape == (3, 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_lsq_starts_from_its_formula(bits: int) -> None:
    x = data(4, 5, 30)
    spec = QuantizationSpec(Dtype[f"int{bits}"], LSQObserver)
    watching = LSQObserver(spec)
    watching(x[:2])
    watching(x[2:])
    torch.testing.assert_close(watching.calculate_qparams()[0].reshape(()), lsq_initial_scale(x, bits))
    channels = LSQObserver(QuantizationSpec(spec.dtype, LSQObserver, qscheme=QSchemeType.per_channel, ch_axis=0))
    channels(x)
    torch.testing.assert_close(channels.calculate_qparams()[0], lsq_initial_scale(x, bits, axis=0))


@pytest.mark.parametrize(("dtype", "codes"), [(Dtype.int8, 128), (Dtype.uint8, 256), (Dtype.int4, 8)])
def test_tqt_starts_from_the_power_of_two_above_its_threshold(dtype: Dtype, codes: int) -> None:
    x = data(5).abs()
    initial = TQTSpec(TQTThresholdInitMeth._3SD)
    watching = TQTObserver(QuantizationSpec(dtype, TQTObserver, qat_spec=initial))
    watching(x)
    assert watching.log_threshold == pytest.approx(math.log2(three_sigma(x)), abs=0.01)
    assert watching.calculate_qparams()[0] == 2.0 ** math.ceil(math.log2(three_sigma(x))) / codes
    largest = TQTObserver(QuantizationSpec(dtype, TQTObserver))
    largest(x)
    assert largest.log_threshold == pytest.approx(math.log2(x.max()))


def test_zeros_have_a_scale() -> None:
    for observer in (PerTensorMinMaxObserver, PerTensorMSEObserver, TQTObserver, LSQObserver):
        watching = observer(INT8)
        watching(torch.zeros(10))
        scale, zero_point = watching.calculate_qparams()
        assert scale > 0
        assert zero_point == 0


def test_a_cast_needs_no_scale() -> None:
    watching = PlaceholderObserver(QuantizationSpec(Dtype.bfloat16))
    watching(data())
    scale, zero_point = watching.calculate_qparams()
    assert scale == 1
    assert zero_point == 0


@pytest.mark.parametrize("name", [observer for observer in OBSERVERS if observer != "PlaceholderObserver"])
def test_nothing_observed_is_an_error_also_after_a_reset(name: str) -> None:
    observer = OBSERVERS[name]
    first = observer.schemes[0]
    is_group = first is QSchemeType.per_group and "Block" not in name
    dtype = Dtype.bfp16 if "BFP" in name else Dtype.mx6 if "Block" in name else Dtype.int8
    axis = 0 if first is QSchemeType.per_channel else None
    watching = observer(QuantizationSpec(dtype, observer, ch_axis=axis, group_size=4 if is_group else None))
    with pytest.raises(InvalidValueError, match="observed nothing"):
        watching.calculate_qparams()
    watching(data())
    watching.calculate_qparams()
    watching.reset_state()
    with pytest.raises(InvalidValueError, match="observed nothing"):
        watching.calculate_qparams()


def test_nan_and_what_does_not_fit_is_refused() -> None:
    for observer in (PerTensorMinMaxObserver, LSQObserver):
        with pytest.raises(InvalidValueError, match="NaN"):
            observer(INT8)(torch.tensor([1.0, float("nan")]))
    with pytest.raises(QuarkError, match="types in blocks"):
        PerBlockMXObserver(INT8)
    with pytest.raises(QuarkError, match="per_channel without ch_axis"):
        PerChannelMinMaxObserver(INT8)


def test_amds_names_say_the_same() -> None:
    watching = PerTensorMinMaxObserver(INT8)
    x = torch.tensor([-1.25, 2.5])
    assert watching.forward(x) is x
    assert (watching.min_val.tolist(), watching.max_val.tolist()) == ([-1.25], [2.5])
    assert all(map(torch.equal, watching._calculate_qparams(), watching.calculate_qparams()))
    watching.reset_min_max_vals()
    with pytest.raises(InvalidValueError, match="observed nothing"):
        _ = watching.max_val
    channels = PerChannelMinMaxObserver(QuantizationSpec(Dtype.int8, PerChannelMinMaxObserver, ch_axis=0))
    channels(torch.tensor([[-1.5, 2.0], [0.5, 0.25]]))
    assert channels.min_val.tolist() == [-1.5, 0.25]
    with pytest.raises(AttributeError, match="finds scales, and no range"):
        _ = PlaceholderObserver(QuantizationSpec(Dtype.float16)).min_val
