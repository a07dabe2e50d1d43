"""Compensation of torch networks: closer to the float network, on the grid of the plan, or rolled back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import quark.features.compensation.on_torch as compensation
from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.errors import UnsupportedOptionError
from quark.features.compensation.input_products import InputProducts
from quark.features.compensation.options import CompensationOptions
from quark.features.finetuning.layers import MatrixRows, TrainedLayer
from quark.features.finetuning.problem import WeightLayout
from quark.plan import AffineChoice, Role
from quark.rounded import rounded
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    BiasCorrectionConfig,
    Config,
    GPTAQConfig,
    GPTQConfig,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import (
    LSQObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
)

torch.set_num_threads(1)
COMPENSATED: list[Any] = [CompensationOptions(sample_limit=16)]


def images(count: int = 32, seed: int = 0) -> Any:
    """Images whose channels and neighbours vary together, as features of a network do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(count, 2, 6, 6, generator=generator)
    mixed = torch.einsum("nchw,dc->ndhw", few, torch.tensor([[1.0, 0.2], [0.9, 0.4], [0.8, -0.5], [1.1, 0.1]]))
    noise = 0.1 * torch.randn(count, 4, 12, 12, generator=generator)
    return nn.functional.interpolate(mixed, scale_factor=2, mode="bilinear") + noise


def network() -> nn.Module:
    """Ordinary, grouped, depthwise, strided and transposed convolutions, with and without batch norms, and a linear
    layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, dilation=2, groups=2),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 8, 2, stride=2, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    with torch.no_grad():
        model.train()(images(64, 7))  # statistics of batch norms other than 0 and 1
    return model.eval()


def specs(observer: type[ObserverBase] = PerTensorMSEObserver, dtype: Dtype = Dtype.int4) -> QuantizationConfig:
    """Weights alone, so that nothing else than their rounding counts."""
    is_by_channel = QSchemeType.per_channel in observer.schemes and observer is not LSQObserver
    axis = {"qscheme": QSchemeType.per_channel, "ch_axis": 0} if is_by_channel else {}
    return QuantizationConfig(weight=QuantizationSpec(dtype, observer, symmetric=True, **axis))


def quantized(config: Config, model: nn.Module | None = None) -> Any:
    data = images().split(8)
    return ModelQuantizer(config).quantize_model(network() if model is None else model, data)


def facts(found: Any) -> AlgorithmFacts:
    return next(algorithm for algorithm in found.algorithms if algorithm.name == "compensation")


def error(found: Any) -> float:
    """The squared error of the outputs on images that nothing was chosen by."""
    x = images(64, 1)
    with torch.no_grad():
        return float((found(x) - network()(x)).square().mean())


@pytest.mark.parametrize(
    "spec",
    [specs(), specs(PerTensorPowOf2MinMSEObserver), QuantizationConfig(weight=QuantizationSpec(Dtype.mx6))],
    ids=["int4", "int4 pof2", "mx6"],
)
def test_outputs_are_closer(spec: QuantizationConfig) -> None:
    plain, found = (quantized(Config(spec, algo_config=value)) for value in ([], COMPENSATED))
    assert len(facts(found).changed) >= 4, facts(found).left
    assert error(found) < 0.8 * error(plain)


def test_weights_are_on_the_grid_of_the_plan_which_stays() -> None:
    plain, found = (
        quantized(Config(specs(PerTensorPowOf2MinMSEObserver), algo_config=value)) for value in ([], COMPENSATED)
    )
    weights = {tensor.tensor: tensor.choice for tensor in plain.plan if tensor.role is Role.WEIGHT}
    assert weights == {tensor.tensor: tensor.choice for tensor in found.plan if tensor.role is Role.WEIGHT}
    moved = 0
    for name, choice in weights.items():
        owner, _, _ = name.rpartition(".")
        layers = [value.get_submodule(owner) for value in (plain, found)]
        before, after = (layer.folded_weight() if hasattr(layer, "batch_norm") else layer.weight for layer in layers)
        before, after = (value.detach().numpy() for value in (before, after))
        codes = after / choice.scale[0]
        rows = np.abs(codes - np.rint(codes)).reshape(len(codes), -1).max(axis=1) < 1e-3
        kept = np.isclose(before, after, rtol=1e-5).reshape(len(codes), -1).all(axis=1)
        assert (rows | kept).all() or "8.weight" in name  # the outputs of a transposed convolution are not rows
        moved += int((np.rint(rounded(before, choice) / choice.scale[0]) != np.rint(codes)).sum())
    assert moved > 0


@pytest.mark.parametrize(
    ("observer", "reason"),
    [
        (PerTensorMinMaxObserver, "follows the weight"),
        (PerChannelMinMaxObserver, "follows the weight"),
        (PerTensorPowOf2NonOverflowObserver, "follows the weight"),
        (LSQObserver, "is learned"),
    ],
)
def test_scales_that_move_are_left(observer: type[ObserverBase], reason: str) -> None:
    found = facts(quantized(Config(specs(observer, Dtype.int8), algo_config=COMPENSATED)))
    assert found.changed == ()
    assert len(found.left) == 5
    assert all(reason in each.reason for each in found.left)


def test_a_weight_of_two_layers_is_left() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.other(self.conv(self.conv(x).relu()).relu()))

    found = facts(quantized(Config(specs(), algo_config=COMPENSATED), Twice().eval()))
    assert [each.reason for each in found.left] == ["shares its weight with another layer"] * 2
    assert len(found.changed) == 1


def test_padding_by_name_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 8, 3)).eval()
    found = facts(quantized(Config(specs(), algo_config=COMPENSATED), model))
    assert [each.reason for each in found.left] == ["its padding is given by name"]
    assert len(found.changed) == 1


def test_a_worse_network_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([OutputErrors([1.0], [1.0]), OutputErrors([2.0], [2.0])])
    monkeypatch.setattr(compensation, "_errors", lambda *_: next(errors))
    plain, found = (quantized(Config(specs(), algo_config=value)) for value in ([], COMPENSATED))
    assert facts(found).changed == ()
    assert {each.reason for each in facts(found).left} == {"the outputs on held-out samples got worse with it"}
    x = images(4, 2)
    assert torch.equal(plain(x), found(x))


def test_the_judge_sees_biases_corrected_and_leaves_the_network_alone() -> None:
    seen: list[OutputErrors] = []

    def watched(work: Any, *others: Any) -> OutputErrors:
        before = {name: value.clone() for name, value in work.network.state_dict().items()}
        seen.append(errors_of(work, *others))
        assert all(torch.equal(value, before[name]) for name, value in work.network.state_dict().items())
        return seen[-1]

    errors_of = compensation._errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compensation, "_errors", watched)
        quantized(Config(specs(), algo_config=[*COMPENSATED, BiasCorrectionConfig()]))
        quantized(Config(specs(), algo_config=COMPENSATED))
    assert [len(errors.relative) for errors in seen] == [8, 8, 8, 8]  # those behind the first 16
    assert seen[1].mean < seen[0].mean
    assert seen[0].mean != seen[2].mean


def test_biases_are_corrected_by_the_float_network() -> None:
    """The mean of an output is that of the float network, though compensation moved the weights before."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3))
    config = Config(specs(), algo_config=[*COMPENSATED, BiasCorrectionConfig()])
    found, x = quantized(config, copy.deepcopy(model)), images()
    assert facts(found).changed
    with torch.no_grad():
        exact, own = (value(x).mean(dim=(2, 3)).sort(dim=0).values[8:24].mean(dim=0) for value in (model, found))
        spread = model(x).std()
    # the middle half of the differences is not quite that of the values
    assert float((exact - own).abs().max()) < 0.02 * float(spread)


def test_gptq_config_is_compensation_and_names_of_modules_are_refused() -> None:
    found = facts(quantized(Config(specs(), algo_config=[GPTQConfig(damp_percent=0.02)])))
    assert len(found.changed) >= 4
    for algorithm in (GPTAQConfig(), GPTQConfig(inside_layer_modules=["0"])):
        with pytest.raises(UnsupportedOptionError, match="causal language models"):
            quantized(Config(specs(), algo_config=[algorithm]))


def test_sums_of_two_halves_merge() -> None:
    random = np.random.default_rng(0)
    layer = TrainedLayer(
        "fc", "Gemm", AffineChoice("int8", (0.1,), (0,)), None, None, True, MatrixRows(),
        WeightLayout((3, 5), (1, 3, 5), (0, 1, 2)), None,
    )  # fmt: skip

    def observed(rows: Sequence[Any]) -> InputProducts:
        products = InputProducts()
        products.add(layer, None, 8)
        for row in rows:
            products.observe(row)
            products.end_of_sample()
        return products

    rows = [random.standard_normal((1, 5)).astype(np.float32) for _ in range(8)]
    whole, first, second = observed(rows), observed(rows[:4]), observed(rows[4:])
    first.merge(second)
    for value in (whole, first):
        value.sums["fc"].finish()
    np.testing.assert_allclose(first.sums["fc"].inner, whole.sums["fc"].inner, atol=1e-5)
    assert first.sums["fc"].seen == whole.sums["fc"].seen == 8
