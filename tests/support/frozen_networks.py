"""Small networks of torch, quantized by hand: what `freeze` gives, without the steps that lead there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from quark.formats.affine import choose_affine
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.plan import (
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    TensorChoice,
)
from quark.torch.capture import capture
from quark.torch.graph import Network, attribute_of, is_call, set_attribute
from quark.torch.train.networks import FrozenNetwork, with_state
from quark.torch.train.quantizers import (
    AffineQuantizer,
    BlockFakeQuantizer,
    DynamicQuantizer,
    FloatFakeQuantizer,
    Quantizer,
)

aten = torch.ops.aten
WEIGHTED = (aten.conv2d.default, aten.linear.default)
OTHERS = (aten.matmul.default, aten.add.Tensor, aten.cat.default, aten.adaptive_avg_pool2d.default)


class Plain(nn.Module):
    """Convolutions with activations, a mean, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6())
        )
        self.classifier = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.features(image)
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.relu(self.stem(x))
        y = self.relu(self.conv2(self.relu(self.conv1(x))) + x)
        both = torch.cat([x, y], 1)
        pooled = functional.max_pool2d(both, 2)
        return self.fc(pooled.mean((2, 3))), pooled


class Attention(nn.Module):
    """Linear layers on sequences, products of activations, a norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(tokens)
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / x.shape[-1] ** 0.5
        x = tokens + self.out(torch.matmul(torch.softmax(scores, -1), self.value(x)))
        return self.head(functional.gelu(x).mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (Plain, (4, 3, 12, 12)),
    "residual": (Residual, (4, 3, 16, 16)),
    "attention": (Attention, (4, 6, 32)),
}


@dataclass(frozen=True)
class Style:
    """How the tensors of a test are quantized; None leaves them."""

    activation: str | None = "int8"
    weight: str | None = "int8"
    is_per_channel: bool = True
    is_power_of_two: bool = False
    group_size: int | None = None
    is_dynamic: bool = False
    has_bias: bool = False

    @property
    def has_blocks(self) -> bool:
        return any(
            value is not None and hasattr(get_format(value), "element") for value in (self.activation, self.weight)
        )


STYLES = {
    "int8": Style(has_bias=True),
    "int8_pof2": Style(is_power_of_two=True, is_per_channel=False, has_bias=True),
    "uint8": Style("uint8", "int8"),
    "int16": Style("int16", "int8"),
    "uint16": Style("uint16", "int8"),
    "int4": Style("uint4", "int4", has_bias=True),
    "int3": Style("int3", "int3"),
    "int4_groups": Style("int8", "int4", group_size=8),
    "mxfp4": Style("mxfp4_e2m1", "mxfp4_e2m1"),
    "mx6": Style("mx6", "mx6"),
    "bfp16": Style("bfp16", "bfp16"),
    "bfloat16": Style("bfloat16", "bfloat16"),
    "float16": Style("float16", "float16"),
    "dynamic": Style("uint8", "int8", is_dynamic=True),
    "weight_only": Style(None, "int8"),
    "weight_only_int4": Style(None, "int4", group_size=16),
    "activations_only": Style("uint8", None),
}


def example_of(name: str, batch: int | None = None) -> torch.Tensor:
    shape = NETWORKS[name][1]
    return torch.randn((batch or shape[0], *shape[1:]), generator=torch.Generator().manual_seed(11))


def float_network(name: str) -> Network:
    return copy.deepcopy(_captured(name))


@functools.cache
def _captured(name: str) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = NETWORKS[name][0]().eval()
    return capture(module, lambda: (example_of(name),))


def frozen_network(name: str, style: Style | str) -> FrozenNetwork:
    """The network with quantizers on the inputs and weights of its layers."""
    return copy.deepcopy(_frozen(name, style))


@functools.cache
def _frozen(name: str, style: Style | str) -> FrozenNetwork:
    network = float_network(name)
    freezing = _Freezing(network, example_of(name), STYLES[style] if isinstance(style, str) else style)
    freezing.run()
    state = {"plan": QuantizationPlan(tuple(freezing.plan)), "config": {"name": str(style)}, "algorithms": ()}
    frozen: FrozenNetwork = with_state(network, FrozenNetwork, state)
    return frozen.eval().requires_grad_(False)


class _Freezing:
    def __init__(self, network: Network, example: torch.Tensor, style: Style) -> None:
        self.network, self.style = network, style
        recorder = _Recorder(network)
        with torch.no_grad():
            recorder.run(example)
        self.seen = recorder.seen
        self.made: dict[str, fx.Node] = {}
        self.plan: list[TensorChoice] = []

    def run(self) -> None:
        for node in list(self.network.graph.nodes):
            if is_call(node, *WEIGHTED):
                self._weight(node)
            has_input = not self.style.is_dynamic or is_call(node, *WEIGHTED)
            if is_call(node, *WEIGHTED) and has_input:
                self._activation(node, node.args[0])
            elif is_call(node, *OTHERS) and has_input and not self.style.has_blocks:
                for source in node.all_input_nodes:
                    self._activation(node, source)
        self.network.graph.lint()
        self.network.recompile()

    def _weight(self, node: fx.Node) -> None:
        weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
        assert isinstance(weight, fx.Node)
        array = attribute_of(self.network, weight)
        assert array is not None
        if self.style.weight is None:
            return
        axis = 1 if self.style.group_size or self.style.has_blocks else 0 if self.style.is_per_channel else None
        is_grouped = self.style.group_size is not None and array.shape[1] % self.style.group_size == 0
        choice = self._choice(array, self.style.weight, axis, self.style.group_size if is_grouped else None)
        self._put(weight, node, choice, Role.WEIGHT, array.shape)
        if self.style.has_bias and bias is not None:
            data = node.args[0]
            assert isinstance(data, fx.Node)
            source = self._choice(self.seen[data.name], self.style.activation, None, None)
            assert isinstance(source, AffineChoice)
            assert isinstance(choice, AffineChoice)
            scale = tuple(float(np.float32(source.scale[0]) * np.float32(each)) for each in choice.scale)
            values = attribute_of(self.network, bias)
            self._put(bias, node, AffineChoice("int32", scale, (0,) * len(scale), choice.axis), Role.BIAS, values.shape)

    def _activation(self, node: fx.Node, source: fx.Node) -> None:
        if self.style.activation is None or source.op == "get_attr":
            return
        array = self.seen[source.name]
        axis = (1 if array.dim() == 4 else -1) if self.style.has_blocks else None
        self._put(source, node, self._choice(array, self.style.activation, axis, None, True), Role.ACTIVATION, ())

    def _choice(
        self, array: torch.Tensor, name: str, axis: int | None, group_size: int | None, is_activation: bool = False
    ) -> Choice:
        fmt = get_format(name)
        if hasattr(fmt, "element"):
            return BlockChoice(BlockQuantizer(fmt), axis)
        if name in ("bfloat16", "float16"):
            return FloatChoice(name)
        if self.style.is_dynamic and is_activation:
            return DynamicChoice(name)
        if group_size is not None:
            assert axis is not None
            rows = (
                array.detach().movedim(axis, -1).reshape(*array.shape[:axis], -1, group_size, *array.shape[axis + 1 :])
            )
            low, high = rows.amin(axis + 1), rows.amax(axis + 1)
        else:
            axes = [index for index in range(array.dim()) if index != axis]
            low, high = (array.amin(axes), array.amax(axes)) if axes else (array, array)
        low, high = low.detach().reshape(-1), high.detach().reshape(-1)
        scale, zero_point = choose_affine(low, high, fmt, symmetric=name.startswith("int"))
        if self.style.is_power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return AffineChoice(name, tuple(scale.tolist()), tuple(zero_point.tolist()), axis, group_size)

    def _put(self, source: fx.Node, reader: fx.Node, choice: Choice, role: Role, shape: tuple[int, ...]) -> None:
        name = source.name
        tensor = str(source.target) if source.op == "get_attr" else name
        self.plan.append(TensorChoice(tensor, role, choice, (Reader(reader.name, 0),), "by hand"))
        if name not in self.made:
            set_attribute(self.network, f"quantizers.{name}", _quantizer(name, role, choice, tuple(shape)))
            with self.network.graph.inserting_after(source):
                self.made[name] = self.network.graph.call_module(f"quantizers.{name}", (source,))
            self.made[name].meta["val"] = source.meta.get("val")
        reader.replace_input_with(source, self.made[name])


class _Recorder(fx.Interpreter):
    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__(network)
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.seen[n.name] = value
        return value


def _quantizer(name: str, role: Role, choice: Choice, shape: tuple[int, ...]) -> Quantizer:
    if isinstance(choice, AffineChoice):
        return AffineQuantizer(name, role, choice, shape)
    if isinstance(choice, BlockChoice):
        return BlockFakeQuantizer(name, role, choice)
    if isinstance(choice, FloatChoice):
        return FloatFakeQuantizer(name, role, choice)
    return DynamicQuantizer(name, role, choice)
