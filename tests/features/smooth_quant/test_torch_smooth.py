"""SmoothQuant of torch networks: the function stays, in training too, and outliers move into the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional
from uneven_networks import images, make_uneven, network_of

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.features.smooth_quant import groups
from quark.features.smooth_quant.on_torch import smooth, smooth_tensors
from quark.features.smooth_quant.options import SMOOTH_SAMPLES, SmoothOptions
from quark.features.smooth_quant.smoothing import ChannelMoments, ChannelStatistics
from quark.torch import ModelQuantizer
from quark.torch.export import write_onnx
from quark.torch.graph import Network
from quark.torch.observe import survey
from quark.torch.quantization.config.config import (
    AutoSmoothQuantConfig,
    Config,
    QuantizationConfig,
    QuantizationSpec,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType

torch.set_num_threads(1)
WIDTH = 16


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smooth whatever can be smoothed, whether it gains or not."""
    for name in ("MIN_GAIN_DB", "MIN_CONV_GAIN_DB"):
        monkeypatch.setattr(groups, name, -np.inf)


always = pytest.mark.usefixtures("_always")


def tokens(seed: int = 0, batch: int = 8) -> torch.Tensor:
    return torch.randn(batch, 9, WIDTH, generator=torch.Generator().manual_seed(seed))


def norm(**options: Any) -> nn.LayerNorm:
    """With two channels that are far louder than the others."""
    made = nn.LayerNorm(WIDTH, **options)
    with torch.no_grad():
        made.weight[3], made.weight[11] = 60.0, 30.0
        if made.bias is not None:
            made.bias.copy_(torch.linspace(-1, 1, WIDTH))
    return made


def statistics_of(network: Network, x: torch.Tensor) -> dict[str, ChannelStatistics]:
    wanted = {name: ChannelMoments(axis) for name, axis in smooth_tensors(network).items()}
    surveyed = survey(network, wanted, [(x,)], SMOOTH_SAMPLES)
    return {name: moments.statistics for name, moments in surveyed.items()}


def smoothed(model: nn.Module, x: torch.Tensor, alpha: float | None = 0.5) -> tuple[Network, AlgorithmFacts]:
    network = network_of(model.eval(), x)
    return network, smooth(network, SmoothOptions(alpha), statistics_of(network, x))


def reasons(facts: AlgorithmFacts) -> dict[str, str]:
    return {each.node: each.reason for each in facts.left}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


class Three(nn.Module):
    """A norm that three layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = norm()
        self.a, self.b, self.c = (nn.Linear(WIDTH, size) for size in (8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return torch.as_tensor(self.a(y) * self.b(y) + self.c(y))


class Block(nn.Module):
    """A transformer block; the heads are taken apart and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = norm(), norm(bias=False)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))
        self.gain = nn.Parameter(torch.linspace(0.1, 1, WIDTH))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (4, 4)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        mixed = functional.scaled_dot_product_attention(*(self.heads(value(y)) for value in (self.q, self.k, self.v)))
        x = x + self.gain * self.out(mixed.transpose(1, 2).flatten(2))
        return torch.as_tensor(x + self.mlp(self.second(x)))


class Parameters(nn.Module):
    """A product with a parameter, a sum with another, and a matrix that is one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.place = nn.Parameter(torch.linspace(0.1, 40, WIDTH)), nn.Parameter(torch.randn(1, 9, WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * self.gain + self.place) @ self.matrix


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.adaptive_avg_pool2d(functional.relu(self.conv(x)), 1)
        return torch.as_tensor(self.head(torch.flatten(y, 1)))


def conv_stack() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(4, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 12, 3, groups=3, padding=1), nn.PReLU(12), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(12, 8, 2, stride=2, groups=2), nn.LeakyReLU()),
        *(nn.ConvTranspose2d(8, 6, 2), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)),
    )


def group_norm() -> nn.Sequential:
    norm = nn.GroupNorm(2, 4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 40.0, 2.0, 5.0]))
    return nn.Sequential(nn.Tanh(), norm, nn.Conv2d(4, 6, 3))


# the model, its data, and where factors go, by the type of the operator
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[str, ...]]] = {
    "three": (Three, tokens, ("LayerNormalization norm",)),
    "block": (Block, tokens, ("LayerNormalization first", "LayerNormalization second", "Gemm v", "Gemm mlp.0")),
    "parameters": (Parameters, tokens, ("Mul",)),
    "pooled": (Pooled, images, ("Conv conv",)),
    "convs": (conv_stack, images, ("Conv 0", "Conv 3", "ConvTranspose 6", "ConvTranspose 8")),
    "group norm": (group_norm, images, ("GroupNormalization 1",)),
    "linear with batch norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)),
        lambda: images(batch=64),
        ("Gemm 1",),
    ),
}


@always
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, None])
@pytest.mark.parametrize("name", CASES)
def test_the_function_stays_in_inference_and_in_training(name: str, alpha: float | None) -> None:
    make, data, into = CASES[name]
    model, x = make_uneven(make(), seed=3), data()
    before = network_of(model, x)
    after, facts = smoothed(model, x, alpha)
    assert_close(after(x), model(x))
    for place in into:
        assert any(f"folded into {place}" in phrase for phrase in facts.changed), facts
    assert not any("Mul inserted" in phrase for phrase in facts.changed)
    results = []
    for network in (copy.deepcopy(before), after):
        network.train()
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        results.append(network(x))
    assert_close(results[1], results[0])


@always
def test_all_channels_become_equally_wide_with_alpha_1() -> None:
    x = tokens()
    network, facts = smoothed(Three(), x, alpha=1.0)
    (found,) = statistics_of(network, x).values()
    assert found.reach.max() / found.reach.min() == pytest.approx(1, rel=1e-4)
    (phrase,) = facts.changed
    assert phrase.startswith("a, b, c: alpha 1, folded into LayerNormalization norm, estimated error ")


@always
def test_the_model_itself_is_not_changed() -> None:
    model = Three()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    smoothed(model, tokens())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@always
def test_half_precision_stays_half_precision() -> None:
    model, x = Three().half(), tokens().half()
    network, facts = smoothed(model, x)
    assert facts.changed
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float16}
    torch.testing.assert_close(network(x), model(x), rtol=0, atol=2e-2 * float(model(x).detach().abs().max()))


# --- what is left, and why


class Left(nn.Module):
    """A norm and a layer, with something else about them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False) if kind == "plain norm" else norm()
        self.fc, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.other.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.kind == "input" else self.norm(x)
        if self.kind == "number":
            y = torch.tanh(y) + 1.0
        if self.kind == "gelu":
            y = functional.gelu(y)
        z = self.fc(y)
        if self.kind == "residual":
            z = z + y
        if self.kind == "shared norm":
            z = z + self.norm(z)
        if self.kind == "shared":
            z = self.fc(z)
        return self.other(torch.tanh(z)) if self.kind == "tied" else torch.as_tensor(z)


@always
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain norm", "nothing that computes 'layer_norm' can take the division in"),
        ("input", "nothing that computes 'x' can take the division in"),
        ("number", "nothing that computes 'add' can take the division in"),
        ("gelu", "nothing that computes 'gelu' can take the division in"),
        ("residual", "nothing that computes 'layer_norm' can take the division in"),
        ("shared norm", "nothing that computes 'layer_norm' can take the division in"),
        ("shared", "its weight or bias is also read by 'fc'"),
        ("tied", "its weight or bias is also read by 'other'"),
    ],
)
def test_what_cannot_be_folded_is_left_with_the_reason(kind: str, reason: str) -> None:
    model, x = Left(kind).eval(), tokens()
    network, facts = smoothed(model, x)
    assert facts.changed == ()
    assert reasons(facts)["fc"] == reason
    assert torch.equal(network(x), model(x))


@always
def test_a_batch_norm_of_its_own_takes_nothing_in() -> None:
    model = make_uneven(nn.Sequential(nn.Tanh(), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)))
    _, facts = smoothed(model, images())
    assert reasons(facts) == {"2": "nothing that computes 'batch_norm' can take the division in"}


@always
def test_a_batch_norm_without_parameters_takes_nothing_in() -> None:
    batch_norm = nn.BatchNorm2d(6, affine=False)
    model = make_uneven(nn.Sequential(nn.Conv2d(4, 6, 1), batch_norm, nn.ReLU(), nn.Conv2d(6, 2, 1)))
    network, facts = smoothed(model, images())
    assert reasons(facts)["3"] == "nothing that computes 'relu' can take the division in"
    assert_close(network(images()), model(images()))


class ComputedBias(nn.Module):
    """Its first layer adds a bias that is computed, by a node with the name of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH), torch.randn(8, WIDTH)])
        self.tanh = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.tanh(x.mean((0, 1)) + self.tanh)
        return functional.linear(functional.relu(functional.linear(x, self.weights[0], bias)), self.weights[1])


@always
def test_a_bias_that_is_computed_takes_nothing_in() -> None:
    model, x = ComputedBias(), tokens()
    network, facts = smoothed(model, x)
    assert facts.changed == ()
    assert_close(network(x), model(x))


def test_layers_without_outliers_are_left() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))
    _, facts = smoothed(model, tokens(), alpha=1.0)
    assert facts.changed == ()
    assert "estimated error" in reasons(facts)["1"]


@always
def test_a_weight_stays_in_the_range_of_its_type() -> None:
    layer = nn.Linear(WIDTH, 8)
    with torch.no_grad():
        layer.weight.fill_(6e4)
    network = network_of(nn.Sequential(norm(), layer).half().eval(), tokens().half())
    found = {"layer_norm": ChannelStatistics(-np.ones(16), np.geomspace(0.1, 100, 16), np.ones(16), 1000, 0.0)}
    facts = smooth(network, SmoothOptions(0.5), found)
    assert reasons(facts) == {"1": "its weight would leave the range of its type"}


# --- statistics


def test_statistics_are_those_of_the_first_samples() -> None:
    x, y = tokens(0), tokens(1)
    network = network_of(nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 8)), x)
    for limit, seen in ((8, x), (9, torch.cat([x, y])), (100, torch.cat([x, y]))):
        (found,) = survey(network, {"input_1": ChannelMoments(-1)}, [(x,), (y,)], limit).values()
        lines = seen.reshape(-1, WIDTH).numpy()
        np.testing.assert_array_equal(found.statistics.highest, lines.max(0))
        np.testing.assert_allclose(found.statistics.mean_square, np.square(lines).mean(0), rtol=1e-5)
        assert found.statistics.count == len(lines)


def test_statistics_of_several_processes_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tokens(0), tokens(1)
    network = network_of(nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 8)), x)
    (whole,) = survey(network, {"input_1": ChannelMoments(-1)}, [(x,), (y,)], 100).values()
    other = survey(network, {"input_1": ChannelMoments(-1)}, [(x,)], 100)
    monkeypatch.setattr("quark.torch.observe.gathered", lambda value: [copy.deepcopy(other), copy.deepcopy(value)])
    (found,) = survey(network, {"input_1": ChannelMoments(-1)}, [(y,)], 100).values()
    for name in ("lowest", "highest", "mean_square", "count", "excess"):
        np.testing.assert_allclose(getattr(found.statistics, name), getattr(whole.statistics, name), rtol=1e-6)


def test_what_is_not_finite_is_refused() -> None:
    x = tokens()
    network = network_of(nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 8)), x)
    x[0, 0, 0] = torch.inf
    with pytest.raises(InvalidValueError, match="tensor 'input_1' of the float network: has NaN or Inf"):
        survey(network, {"input_1": ChannelMoments(-1)}, [(x,)], 8)


# --- quantized networks


def encoder() -> nn.Sequential:
    """Norms that make two channels louder, and layers that weigh these less."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight[:, 3] /= 60.0
            layer.weight[:, 11] /= 30.0
        layers += [norm(), layer, nn.Tanh()]
    return nn.Sequential(*layers).eval()


def quantized(model: nn.Module, *algorithms: Any) -> Any:
    activations = QuantizationSpec(Dtype.uint8, symmetric=False)
    weights = QuantizationSpec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True)
    config = Config(QuantizationConfig(activations, activations, weights), algo_config=list(algorithms))
    return ModelQuantizer(config).quantize_model(model, [tokens(0, 16), tokens(1, 16)])


def error_of(network: nn.Module, model: nn.Module) -> float:
    x = tokens(5, 32)
    with torch.no_grad():
        return float((network(x) - model(x)).square().sum() / model(x).square().sum())


@pytest.mark.parametrize("algorithm", [SmoothQuantConfig(), SmoothQuantConfig(alpha=0.6), AutoSmoothQuantConfig()])
def test_outliers_cost_less(algorithm: Any) -> None:
    torch.manual_seed(0)
    model = encoder()
    plain, network = quantized(model), quantized(model, algorithm)
    (facts,) = network.algorithms
    assert facts.name == "SmoothQuant"
    assert len(facts.changed) == 3
    assert error_of(network, model) < error_of(plain, model) / 2


def test_the_exported_file_agrees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen = ModelQuantizer.freeze(quantized(encoder(), SmoothQuantConfig()))
    x, path = tokens(7), tmp_path / "out.onnx"
    write_onnx(frozen, x, path)
    session = onnxruntime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = frozen(x).detach().numpy()
    step = np.ptp(expected) / 255
    assert np.abs(got - expected).max() <= 1.01 * step
    assert np.mean(np.abs(got - expected) > step / 2) < 0.01


def test_without_data_nothing_is_smoothed() -> None:
    weights = QuantizationSpec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True)
    config = Config(QuantizationConfig(weight=weights), algo_config=[SmoothQuantConfig()])
    program = torch.export.export(encoder(), (tokens(),))
    with pytest.warns(UserWarning, match="no calibration data"):
        network = ModelQuantizer(config).quantize_model(program)
    (facts,) = network.algorithms
    assert facts.changed == ()
    assert all("was not looked at for each of its 16 channels" in each.reason for each in facts.left)
