"""Every kind of network in every kind of numbers: it is near the float one, trains, saves, and freezes to the same."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch_networks import KINDS, images, trained
from torch_specs import POWERS_OF_TWO, SPECS, settings

from quark.plan import AffineChoice, QuantizationPlan
from quark.torch.freeze import freeze
from quark.torch.quantization.pipeline import quantize_network
from quark.torch.train.networks import QuantizedNetwork
from quark.torch.train.quantizers import Quantizer

# The relative error of the output that numbers of that kind may leave.
LARGEST_ERROR = {
    "lsq": 1.5,
    "fp8_e5m2": 0.3,
    "int8 and int4 groups": 0.4,
    "mxfp4_e2m1": 0.6,
    "nvfp4": 0.5,
    "int4 groups": 0.4,
    "mx6": 0.35,
    "int16": 0.05,
}
FEW = ("int8", "uint8 and channels", "tqt", "mx6")  # for networks that differ in their operators
MOST = [("resnet", name) for name in SPECS] + [(kind, name) for kind in ("mobilenet", "vit", "unet") for name in FEW]
REST = [pytest.param("mobilenet", name, marks=pytest.mark.slow) for name in SPECS if name not in FEW]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quantized(kind: str, name: str) -> QuantizedNetwork:
    return quantize_network(trained(kind), [images(8)], settings(name))


def assert_same(frozen: torch.Tensor, found: torch.Tensor) -> None:
    """A bias of 32 bits is rounded when it is frozen, which makes a few codes others, and those more of them behind."""
    assert (frozen - found).norm() <= 8e-2 * found.norm()


@pytest.mark.parametrize(("kind", "name"), [*MOST, *REST, ("reused", "int8"), ("reused", "tqt")])
def test_a_quantized_network_is_near_the_float_one_and_freezes_to_the_same(kind: str, name: str) -> None:
    x = images(8, seed=5)
    expected = trained(kind)(x)
    network = quantized(kind, name)
    with torch.no_grad():
        found = network(x)
        frozen = freeze(network)(x)
    assert (found - expected).norm() / expected.norm() < LARGEST_ERROR.get(name, 0.15)
    assert not torch.equal(found, expected)
    assert_same(frozen, found)


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_learns(name: str) -> None:
    network = quantized("resnet", name).train()
    network(images(8)).square().sum().backward()
    idle = [
        path
        for path, parameter in network.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert not idle
    moving = [
        path
        for path, parameter in network.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().max() > 0
    ]
    assert len(moving) > 10
    learned = [path for path in moving if path.endswith((".scale", ".log2_threshold"))]
    assert bool(learned) == (name in ("lsq", "tqt"))


@pytest.mark.parametrize("name", ["int8", "non-overflow", "tqt", "lsq", "mx6", "nvfp4", "int4 groups", "fp8_e4m3"])
def test_training_lowers_the_loss(name: str) -> None:
    x, target = images(16), torch.arange(16) % 5
    network = quantized("resnet", name).train()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(network.parameters(), 0.02, momentum=0.9)
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    network.eval()
    with torch.no_grad():
        assert_same(freeze(network)(x), network(x))


@pytest.mark.parametrize("name", ["int8", "tqt", "mxint8"])
def test_the_state_goes_through_a_file(name: str) -> None:
    x = images(4)
    network = quantized("resnet", name).train()
    network(x).sum().backward()
    torch.optim.SGD(network.parameters(), 0.01).step()
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other = quantized("resnet", name)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.eval()(x), network.eval()(x))
    assert freeze(other).plan == freeze(network).plan


def test_copies_are_independent_and_keep_what_was_chosen() -> None:
    network = quantized("mobilenet", "tqt")
    other = copy.deepcopy(network)
    assert other.plan == network.plan
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert any(float(parameter.abs().max()) > 0 for parameter in network.parameters())
    assert isinstance(other, QuantizedNetwork)


def test_the_same_input_gives_the_same_network() -> None:
    first, second = quantized("unet", "power-of-two mse"), quantized("unet", "power-of-two mse")
    assert first.plan.to_json() == second.plan.to_json()
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_of_a_frozen_network_names_what_is_there(kind: str) -> None:
    frozen = freeze(quantized(kind, "int8"))
    names = {node.name for node in frozen.graph.nodes} | {name for name, _ in frozen.named_parameters()}
    for tensor in frozen.plan:
        assert tensor.tensor in names
        assert all(not reader.node or reader.node in names for reader in tensor.readers)
        assert tensor.readers
    assert QuantizationPlan.from_json(frozen.plan.to_json()) == frozen.plan


@pytest.mark.parametrize("name", POWERS_OF_TWO)
@pytest.mark.parametrize("kind", ["resnet", "mobilenet", "unet"])
def test_scales_for_an_npu_are_powers_of_two_and_one_for_a_tensor(kind: str, name: str) -> None:
    frozen = freeze(quantized(kind, name))
    for tensor in frozen.plan:
        assert isinstance(tensor.choice, AffineChoice)
        assert tensor.choice.format == "int8"
        assert tensor.choice.zero_point == (0,)
        assert math.frexp(tensor.choice.scale[0])[0] == 0.5


def test_freezing_leaves_the_trained_network_as_it_is() -> None:
    network = quantized("resnet", "tqt").train()
    before = {name: each.clone() for name, each in network.state_dict().items()}
    freeze(network)
    assert network.training
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())


def test_a_frozen_network_stays_in_eval_mode() -> None:
    frozen = freeze(quantized("resnet", "lsq"))
    assert freeze(frozen) is frozen
    assert not frozen.train().training
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not any("Lsq" in type(module).__name__ for module in frozen.modules() if isinstance(module, Quantizer))


def test_quantizing_leaves_the_model_as_it_is() -> None:
    model = trained("resnet")
    before = copy.deepcopy(model.state_dict())
    quantize_network(model, [images(8)], settings("int8"))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
