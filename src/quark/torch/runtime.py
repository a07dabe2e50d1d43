"""The arithmetic of ONNX Runtime's integer kernels in torch, so that evaluation and training see what is shipped.

Fake quantization computes a layer in float and rounds the result. The kernels add codes, which is exact, and go from
the sum to the code of the result by one product in float32. With x, w, a, b the codes less their zero points:

    QLinearConv, QGemm          y = rint(float32(sum x w + bias) (sx sw / sy)) + zy      bias in steps of sx sw
    QGemm without a quantizer   y = float32(sum x w + bias) (sx sw)
    QLinearAdd                  y = rint(fma(a, sa / sy, fma(b, sb / sy, z)))            z = zy - (sa za + sb zb) / sy
    QLinearGlobalAveragePool    y = rint(float32(sum x) (sx / (sy n))) + zy

Relu and Clip behind them limit the codes. Everything else is computed as the standard says, by both. Deep networks
amplify single codes that are rounded the other way, so these formulas are followed to the last bit. They are those of
x86-64 processors with AVX2; other processors add with other roundings.

Sums are exact in float32 if none can exceed 2^24, and computed in float64 otherwise.

Integer kernels need unsigned activations on x86-64: signed ones that have several readers stay in float there. So the
file of a simulated network has uint8 activations: codes and zero points are 128 higher, and the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from quark.decide.scales import derived_bias
from quark.errors import ModelError
from quark.formats.affine import AffineParameters, integer_format, quantize_affine
from quark.plan import AffineChoice, QuantizationPlan, Role, TensorChoice
from quark.torch.graph import Network, attribute_of, copy_graph, module_of, set_attribute
from quark.torch.pickling import read_target, written_target
from quark.torch.train.conv_batch_norm import CONVOLUTIONS, ConvBatchNorm, LinearOperation
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork
from quark.torch.train.quantizers import LearnedQuantizer, Quantizer

aten = torch.ops.aten
LIMITING = (aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default)
MOVING = (  # their results have the codes of their inputs
    *(aten.flatten.using_ints, aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.contiguous.default, aten.max_pool2d.default),
)
_EXACT_FLOAT32 = 1 << 24
_KERNELS = "kernels"  # the folder of a network's simulated layers


class RuntimeNetwork(Network):
    """A network that computes what ONNX Runtime does with its file. Its parameters are those of `network`."""

    @property
    def network(self) -> QuantizedNetwork | FrozenNetwork:
        """The network that is simulated."""
        return self.meta[_KERNELS][0]  # type: ignore[no-any-return]

    @property
    def integer_layers(self) -> tuple[str, ...]:
        """The nodes that are computed by integer kernels."""
        return self.meta[_KERNELS][1]  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> RuntimeNetwork:
        """Train, or with False evaluate, together with `network`."""
        super().train(mode)
        self.network.train(mode)
        return self


def simulate_runtime(network: Network) -> RuntimeNetwork:
    """Return a module that computes a quantized network as ONNX Runtime's integer kernels do.

    It shares parameters and quantizers with `network`: train either of them, and freeze `network`. While it trains, its
    outputs are those of the kernels and its gradients those of fake quantization; layers whose batch norms are not
    frozen yet are fake quantized, because the runtime has no statistics of batches, and so are those behind a dropout.
    `export_onnx` takes it: the file has unsigned activations, which integer kernels need.

    >>> from quark.torch import ModelQuantizer
    >>> from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    >>> from quark.torch.quantization.config.type import Dtype
    >>> int8 = QuantizationSpec(Dtype.int8)
    >>> config = Config(global_quant_config=QuantizationConfig(int8, int8, int8))
    >>> quantized = ModelQuantizer(config).quantize_model(nn.Linear(8, 2), [torch.rand(4, 8)])
    >>> simulate_runtime(quantized).integer_layers
    ('linear',)
    """
    if isinstance(network, RuntimeNetwork):
        return network
    if not isinstance(network, (QuantizedNetwork, FrozenNetwork)):
        raise ModelError(
            "simulate_runtime: expected what ModelQuantizer.quantize_model or freeze gave, got "
            f"{type(network).__name__}"
        )
    graph = copy_graph(network.graph)
    kernels: dict[fx.Node, tuple[fx.Node, Kernel]] = {}
    for node in graph.nodes:
        integer_kernel = _kernel(network, node)
        if integer_kernel is not None:
            kernels[node] = integer_kernel
    names = []
    made = RuntimeNetwork(network, graph)
    made.meta = dict(network.meta)
    for node, (last, kernel) in kernels.items():
        name = str(node.name)
        names.append(name)
        path = f"{_KERNELS}.{name}"
        set_attribute(made, path, kernel)
        arguments = [arg for arg in node.args if isinstance(arg, fx.Node)]
        sources = [_raw(network, argument) if place == 2 else argument for place, argument in enumerate(arguments)]
        with graph.inserting_before(last):
            call = graph.call_module(path, tuple(sources))
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
    graph.eliminate_dead_code()
    made.meta[_KERNELS] = (network, tuple(names))
    made.recompile()
    made.training = network.training
    return made


def unsigned(plan: QuantizationPlan) -> QuantizationPlan:
    """Return the plan with int8 activations as uint8: codes and zero points are 128 higher."""

    def shifted(entry: TensorChoice) -> TensorChoice:
        choice = entry.choice
        if entry.role is not Role.ACTIVATION or not isinstance(choice, AffineChoice) or choice.format != "int8":
            return entry
        zero_points = tuple(zero_point + 128 for zero_point in choice.zero_point)
        return replace(entry, choice=replace(choice, format="uint8", zero_point=zero_points))

    return replace(plan, tensors=tuple(map(shifted, plan.tensors)))


class Kernel(nn.Module):
    """A layer with the quantizers around it. `limiting` are the activations between it and the quantizer `output`."""

    def __init__(
        self, inputs: Sequence[Quantizer], output: Quantizer | None, limiting: Sequence[Callable[..., torch.Tensor]]
    ) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(inputs)
        self.output = output
        self.limiting = tuple(limiting)

    def codes_of(self, total: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The values of the output's codes for exact sums, `scale` being that of one unit of the sum."""
        assert self.output is not None
        own = _scale(self.output)
        return self.values_of(torch.round(total.float() * (scale / own)) + _zero_point(self.output))

    def values_of(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of codes, limited to what the format and the activations leave."""
        assert self.output is not None
        ends = torch.tensor([-torch.inf, torch.inf], device=codes.device)
        for function in self.limiting:
            ends = function(ends)
        choice = _affine(self.output)
        assert choice is not None
        own, zero_point = _scale(self.output), _zero_point(self.output)
        fmt = integer_format(choice.format)
        low, high = (torch.round(ends / own) + zero_point).clamp(fmt.qmin, fmt.qmax).unbind()
        return (codes.clamp(low, high) - zero_point) * own

    def fake_quantized(self, value: torch.Tensor) -> torch.Tensor:
        """Activations and the quantizer behind them, as in training."""
        for function in self.limiting:
            value = function(value)
        return value if self.output is None else self.output(value)


class SumOfProducts(Kernel):
    """A convolution or linear layer. Its arguments are the input, the quantized weight and the float bias; a layer with
    a batch norm has its parameters itself."""

    def __init__(
        self, operation: LinearOperation, layer: ConvBatchNorm | None, dropouts: Sequence[nn.Module], *others: Any
    ) -> None:
        super().__init__(*others)
        self.operation = operation
        self.layer = layer
        self.dropouts = nn.ModuleList(dropouts)  # their results have no codes while training

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        layer = self.layer
        if layer is not None:
            if layer.batch_norm.training:
                return self.fake_quantized(layer(x))
            assert layer.weight_quantizer is not None
            weight, bias = layer.weight_quantizer(layer.folded_weight()), layer.folded_bias()
        assert weight is not None
        if any(dropout.training for dropout in self.dropouts):
            return self.fake_quantized(self.operation(x, weight, bias))
        with torch.no_grad():
            exact = self.exact(x, weight, bias)
        if not torch.is_grad_enabled():
            return exact
        usual = self.fake_quantized(self.operation(x, weight, bias))
        return exact + (usual - usual.detach())  # the gradient of the second

    def exact(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute exactly what the runtime's kernel computes."""
        quantizers: list[Any] = list(self.inputs)
        source, of_weight = quantizers
        channels = [1] * weight.dim()
        channels[0] = -1
        w = torch.round(weight / _scale(of_weight).reshape(channels))
        x = torch.round(x / _scale(source))
        largest = float(w.abs().flatten(1).sum(1).max()) * 255  # for 8-bit codes less their zero point
        kind = torch.float32 if largest < _EXACT_FLOAT32 else torch.float64
        total = self.operation(x.to(kind), w.to(kind), None)
        scale = _scale(source) * _scale(of_weight)
        along = [1] * total.dim()
        along[self.operation.output_axis] = -1
        if bias is not None:
            activation, of_layer = _affine(source), _affine(of_weight)
            assert activation is not None
            assert of_layer is not None
            choice = derived_bias("int32", activation, of_layer)
            shape = () if choice.axis is None else (-1,)
            numbers = (torch.tensor(parameter, device=x.device) for parameter in (choice.scale, choice.zero_point))
            of_bias, zero_point = (number.reshape(shape) for number in numbers)
            parameters = AffineParameters(
                of_bias.float(), zero_point.to(torch.int32), integer_format("int32"), choice.axis
            )
            total = total.double() + quantize_affine(bias, parameters).reshape(along)
        scale = scale.reshape(along) if scale.dim() else scale
        return total.float() * scale if self.output is None else self.codes_of(total, scale)


class SumOfTwo(Kernel):
    """An addition."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert self.output is not None
        with torch.no_grad():
            own, fixed = _scale(self.output), _zero_point(self.output)
            shares, codes = [], []
            for value, quantizer in zip((a, b), self.inputs, strict=True):
                zero_point = _unsigned_zero_point(quantizer)
                shares.append(_scale(quantizer) / own)
                codes.append(torch.round(value / _scale(quantizer)) + zero_point)
            parts = [share * _unsigned_zero_point(input_) for share, input_ in zip(shares, self.inputs, strict=True)]
            shift = _unsigned_zero_point(self.output) - fixed
            rest = (fixed + shift) - (parts[0] + parts[1])
            inner = (codes[1].double() * shares[1].double() + rest.double()).float()
            outer = (codes[0].double() * shares[0].double() + inner.double()).float()
            exact = self.values_of(torch.round(outer) - shift)
        if not torch.is_grad_enabled():
            return exact
        usual = self.fake_quantized(a + b)
        return exact + (usual - usual.detach())  # the gradient of the second


class MeanOfImage(Kernel):
    """A global average pool."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], *others: Any) -> None:
        super().__init__(*others)
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[-1] * x.shape[-2]
        usual = self.operation(x)
        with torch.no_grad():
            assert self.output is not None
            total = torch.round(x.double() / _scale(self.inputs[0])).sum((-2, -1)).reshape(usual.shape)
            own = _scale(self.output)
            scale = _scale(self.inputs[0]) / (own * count)
            exact = self.values_of(torch.round(total.float() * scale) + _zero_point(self.output))
        if not torch.is_grad_enabled():
            return exact
        usual = self.fake_quantized(usual)
        return exact + (usual - usual.detach())  # the gradient of the second


@dataclass(frozen=True)
class Bound:
    """An operator with its arguments behind the first."""

    target: Any
    arguments: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return read_bound, (written_target(self.target), self.arguments)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.target(x, *self.arguments)
        return result


def read_bound(target: Any, arguments: tuple[Any, ...]) -> Bound:
    """A `Bound` that was pickled."""
    return Bound(read_target(target), arguments)


def _kernel(network: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Kernel] | None:
    """The kernel that computes a node, and the last node that it stands for; None if the runtime computes in float."""
    layer = module_of(network, node)
    is_layer = isinstance(layer, ConvBatchNorm) or _calls(node, *CONVOLUTIONS, aten.linear.default)
    is_pool = _is_global_pool(node)
    is_sum = _calls(node, aten.add.Tensor) and not node.kwargs and len(node.all_input_nodes) == 2
    if not (is_layer or is_pool or is_sum):
        return None
    dropouts: list[nn.Module] = []
    sources = [_source(network, arg, dropouts) for arg in node.args[: 2 if is_sum else 1]]
    last, limiting, output = _end(network, node)
    if not is_layer and dropouts:
        return None
    if any(source is None for source in sources) or (output is None and not _calls(node, aten.linear.default)):
        return None
    known = [source for source in sources if source is not None]
    if is_pool:
        return last, MeanOfImage(Bound(node.target, tuple(node.args[1:])), known, output, limiting)
    if is_sum:
        return last, SumOfTwo(known, output, limiting)
    return _layer_kernel(network, node, (known[0], dropouts), (last, limiting, output))


def _layer_kernel(
    network: fx.GraphModule,
    node: fx.Node,
    start: tuple[Quantizer, list[nn.Module]],
    end: tuple[fx.Node, list[Bound], Quantizer | None],
) -> tuple[fx.Node, Kernel] | None:
    """The kernel of a layer, if its weight has 8 bits and zero point 0, and its bias is in steps of its sums."""
    (source, dropouts), (last, limiting, output) = start, end
    layer = module_of(network, node)
    if isinstance(layer, ConvBatchNorm):
        operation, weight, bias = layer.operation, layer.weight_quantizer, layer.bias_quantizer
    else:
        is_linear = _calls(node, aten.linear.default)
        rank = len(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else None
        if is_linear and rank != 2:
            return None  # MatMul and Add, whose result is float
        target: Any = node.target
        operation = LinearOperation(target, tuple(node.args[3:]), 0, 1)
        weight, bias = (_quantizer_at(network, node, place) for place in (1, 2))
    choice = _affine(weight)
    if weight is None or choice is None or not _has_eight_bits(weight) or any(choice.zero_point):
        return None
    if choice.axis not in (None, 0) or choice.group_size is not None or operation.channel_axis:
        return None
    if bias is not None and (_affine(bias) is None or bias.choice().format != "int32"):
        return None
    batch_normed = layer if isinstance(layer, ConvBatchNorm) else None
    return last, SumOfProducts(operation, batch_normed, dropouts, (source, weight), output, limiting)


def _end(network: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, list[Bound], Quantizer | None]:
    """The last node that a kernel stands for, the activations before it, and the quantizer that it is; None if what the
    layer returns is not quantized."""
    limiting: list[Bound] = []
    last = node
    while len(last.users) == 1:
        user = next(iter(last.users))
        quantizer = module_of(network, user)
        if isinstance(quantizer, Quantizer):
            is_known = quantizer.role is Role.ACTIVATION and _has_eight_bits(quantizer)
            return (user, limiting, quantizer) if is_known else (node, [], None)
        if not _calls(user, *LIMITING):
            break
        limiting.append(Bound(user.target, tuple(user.args[1:])))
        last = user
    return node, [], None


def _source(network: fx.GraphModule, node: Any, dropouts: list[nn.Module]) -> Quantizer | None:
    """The quantizer whose codes a node has, which may have been moved since. Adds the dropouts on the way."""
    while isinstance(node, fx.Node):
        module = module_of(network, node)
        if isinstance(module, Quantizer):
            return module if _has_eight_bits(module) else None
        if isinstance(module, _DropoutNd):
            dropouts.append(module)
        elif not _calls(node, *MOVING):
            return None
        node = node.all_input_nodes[0]
    return None


def _quantizer_at(network: fx.GraphModule, node: fx.Node, place: int) -> Quantizer | None:
    argument = node.args[place] if len(node.args) > place else None
    module = module_of(network, argument) if isinstance(argument, fx.Node) else None
    return module if isinstance(module, Quantizer) else None


def _raw(network: fx.GraphModule, node: fx.Node) -> fx.Node:
    """A bias without its quantizer: the kernel rounds it."""
    is_quantized = isinstance(module_of(network, node), Quantizer)
    source = node.all_input_nodes[0] if is_quantized else node
    return source if attribute_of(network, source) is not None else node


def _is_global_pool(node: fx.Node) -> bool:
    arguments: Any = node.args
    if _calls(node, aten.adaptive_avg_pool2d.default):
        return list(arguments[1]) in ([1, 1], [1])
    value = arguments[0].meta.get("val") if _calls(node, aten.mean.dim) else None
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return is_image and arguments[1] is not None and sorted(axis % 4 for axis in arguments[1]) == [2, 3]


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _affine(quantizer: Quantizer | None) -> AffineChoice | None:
    choice = None if quantizer is None else quantizer.choice()
    return choice if isinstance(choice, AffineChoice) else None


def _has_eight_bits(quantizer: Quantizer) -> bool:
    choice = _affine(quantizer)
    is_whole = quantizer.role is not Role.ACTIVATION or (choice is not None and choice.axis is None)
    return choice is not None and is_whole and integer_format(choice.format).bits == 8


def _scale(quantizer: Any) -> torch.Tensor:
    """The scale in float32, as files have it."""
    scale: torch.Tensor = quantizer.step() if isinstance(quantizer, LearnedQuantizer) else quantizer.scale
    return scale.detach().float()


def _zero_point(quantizer: Any) -> torch.Tensor:
    known = getattr(quantizer, "zero_point", None)
    return torch.zeros_like(_scale(quantizer)) if known is None else known.float()


def _unsigned_zero_point(quantizer: Any) -> torch.Tensor:
    """The zero point in the file, which has unsigned codes."""
    return _zero_point(quantizer) + (128 if quantizer.format.signed else 0)
