"""Quantizers that learn start well, and fixed scales can be found again during training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.decide.scales import ChannelAxis, choice_of_weight
from quark.decide.specs import AffineSpec, Algorithm, Learning
from quark.decide.view import ArrayConstant
from quark.errors import UnsupportedTypeError
from quark.formats.affine import integer_format
from quark.ranges import LeastErrorStep, range_of
from quark.torch import ModelQuantizer, parameter_groups
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import LSQObserver, TQTObserver
from quark.torch.train.quantizers import TqtQuantizer

RANDOM = np.random.default_rng(0)


def error_of(values: np.ndarray, step: float, name: str) -> float:
    fmt = integer_format(name)
    codes = np.clip(np.rint(values / step), fmt.qmin, fmt.qmax)
    return float(np.square(codes * step - values).sum())


@pytest.mark.parametrize("name", ["int2", "int4", "int8"])
@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform"])
def test_the_step_of_a_weight_has_nearly_the_least_error(name: str, kind: str) -> None:
    weight = getattr(RANDOM, kind)(size=(4, 500)).astype(np.float32)
    spec = AffineSpec(name, is_per_channel=True, learning=Learning(Algorithm.LSQ))
    steps = choice_of_weight(spec, ArrayConstant(weight), ChannelAxis(0)).scale
    for line, step in zip(weight, steps, strict=True):
        widest = np.abs(line).max() / integer_format(name).qmax
        least = min(error_of(line, widest * share, name) for share in np.linspace(0.05, 1.2, 1000))
        assert error_of(line, step, name) < (1.15 if name == "int8" else 1.03) * least


@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8"])
def test_the_step_of_an_activation_has_nearly_the_least_error(name: str) -> None:
    values = RANDOM.normal(size=20000).astype(np.float32)
    values = values if integer_format(name).signed else np.maximum(values, 0)
    step = range_of(values, LeastErrorStep(), integer_format(name), True).highest / integer_format(name).qmax
    least = min(error_of(values, np.abs(values).max() * share / 7, name) for share in np.linspace(0.01, 1.2, 1000))
    assert error_of(values, step, name) < 1.05 * least


def test_one_sided_values_have_the_step_of_their_magnitude() -> None:
    values = -np.abs(RANDOM.normal(size=5000)).astype(np.float32)
    found = range_of(values, LeastErrorStep(), integer_format("int8"), True)
    assert found.highest == -found.lowest > 2


def quantized(observer: type | None) -> Any:
    torch.manual_seed(0)
    spec = QuantizationSpec(Dtype.int8) if observer is None else QuantizationSpec(Dtype.int8, observer)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    data = [torch.randn(32, 16) for _ in range(2)]
    return ModelQuantizer(Config(QuantizationConfig(spec, spec, spec), algo_config=[])).quantize_model(model, data)


def test_thresholds_start_from_the_raw_logarithm() -> None:
    network = quantized(TQTObserver)
    found = {name: module for name, module in network.named_modules() if isinstance(module, TqtQuantizer)}
    raw = math.log2(float(network.get_parameter("0.weight").detach().abs().max()))
    assert float(found["quantizers.0_weight"].log2_threshold) == pytest.approx(raw, abs=1e-6)
    steps = {name: float(each.step()) for name, each in found.items()}
    for each in found.values():
        with torch.no_grad():
            each.log2_threshold.add_(1e-4)  # a step of training
    assert sum(float(each.step()) != steps[name] for name, each in found.items()) <= 1


def test_fixed_scales_are_found_again() -> None:
    network = quantized(None)
    before = {name: quantizer.choice() for name, quantizer in network.all_quantizers().items()}
    with torch.no_grad():
        network.get_parameter("0.weight").mul_(3)
        network.get_parameter("0.bias").mul_(3)
    data = [torch.randn(32, 16, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    network.train()
    network(data[0])  # scales of weights follow them in training
    before = {
        name: quantizer.choice() if name.endswith("weight") else before[name]
        for name, quantizer in network.all_quantizers().items()
    }
    assert ModelQuantizer.recalibrate(network, data) == 3
    assert network.training
    after = {name: quantizer.choice() for name, quantizer in network.all_quantizers().items()}
    ratio = after["quantizers.relu"].scale[0] / before["quantizers.relu"].scale[0]
    assert 2 < ratio < 4
    weights = [name for name in before if name.endswith("weight")]
    assert all(before[name] == after[name] for name in weights)


@pytest.mark.parametrize(("observer", "kind"), [(LSQObserver, "steps"), (TQTObserver, "thresholds")])
def test_groups_have_every_parameter_once_with_rates_of_their_own(observer: type, kind: str) -> None:
    network = quantized(observer)
    groups = parameter_groups(network, 0.1, weight_decay=0.01, step_learning_rate=0.02, threshold_learning_rate=0.02)
    assert [group["name"] for group in groups] == ["weights", "plain", kind]
    assert [group["lr"] for group in groups] == [0.1, 0.1, 0.02]
    assert [group["weight_decay"] for group in groups] == [0.01, 0, 0]
    found = [id(each) for group in groups for each in group["params"]]
    assert sorted(found) == sorted(id(parameter) for parameter in network.parameters())


def test_learned_steps_are_not_calibrated_again() -> None:
    assert ModelQuantizer.recalibrate(quantized(LSQObserver), [torch.randn(8, 16)]) == 0
    with pytest.raises(UnsupportedTypeError, match="recalibrate: expected what quantize_model returned"):
        ModelQuantizer.recalibrate(nn.Linear(2, 2), [torch.randn(8, 2)])


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_group"])
def test_symmetric_int4_uses_its_lowest_code_where_that_is_closer(scheme: str) -> None:
    """A weight whose extremes are negative has a finer step; the step follows it while it is trained."""
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.uniform_(-1.0, 0.8)
    more = {"ch_axis": 1, "group_size": 8} if scheme == "per_group" else {}
    more |= {"ch_axis": 0} if scheme == "per_channel" else {}
    spec = QuantizationSpec(Dtype.int4, qscheme=QSchemeType[scheme], symmetric=True, **more)
    quantized = ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(layer, [torch.rand(4, 16)])
    (quantizer,) = quantized.all_quantizers().values()
    values = layer.weight.detach()
    parts = {"per_tensor": values.reshape(1, -1), "per_channel": values, "per_group": values.reshape(-1, 8)}[scheme]
    steps = torch.maximum(parts.amin(1) / -8, parts.amax(1) / 7)
    assert torch.allclose(quantizer.scale.reshape(-1), steps)
    even = 2 * parts.abs().amax(1) / 14
    errors = [
        float(((parts / step[:, None]).round().clamp(-8, 7) * step[:, None] - parts).square().sum())
        for step in (steps, even)
    ]
    assert errors[0] < errors[1]
    quantized.train()(torch.rand(4, 16))
    assert torch.allclose(quantizer.scale.reshape(-1), steps)


def test_symmetric_int4_stays_even_where_the_lowest_code_does_not_help() -> None:
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.uniform_(-0.5, 1.0)
        layer.weight[:, 0] = 1.0
    spec = QuantizationSpec(Dtype.int4, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True)
    quantized = ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(layer, [torch.rand(4, 16)])
    (quantizer,) = quantized.all_quantizers().values()
    assert torch.allclose(quantizer.scale, torch.full((8,), 1 / 7))
