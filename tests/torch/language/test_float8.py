"""8-bit floats with a scale."""

from __future__ import annotations

import pytest
import torch
from small_language_models import FP8, llama, logits_of, quantizer, token_ids

from quark.decide.specs import FloatSpec, LayerSpec, bits_of
from quark.errors import InvalidValueError
from quark.formats.quantize import quantize_dequantize
from quark.ranges import TensorRange
from quark.torch import ModelQuantizer
from quark.torch.language.activations import quantizer_of
from quark.torch.language.linear import round_to_nearest
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M2PerTensorSpec,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType

SPECS = {
    ("fp8_e4m3", 448.0): FP8E4M3PerTensorSpec().to_quantization_spec().tensor_spec(),
    ("fp8_e5m2", 57344.0): FP8E5M2PerTensorSpec().to_quantization_spec().tensor_spec(),
}


@pytest.mark.parametrize("kind", SPECS)
def test_weights_are_rounded_to_the_format_at_their_scale(kind):
    name, highest = kind
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    found = round_to_nearest(weight, SPECS[kind])
    scale = weight.abs().max() / highest
    assert float(found.scale) == float(scale)
    expected = torch.from_numpy(quantize_dequantize((weight / scale).numpy(), name)) * scale
    assert torch.equal(found.values, expected)
    assert float(found.values.abs().max()) == pytest.approx(float(weight.abs().max()), rel=1e-6)


def test_channels_and_tokens_have_scales_of_their_own():
    weight = torch.randn(6, 32) * torch.logspace(-3, 3, 6)[:, None]
    spec = FP8E4M3PerChannelSpec(0).to_quantization_spec().tensor_spec()
    found = round_to_nearest(weight, spec)
    assert found.scale.shape == (6, 1)
    assert bool(((found.values - weight).abs() <= weight.abs().amax(1, keepdim=True) / 16).all())
    tokens = FP8E4M3PerChannelSpec(1, is_dynamic=True).to_quantization_spec().tensor_spec()
    assert torch.equal(quantizer_of(tokens, None, "x")(weight), found.values)
    zeros = torch.zeros(2, 4)
    assert torch.equal(quantizer_of(tokens, None, "x")(zeros), zeros)


def test_a_fixed_scale_saturates():
    quantizer = quantizer_of(SPECS["fp8_e4m3", 448.0], TensorRange(-1.0, 2.0), "x")
    assert float(quantizer.scale) == pytest.approx(2 / 448)
    assert quantizer(torch.tensor([-100.0, 0.0, 2.0, 1e6])).tolist() == pytest.approx([-2, 0, 2, 2])


def test_a_model_in_fp8_is_close_to_float():
    model = quantizer("fp8").quantize_model(llama(), token_ids())
    error = (logits_of(model) - logits_of(llama())).norm() / logits_of(llama()).norm()
    assert 0.001 < float(error) < 0.1


def test_impossible_specs_are_refused():
    for options, words in (
        ({"qscheme": QSchemeType.per_channel}, "without ch_axis"),
        ({"qscheme": QSchemeType.per_tensor, "ch_axis": 0}, "ch_axis 0"),
        ({"qscheme": QSchemeType.per_tensor, "symmetric": False}, "no zero point"),
        ({"qscheme": QSchemeType.per_tensor, "group_size": 32}, "group_size does nothing"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            QuantizationSpec(Dtype.fp8_e4m3, **options)
    with pytest.raises(InvalidValueError, match="min_max"):
        FP8E4M3PerTensorSpec(observer_method="percentile").to_quantization_spec()
    channels = FP8E4M3PerChannelSpec(0).to_quantization_spec()
    with pytest.raises(InvalidValueError, match="tokens are not known"):
        QuantizationConfig(input_tensors=channels)
    with pytest.raises(InvalidValueError, match="weight with is_dynamic"):
        QuantizationConfig(weight=FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec())
    with pytest.raises(InvalidValueError, match="bias with fp8"):
        QuantizationConfig(bias=FP8)
    with pytest.raises(InvalidValueError, match="has a scale"):
        FloatSpec("fp8_e4m3")


def test_graphs_have_the_type_with_fixed_scales():
    config = Config(QuantizationConfig(weight=FP8))
    network = ModelQuantizer(config).quantize_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.rand(2, 4)])
    assert [tensor.choice.format for tensor in network.plan] == ["fp8_e4m3"]
    assert QuantizationSpec(Dtype.fp8_e4m3).tensor_spec().format == "mxfp8_e4m3"  # by itself: in blocks
    assert bits_of(LayerSpec(None, FP8.tensor_spec())) == (32.0, 8.0)
