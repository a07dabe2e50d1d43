"""Bias correction of torch networks: the mean of the middle half of what rounding does, in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from uneven_networks import images, make_uneven, network_of

from quark.errors import InvalidValueError
from quark.features.bias_correction.layers import middle_mean
from quark.features.bias_correction.on_torch import correct_biases, give_biases
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice, Reader
from quark.rounded import rounded
from quark.torch.graph import Network
from quark.torch.rounded import rounded as kept
from quark.torch.train.conv_batch_norm import ConvBatchNorm

torch.set_num_threads(1)


def blocks(name: str, axis: int) -> BlockChoice:
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat)
    return BlockChoice(BlockQuantizer(fmt), axis)


COARSE = AffineChoice("int4", (0.3,), (0,))
CHANNELS = AffineChoice("int4", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (0,) * 6, axis=0)
OPTIONS = TorchBiasCorrectionOptions()


def conv(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def choices_of(network: fx.GraphModule, data: Choice | None, weight: Choice | None) -> dict[Reader, Choice]:
    """The same for every layer with a weight."""
    layers = [node for node in network.graph.nodes if node.op == "call_module" or len(node.args) > 2]
    operands = ((Reader(node.name, index), each) for node in layers for index, each in enumerate((data, weight)))
    return {reader: choice for reader, choice in operands if choice is not None}


def prepared(model: nn.Module, x: torch.Tensor) -> Network:
    network = network_of(model, x)
    give_biases(network)
    return network


def plain(x: torch.Tensor, choice: Choice | None) -> torch.Tensor:
    """By the arithmetic of numpy, which the ONNX flow uses."""
    return x if choice is None else torch.from_numpy(rounded(x.detach().numpy(), choice))


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LAYERS: dict[str, tuple[Callable[[], nn.Module], Compute, bool]] = {
    "convolution": (lambda: conv(4, 6), lambda x, w: functional.conv2d(x, w, padding=1), False),
    "without bias": (lambda: conv(4, 6, bias=False), lambda x, w: functional.conv2d(x, w, padding=1), False),
    "groups": (lambda: conv(4, 6, groups=2), lambda x, w: functional.conv2d(x, w, padding=1, groups=2), False),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False),
        lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        False,
    ),
    "linear": (lambda: nn.Linear(8, 6), functional.linear, True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("data", [COARSE, None], ids=["data", "float data"])
def test_a_bias_takes_the_middle_mean_of_the_errors(name: str, data: Choice | None) -> None:
    make, compute, is_last = LAYERS[name]
    layer, x = make_uneven(make()), images(batch=8)
    network = prepared(nn.Sequential(layer), x)
    before = network(x)
    facts = correct_biases(network, choices_of(network, data, COARSE), [(x[:3],), (x[3:],)], OPTIONS)
    weight = layer.get_parameter("weight")
    error = compute(x, weight) - compute(plain(x, data), plain(weight, COARSE))
    others = (1, 2) if is_last else (2, 3)
    middle = error.mean(dim=others).sort(dim=0).values[2:6].mean(0)
    shift = (network(x) - before).mean(dim=(0, *others))
    torch.testing.assert_close(shift, middle, rtol=1e-3, atol=1e-5)
    assert len(facts.changed) == 1
    assert not facts.left


def test_a_layer_with_a_batch_norm_is_corrected_in_the_batch_norm() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 6, bias=False), nn.BatchNorm2d(6), nn.ReLU())), images(batch=8)
    network = prepared(model, x)
    fused = network.get_submodule("0")
    assert isinstance(fused, ConvBatchNorm)
    weight, before = fused.folded_weight().detach(), fused.batch_norm.bias.detach().clone()
    correct_biases(network, choices_of(network, COARSE, CHANNELS), [(x,)], OPTIONS)
    error = functional.conv2d(x, weight, padding=1) - functional.conv2d(
        plain(x, COARSE), plain(weight, CHANNELS), padding=1
    )
    expected = torch.from_numpy(middle_mean(error.mean((2, 3)).numpy()))
    torch.testing.assert_close(fused.batch_norm.bias - before, expected, rtol=1e-3, atol=1e-5)


def test_the_errors_are_those_on_the_float_networks_activations() -> None:
    """A second layer is corrected for its own rounding only, whatever the first does."""
    model, x = make_uneven(nn.Sequential(conv(4, 6), nn.ReLU(), conv(6, 3))), images(batch=8)
    network = prepared(model, x)
    choices = choices_of(network, COARSE, COARSE)
    last = list(choices)[-1].node
    correct_biases(network, choices, [(x,)], OPTIONS)
    alone = prepared(model, x)
    correct_biases(
        alone, {reader: choice for reader, choice in choices.items() if reader.node == last}, [(x,)], OPTIONS
    )
    biases = [dict(value.named_parameters())["2.bias"] for value in (network, alone)]
    torch.testing.assert_close(biases[0], biases[1])


def test_the_quantized_network_comes_closer_on_the_mean() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 5)), 1), images(1, 32)
    network = prepared(model, x)
    choices = choices_of(network, COARSE, AffineChoice("int4", (0.2,), (0,)))

    def mean_error() -> float:
        return (model(x) - _quantized(network, choices, x)).mean((0, 2, 3)).abs().mean().item()

    before = mean_error()
    correct_biases(network, choices, [(x,)], OPTIONS)
    assert mean_error() < 0.5 * before


def _quantized(network: fx.GraphModule, choices: dict[Reader, Choice], x: torch.Tensor) -> torch.Tensor:
    """The network with every layer's operands rounded, along its own activations."""

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            seen = [choices.get(Reader(n.name, index)) for index in (0, 1)]
            if seen == [None, None]:
                return super().run_node(n)
            arguments: Any = self.map_nodes_to_values(n.args, n)
            data, weight, bias, *rest = arguments
            return n.target(kept(data, seen[0]), kept(weight, seen[1]), bias, *rest)  # type: ignore[operator]

    with torch.no_grad():
        (result,) = Run(network).run(x, enable_io_processing=False)
    return torch.as_tensor(result)


def test_odd_samples_do_not_decide() -> None:
    values = np.array([[0.0], [1.0], [2.0], [3.0], [1000.0], [-1000.0], [1.5], [1.5]])
    assert middle_mean(values) == pytest.approx(1.5)
    assert middle_mean(np.array([[4.0]])) == 4


def test_no_more_samples_are_looked_at_than_asked_for() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 6))), images(batch=8)
    first, all_of_it = (prepared(model, x) for _ in range(2))
    correct_biases(first, choices_of(first, COARSE, COARSE), [(x[:4],), (x[4:] * 100,)], TorchBiasCorrectionOptions(3))
    correct_biases(all_of_it, choices_of(all_of_it, COARSE, COARSE), [(x[:3],)], OPTIONS)
    assert torch.equal(dict(first.named_parameters())["0.bias"], dict(all_of_it.named_parameters())["0.bias"])


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.matrix = conv(4, 4), nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.layer(self.layer(x)), self.matrix)


def test_layers_that_share_a_bias_and_products_are_left() -> None:
    model, x = make_uneven(Twins()), images()
    network = prepared(model, x)
    everywhere = {Reader(node.name, index): COARSE for node in network.graph.nodes for index in (0, 1)}
    facts = correct_biases(network, everywhere, [(x,)], OPTIONS)
    reasons = [each.reason for each in facts.left if each.op_type in ("Conv", "MatMul")]
    assert reasons == ["its bias is shared with another layer"] * 2 + ["no bias is added to its result"]
    assert not facts.changed


def test_biases_that_are_given_change_nothing_and_train() -> None:
    model = nn.Sequential(conv(4, 6, bias=False), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2, bias=False))
    x = images()
    network = network_of(make_uneven(model), x)
    before = network(x)
    names = {name for name, _ in network.named_parameters()}
    give_biases(network)
    given = {name: parameter for name, parameter in network.named_parameters() if name not in names}
    assert {name: tuple(each.shape) for name, each in given.items()} == {"0.bias": (6,), "2.bias": (4,)}
    assert torch.equal(network(x), before)
    network(x).sum().backward()
    assert all(each.grad is not None for each in given.values())


def test_two_calls_of_one_layer_are_given_biases_of_their_own() -> None:
    model = make_uneven(Twins())
    model.get_submodule("layer").register_parameter("bias", None)
    network = network_of(model, images())
    give_biases(network)
    assert {name for name, _ in network.named_parameters()} >= {"layer.bias", "layer.bias_1"}


@pytest.mark.parametrize(
    "choice",
    [COARSE, AffineChoice("uint8", (0.05,), (128,)), AffineChoice("int8", (0.01, 0.02, 0.03, 0.04), (0,) * 4, axis=0)]
    + [AffineChoice("int4", (0.1,) * 8, (0,) * 8, axis=1, group_size=16), blocks("mxfp4_e2m1", 1), blocks("mx6", 0)]
    + [FloatChoice("bfloat16"), BlockChoice(blocks("bfp16", 1).quantizer, 1, to_bfloat16_first=True)],
    ids=str,
)
def test_rounding_is_that_of_the_onnx_flow(choice: Choice) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32))
    assert torch.equal(kept(x, choice), torch.from_numpy(rounded(x.numpy(), choice)))


def test_what_is_not_known_before_run_time_is_not_rounded() -> None:
    x = images()
    assert kept(x, None) is x
    assert kept(x, DynamicChoice("uint8")) is x


def test_nan_is_refused_with_the_layer() -> None:
    model, x = make_uneven(nn.Sequential(conv(4, 6))), images()
    network = prepared(model, x)
    with pytest.raises(InvalidValueError, match="layer '0': NaN"):
        correct_biases(network, choices_of(network, COARSE, COARSE), [(x * float("nan"),)], OPTIONS)


@pytest.mark.parametrize("samples", [0, -1, 1.5, True])
def test_impossible_numbers_of_samples_are_refused(samples: Any) -> None:
    with pytest.raises(InvalidValueError, match="samples"):
        TorchBiasCorrectionOptions(samples)
