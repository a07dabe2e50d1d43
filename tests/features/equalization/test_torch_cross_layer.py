"""Cross-layer equalization of torch networks: the function stays, in training too, and ranges become even."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from uneven_networks import images, make_uneven, network_of

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.features.equalization.on_torch import equalize as equalize_cross_layer
from quark.features.equalization.on_torch import tensors_to_survey as clip_tensors
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.torch.graph import Network
from quark.torch.observe import channel_extremes
from quark.torch.quantization.config.algorithm import CLEConfig

torch.set_num_threads(1)


def conv(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def equalized(model: nn.Module, x: torch.Tensor, steps: int = 1) -> tuple[Network, AlgorithmFacts]:
    network = network_of(model, x)
    return network, equalize(network, x, steps)


def equalize(network: Network, x: torch.Tensor, steps: int = 1) -> AlgorithmFacts:
    options = CrossLayerOptions(steps, clip=ClipTreatment.CALIBRATED)
    extremes = channel_extremes(network, clip_tensors(network, options), [(x,)])
    return equalize_cross_layer(network, options, extremes)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


class Residual(nn.Module):
    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        norm = (lambda count: nn.BatchNorm2d(count)) if has_norm else (lambda count: nn.Identity())
        self.stem = nn.Sequential(conv(4, 6, 3), norm(6), nn.ReLU())
        self.first = nn.Sequential(conv(6, 8, 3), norm(8), nn.ReLU(inplace=True), conv(8, 6, 3), norm(6))
        self.second = nn.Sequential(conv(6, 5), norm(5), nn.LeakyReLU(0.2), conv(5, 6))
        self.head = conv(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = functional.relu(x + self.first(x))
        y: torch.Tensor = self.head(functional.max_pool2d(x + self.second(x), 2))
        return y


class Skips(nn.Module):
    """As a U-Net: down, up, and joined channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv(4, 6, 3), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.mix, self.head = conv(12, 7, 3), conv(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = functional.relu(self.down(x))
        b = functional.relu(self.up(functional.pad(functional.relu(self.deep(a)), (0, 0, 0, 0))))
        mixed = functional.interpolate(functional.relu(self.mix(torch.cat([a, b], 1))), scale_factor=2.0)
        y: torch.Tensor = self.head(mixed)
        return y


class Tokens(nn.Module):
    """Linear layers on [N, T, C], with axes that are moved about."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = conv(4, 6, 2)
        self.mlp = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.1), nn.Linear(9, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        y: torch.Tensor = self.out((tokens + self.mlp(tokens)).mean(1))
        return y


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = conv(4, 4, 3), conv(4, 4, 3), conv(4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.twice(self.relu(self.twice(self.relu(self.first(x))))))
        y: torch.Tensor = self.last(x)
        return y


def depthwise(activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(conv(4, 12, bias=False), nn.BatchNorm2d(12), activation()),
        *(conv(12, 12, 3, groups=12, bias=False), nn.BatchNorm2d(12), activation()),
        *(conv(12, 6, bias=False), nn.BatchNorm2d(6)),
        *(conv(6, 5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3)),
    )


MODELS = {
    "plain": lambda: nn.Sequential(conv(4, 6, 3), nn.ReLU(), conv(6, 5, 3), nn.ReLU(), conv(5, 3)),
    "groups": lambda: nn.Sequential(conv(4, 6, 3, groups=2), nn.ReLU(), conv(6, 4, groups=2), nn.ReLU(), conv(4, 3)),
    "depthwise": lambda: depthwise(nn.ReLU),
    "clipped": lambda: depthwise(nn.ReLU6),
    "residual": lambda: Residual(),
    "residual without norms": lambda: Residual(has_norm=False),
    "skips": Skips,
    "tokens": Tokens,
    "shared": Shared,
    "linear with norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(256, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)
    ),
    "norm without weight": lambda: nn.Sequential(conv(4, 6), nn.BatchNorm2d(6, affine=False), nn.ReLU(), conv(6, 2)),
}
UNCHANGED = ("shared", "norm without weight")


@functools.cache
def captured(name: str) -> tuple[nn.Module, Network]:
    model = make_uneven(MODELS[name](), seed=3)
    return model, network_of(model, images())


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_in_inference_and_in_training(name: str) -> None:
    (model, before), x = captured(name), images()
    for steps in (1, -1):
        after = copy.deepcopy(before)
        facts = equalize(after, x, steps)
        assert_close(after(x), model(x))
        assert bool(facts.changed) == (name not in UNCHANGED)
        results = [in_training(copy.deepcopy(network))(x) for network in (before, after)]
        assert_close(results[1], results[0])


def in_training(network: Network) -> Network:
    """With the statistics of each batch, and without dropout."""
    network.train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return network


def test_random_networks_keep_their_function() -> None:
    changed = 0
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        layers: list[nn.Module] = []
        channels = 4
        for _ in range(5):
            kind = int(torch.randint(7, (), generator=random))
            outputs = channels if kind == 0 else int(torch.randint(2, 7, (), generator=random))
            layers.append(conv(channels, outputs, 3, groups=channels if kind == 0 else 1))
            channels = outputs
            layers += [nn.BatchNorm2d(channels)] if kind % 2 else []
            activations = (nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Hardtanh(0, 2), nn.PReLU(), nn.Identity(), nn.ReLU())
            layers.append(activations[kind])
            layers += [nn.AvgPool2d(2, 1)] if kind == 3 else []
        model, x = make_uneven(nn.Sequential(*layers, conv(channels, 2)), seed), images(seed)
        network, facts = equalized(model, x)
        assert_close(network(x), model(x))
        changed += len(facts.changed)
    assert changed > 6


def weight_of(model: nn.Sequential, index: int) -> torch.Tensor:
    layer = model[index]
    assert isinstance(layer, nn.Conv2d)
    return layer.weight


def bias_of(model: nn.Sequential, index: int) -> torch.Tensor:
    layer = model[index]
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    return layer.bias


def test_two_layers_get_the_same_ranges() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 6, 3, bias=False), nn.ReLU(), conv(6, 5, 3))), images()
    first, second = weight_of(model, 0), weight_of(model, 2)
    product = first.abs().amax((1, 2, 3)) * second.abs().amax((0, 2, 3))
    network, _ = equalized(model, x, steps=-1)
    parameters = dict(network.named_parameters())
    outputs = parameters["0.weight"].abs().amax((1, 2, 3))
    inputs = parameters["2.weight"].abs().amax((0, 2, 3))
    torch.testing.assert_close(outputs * inputs, product)
    torch.testing.assert_close(outputs, inputs)


def test_the_parameters_of_the_model_are_not_touched() -> None:
    model, network = captured("residual")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    equalize(copy.deepcopy(network), images())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])


def clipped(bias: float) -> nn.Sequential:
    """Channel 0 of the first layer reaches the bound where its bias is large."""
    model = make_uneven(nn.Sequential(conv(4, 40), nn.ReLU6(), conv(40, 3)))
    with torch.no_grad():
        weight = weight_of(model, 0)
        weight.mul_(0.2 / weight.abs().amax((1, 2, 3), keepdim=True))
        weight[:20].mul_(3)
        bias_of(model, 0)[:] = 0
        bias_of(model, 0)[0] = bias
    return model


def test_channels_that_reach_the_bound_are_held() -> None:
    x = images()
    network, facts = equalized(clipped(bias=7.0), x)
    assert facts.changed
    weight = dict(network.named_parameters())["0.weight"]
    ratio = (weight / weight_of(clipped(7.0), 0)).amax((1, 2, 3))
    assert ratio[0] == 1
    assert (ratio[1:] != 1).any()
    assert_close(network(x), clipped(7.0)(x))


def test_where_many_channels_reach_the_bound_they_are_all_left() -> None:
    model, x = clipped(bias=0.0), images()
    with torch.no_grad():
        bias_of(model, 0)[:5] = 7
    _, facts = equalized(model, x)
    assert not facts.changed
    assert "is at work in 1" in facts.left[0].reason


def test_without_measured_values_a_clip_is_left() -> None:
    model, x = clipped(bias=0.0), images()
    network, options = network_of(model, x), CrossLayerOptions(clip=ClipTreatment.CALIBRATED)
    assert clip_tensors(network, options) == {"conv2d": 1}
    facts = equalize_cross_layer(network, options, {})
    assert not facts.changed
    assert "were not measured" in facts.left[0].reason


@pytest.mark.parametrize(
    ("name", "node", "reason"),
    [
        ("plain", "4", "is an output of the graph"),
        ("skips", "down", "joins channels"),
        ("norm without weight", "0", "no weight and bias"),
    ],
)
def test_what_is_left_is_named_with_the_reason(name: str, node: str, reason: str) -> None:
    facts = equalize(copy.deepcopy(captured(name)[1]), images())
    assert reason in next(each.reason for each in facts.left if each.node == node)


def test_a_weight_that_two_layers_read_is_left_alone() -> None:
    model, network = captured("shared")
    facts = equalize(network, images())
    assert not facts.changed
    assert any("also read by" in each.reason for each in facts.left)
    torch.testing.assert_close(dict(network.named_parameters())["twice.weight"], model.get_parameter("twice.weight"))


def test_a_dead_channel_stays() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 6), nn.ReLU(), conv(6, 3))), images()
    with torch.no_grad():
        weight_of(model, 0)[2] = 0
        weight_of(model, 2)[:, 3] = 0
    network, _ = equalized(model, x)
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())
    assert_close(network(x), model(x))


@pytest.mark.parametrize("steps", [0, -2, 1.5, True])
def test_impossible_steps_are_refused(steps: Any) -> None:
    with pytest.raises(InvalidValueError, match="steps"):
        CLEConfig(steps)
