"""What people hand over that no demonstration shows: odd models, odd data, odd configurations.

Either it works, through training, freezing and an ONNX file that computes the same, or the error names what is wrong.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from quark.errors import InvalidValueError, ModelError, QuarkError, UnsupportedTypeError
from quark.torch import ModelQuantizer, export_for_training
from quark.torch.export import write_onnx
from quark.torch.quantization.config.config import CLEConfig, Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer.observer import PerChannelMinMaxObserver
from quark.torch.train.networks import QuantizedNetwork

INT8 = QuantizationSpec(Dtype.int8)
CONFIG = Config(QuantizationConfig(INT8, INT8, INT8, INT8))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def everywhere(dtype: Dtype) -> Config:
    spec = QuantizationSpec(dtype)
    return Config(QuantizationConfig(spec, spec, spec))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    ).eval()


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


def quantize(model: Any, *batches: Any, config: Config = CONFIG) -> QuantizedNetwork:
    return ModelQuantizer(config).quantize_model(model, list(batches) or [images()])


def train_a_step(network: nn.Module, *inputs: torch.Tensor) -> None:
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    network(*inputs).square().mean().backward()
    optimizer.step()
    network.eval()


def sqnr_db(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()))


class Attention(nn.Module):
    """Puts the sequence before the batch inside, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Star(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layer(inputs[0]))


class ByName(Star):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.relu(self.layer(x) - self.layer(y))


class Named(nn.Module):
    """A model whose layer has whatever name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1)))
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(self, self.name)(x)
        return result


def test_bias_correction_does_not_mind_where_the_batch_is() -> None:
    model, x = Attention().eval(), torch.randn(4, 16, 12)
    with torch.no_grad():
        assert sqnr_db(model(x), quantize(model, x)(x)) > 20


@pytest.mark.parametrize("layers", [(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), (nn.Linear(8, 8), nn.Linear(8, 4))])
def test_samples_without_a_batch_are_quantized(layers: tuple[nn.Module, nn.Module]) -> None:
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval()
    x = torch.randn(3, 8, 8) if isinstance(layers[0], nn.Conv2d) else torch.randn(8)
    with torch.no_grad():
        assert sqnr_db(model(x), quantize(model, x, x)(x)) > 20


def test_inputs_behind_a_star_and_by_name_alone_are_captured() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert quantize(Star(), x)(torch.randn(3, 6)).shape == (3, 4)
    model = ByName()
    with torch.no_grad():
        assert sqnr_db(model(x, y=y), quantize(model, {"y": y, "x": x})(x, y=y)) > 20


class Backbone(nn.Module):
    """A part that is not to learn, and one that is to compute in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = functional.relu(self.norm(self.fixed(x)))
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = self.head(x)
        return result


def test_blocks_without_gradients_are_quantized_and_do_not_learn(tmp_path: Path) -> None:
    model, x = Backbone().eval(), images()
    network = quantize(model, x)
    with torch.no_grad():
        assert sqnr_db(model(x), network(x)) > 20
    network(x).sum().backward()
    grads = {name: parameter.grad is not None for name, parameter in network.named_parameters()}
    assert grads["head.weight"]
    assert not grads["fixed.weight"]
    report = write_onnx(network, x, tmp_path / "model.onnx")
    assert report.parity is not None


def test_values_may_have_the_names_of_methods() -> None:
    class Cast(Star):
        def forward(self, half: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.layer(half.float()) + self.layer(half.to(torch.float64).to(torch.float32))

    assert quantize(Cast(), torch.randn(4, 6))(torch.randn(3, 6)).shape == (3, 4)


def test_inputs_within_lists_keep_a_free_batch() -> None:
    class Listed(Star):
        def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return self.layer(parts[0]) + self.layer(parts[1])

    program = export_for_training(Listed(), ([torch.randn(1, 6), torch.randn(1, 6)],))
    assert program.module()([torch.randn(5, 6), torch.randn(5, 6)]).shape == (5, 4)


@pytest.mark.parametrize(
    "name",
    [
        "plan",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("quantizers", "operations", "configuration", "dropouts", "algorithms")
        ),
    ],
)
def test_layers_may_have_the_names_that_networks_use(name: str, tmp_path: Path) -> None:
    model, x = Named(name).eval(), torch.randn(4, 6)
    network = quantize(model, x)
    assert len(network.plan.tensors) > 0
    train_a_step(network, x)
    report = write_onnx(network, x, tmp_path / "model.onnx")
    assert report.parity is not None
    assert quantize(model, x, config=Config(QuantizationConfig(weight=INT8), exclude=[f"{name}*"])).plan.tensors == ()


@pytest.mark.parametrize("name", ["class", "graph", "meta", "code"])
def test_names_that_a_graph_module_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}'"):
        quantize(Named(name), torch.randn(4, 6))


def test_a_model_that_torch_fx_traced_is_quantized() -> None:
    assert quantize(torch.fx.symbolic_trace(convolutions()))(images()).shape == (4, 5)


@pytest.mark.parametrize("dtype", [Dtype.int16, Dtype.uint16])
def test_a_bias_of_32_bits_does_not_overflow_after_training(dtype: Dtype) -> None:
    """Its step is the product of two small ones, and the weight's follows the weight."""
    x = images()
    network = quantize(convolutions(), x, config=everywhere(dtype))
    train_a_step(network, x)
    with torch.no_grad():
        assert sqnr_db(network(x), ModelQuantizer.freeze(network)(x)) > 60


def test_a_scale_that_training_broke_is_named() -> None:
    network = quantize(convolutions())
    network.get_buffer("quantizers.relu.scale").fill_(float("nan"))
    with pytest.raises(ModelError, match="'relu'"):
        ModelQuantizer.freeze(network)


def test_activations_of_four_bits_that_are_moved_export(tmp_path: Path) -> None:
    report = write_onnx(quantize(convolutions(), config=everywhere(Dtype.int4)), images(), tmp_path / "model.onnx")
    assert report.parity is not None
    assert report.parity.first_divergence is None


def channels(axis: int) -> Config:
    weight = QuantizationSpec(Dtype.int8, PerChannelMinMaxObserver, qscheme=QSchemeType.per_channel, ch_axis=axis)
    return Config(QuantizationConfig(INT8, None, weight))


def test_scales_for_input_channels_leave_the_bias_in_float() -> None:
    frozen = ModelQuantizer.freeze(quantize(convolutions(), config=channels(1)))
    assert not [tensor for tensor in frozen.plan if tensor.role.value == "bias"]
    with pytest.raises(InvalidValueError, match=r"'0\.weight' has 4 axes"):
        quantize(convolutions(), config=channels(9))


def test_operands_of_32_bits_and_a_lone_algorithm_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="at most 16 bits"):
        everywhere(Dtype.int32)
    with pytest.raises(UnsupportedTypeError, match="expected a list"):
        ModelQuantizer(Config(QuantizationConfig(INT8), algo_config=CLEConfig()))
    with pytest.raises(UnsupportedTypeError, match="expected a Config"):
        ModelQuantizer(QuantizationConfig(INT8))


def test_a_network_is_copied_and_not_quantized_again() -> None:
    network = quantize(convolutions())
    x = images()
    for value in (network, ModelQuantizer.freeze(network)):
        assert torch.equal(copy.deepcopy(value)(x), value(x))
        with pytest.raises(ModelError, match="float model"):
            quantize(value, x)


def autocast_inside() -> nn.Module:
    class Mixed(Star):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    return Mixed()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no values": (lambda: convolutions().to("meta"), images(), "meta device"),
    "another type": (lambda: convolutions().half(), images(), r"does not run on float32\[4, 3, 8, 8\]"),
    "autocast": (autocast_inside, torch.randn(4, 6), "autocast"),
    "no samples": (convolutions, images(0), "without samples"),
    "sparse": (convolutions, images().to_sparse(), "to_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(name: str) -> None:
    model, batch, reason = REFUSED[name]
    with pytest.raises(QuarkError, match=reason):
        quantize(model(), batch)


def test_no_step_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = quantize(convolutions())
        train_a_step(network, images())
        ModelQuantizer.freeze(network)
