"""Correct each bias by the mean error that rounding makes in its layer.

    b' = b + E[y_float - y_quantized]     for each output channel

E is the mean over positions, and over samples the mean of the middle half: a few samples with a value far outside the
range would otherwise decide the bias of all others. Both outputs are computed from the float network's activations, so
that only the layer's own rounding counts, of its input and of its weights.

The correction goes into the layer's bias, or into that of the batch norm that belongs to it. Several processes that
each see a part of the data (torchrun) find the same correction from all samples.

A bias of 8 bits with one scale for all channels is off by up to half a step, which shifts a whole channel. The layers
behind it make up for that: two networks run side by side on the same samples, both in float, but in one of them every
bias passed so far is rounded. In each layer, the mean difference of the two goes into its bias, before that is rounded
in turn:

    d = E[y_float - y_rounded]             for each output channel
    b' = b + c + d                         c: the correction for the rounding of weights and activations
    r = Q(b') - b'                         what is left in this layer, and seen by those behind it

so that shifts do not add up along the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from quark.account import AlgorithmFacts
from quark.decide.view import Node
from quark.errors import InvalidValueError
from quark.features.bias_correction.layers import NAME, Layer, corrected_layers, middle_mean, phrase
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.plan import Choice, Reader, Role, SkippedNode
from quark.torch.deciding import Decision, Work
from quark.torch.decisions import bias_roundings
from quark.torch.graph import attribute_of, is_call, module_of, set_attribute
from quark.torch.observe import gathered
from quark.torch.rounded import rounded
from quark.torch.train.conv_batch_norm import (
    CONVOLUTIONS,
    TRANSPOSED,
    TRANSPOSED_GROUPS,
    ConvBatchNorm,
    LinearOperation,
)
from quark.torch.view import parameter_of, view_of

COMPENSATION_SAMPLES = 32  # they run at once; a mean over positions of an image needs no more
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, torch.ops.aten.linear.default)

Batch = tuple[torch.Tensor, ...]
Rounding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def before_calibration(work: Work, options: TorchBiasCorrectionOptions) -> tuple[AlgorithmFacts, ...]:
    """Give layers a bias to hold their correction."""
    if work.batches is not None:
        give_biases(work.network)
    return ()


def after_choosing(work: Decision, options: TorchBiasCorrectionOptions) -> list[AlgorithmFacts]:
    """Correct the biases of the float network in place, and choose again."""
    if work.batches is None:
        return []
    chosen = work.decisions.chosen
    weighted = {entry.request.consumer.node for entry in chosen if entry.request.role is Role.WEIGHT}
    choices = {entry.request.consumer: entry.choice for entry in chosen if entry.request.consumer.node in weighted}
    roundings = bias_roundings(work.placement)
    facts = correct_biases(work.network, choices, work.batches, options, roundings, work.exact)
    work.choose()
    return [facts]


def give_biases(network: fx.GraphModule) -> None:
    """Give every convolution and linear layer with a constant weight a bias, zeros if it had none."""
    for node in list(network.graph.nodes):
        if not is_call(node, *LAYERS) or (len(node.args) > 2 and node.args[2] is not None):
            continue
        weight = attribute_of(network, node.args[1])
        if weight is None or node.kwargs:
            continue
        channels = int(weight.shape[0])
        if node.target in TRANSPOSED:
            groups: Any = node.args[TRANSPOSED_GROUPS] if len(node.args) > TRANSPOSED_GROUPS else 1
            channels = int(weight.shape[1]) * int(groups)
        # beside the weight, under a name of its own: layers may share a weight
        path = str(node.args[1].target).rpartition(".")[0]
        taken = {str(node.target) for node in network.graph.nodes if node.op == "get_attr"}
        taken |= {name for name, _ in (*network.named_parameters(), *network.named_buffers())}
        stem = f"{path}.bias" if path else f"{node.name}_bias"
        names = (stem, *(f"{stem}_{number}" for number in range(1, len(taken) + 2)))
        name = next(name for name in names if name not in taken)
        zeros = torch.zeros(channels, dtype=weight.dtype, device=weight.device)
        set_attribute(network, name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
        with network.graph.inserting_before(node):
            bias = network.graph.get_attr(name)
        node.args = (*node.args[:2], bias, *node.args[3:])
    network.recompile()


@dataclass(frozen=True, eq=False)
class TorchLayer(Layer):
    """A layer with its operation and its parameters: of a plain layer, the weight and the bias."""

    operation: LinearOperation
    parameters: tuple[torch.Tensor, torch.Tensor] | ConvBatchNorm

    @property
    def weight_parameter(self) -> torch.Tensor:
        """The weight that is stored: before folding, if there is a batch norm."""
        return self.parameters.weight if isinstance(self.parameters, ConvBatchNorm) else self.parameters[0]

    @property
    def output_axis(self) -> int:
        """The axis of the result that counts channels, from its end: there may be no batch."""
        return 1 - self.weight_parameter.dim()

    def weight_now(self) -> torch.Tensor:
        """The weight that inference multiplies by."""
        parameters = self.parameters
        return (parameters.folded_weight() if isinstance(parameters, ConvBatchNorm) else parameters[0]).detach()

    def bias_now(self) -> torch.Tensor:
        """The bias that inference adds."""
        parameters = self.parameters
        return (parameters.folded_bias() if isinstance(parameters, ConvBatchNorm) else parameters[1]).detach()

    def add_to_bias(self, correction: torch.Tensor) -> bool:
        """Add a number to the bias of each channel; returns False, and changes nothing, if its type cannot hold it."""
        target = self.parameters.batch_norm.bias if isinstance(self.parameters, ConvBatchNorm) else self.parameters[1]
        corrected = (target.detach().double() + correction.to(target.device)).to(target.dtype)
        if not bool(torch.isfinite(corrected).all()):
            return False
        with torch.no_grad():
            target.copy_(corrected)
        return True


def torch_layers(
    network: fx.GraphModule, choices: Mapping[Reader, Choice]
) -> tuple[list[TorchLayer], list[SkippedNode]]:
    """The layers whose bias can take a correction; the others with the reason."""

    def obstacle(node: Node) -> str | None:
        module, bias = module_of(network, node.origin), node.input(2)
        if isinstance(module, ConvBatchNorm):
            return None if module.batch_norm.affine else "its batch norm has no bias"
        if node.origin.kwargs or node.op_type == "MatMul":
            return "its weight or bias is computed" if node.origin.kwargs else "no bias is added to its result"
        tensor = None if bias is None or bias.constant is None else parameter_of(network, bias.name)
        nodes = [node for node in network.graph.nodes if tensor is not None and attribute_of(network, node) is tensor]
        return "its bias is shared with another layer" if sum(len(node.users) for node in nodes) > 1 else None

    corrected, left = corrected_layers(view_of(network), choices, obstacle)
    layers = []
    for layer in corrected:
        node: fx.Node = layer.node.origin
        module = module_of(network, node)
        if isinstance(module, ConvBatchNorm):
            layers.append(TorchLayer(layer.node, layer.data, layer.weight, layer.adder, 2, module.operation, module))
            continue
        weight, bias = attribute_of(network, node.args[1]), attribute_of(network, node.args[2])
        assert weight is not None
        assert bias is not None
        operation = LinearOperation(node.target, tuple(node.args[3:]))  # type: ignore[arg-type]
        layers.append(TorchLayer(layer.node, layer.data, layer.weight, layer.adder, 2, operation, (weight, bias)))
    return layers, left


def correct_biases(
    network: fx.GraphModule,
    choices: Mapping[Reader, Choice],
    batches: Iterable[Batch],
    options: TorchBiasCorrectionOptions,
    roundings: Mapping[str, Rounding] | None = None,
    exact: fx.GraphModule | None = None,
) -> AlgorithmFacts:
    """Change the biases of the float network in place. `choices` says how operands are read,
    and `roundings` how its bias is, if that has few bits of its own. `exact` is the float network to compare with, if a
    feature before this one has rounded weights of the other."""
    layers, left = torch_layers(network, choices)
    comparison = _Comparison(network if exact is None else exact, layers)
    was_training, samples = network.training, options.samples
    network.eval()
    try:
        for batch in batches:
            samples -= comparison.over(_first(batch, samples))
            if samples <= 0:
                break
    finally:
        network.train(was_training)
    errors = _of_all_ranks(comparison.errors)
    corrections = {
        name: torch.from_numpy(middle_mean(torch.cat(parts).double().numpy()))
        for name, parts in errors.items()
        if parts
    }
    if roundings:
        batch = _first(next(iter(batches)), COMPENSATION_SAMPLES)
        shifts = compensations(network, layers, corrections, roundings, batch)
        for name, of_ranks in _of_all_ranks({name: [shift] for name, shift in shifts.items()}).items():
            if name in corrections:
                corrections[name] = corrections[name] + torch.stack(of_ranks).mean(dim=0)
    changed: list[str] = []
    for layer in layers:
        correction = corrections.get(layer.node.name)
        if correction is None:
            left.append(layer.skipped("no sample reached it"))
        elif not layer.add_to_bias(correction):
            left.append(layer.skipped("the correction is beyond the type of its bias"))
        else:
            changed.append(phrase(layer, correction.numpy()))
    return AlgorithmFacts(NAME, tuple(changed), tuple(left))


def _first(batch: Batch, samples: int) -> Batch:
    """The first samples of a batch, if the first axis of all its tensors counts samples."""
    sizes = {int(tensor.shape[0]) if tensor.dim() else 0 for tensor in batch}
    return tuple(tensor[:samples] for tensor in batch) if len(sizes) == 1 and samples < max(sizes) else batch


def _of_all_ranks(errors: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    ranks = gathered(errors)
    return {name: [value for rank in ranks for value in rank[name]] for name in errors}


class _Comparison(fx.Interpreter):
    """Runs the float network, and each layer once more with rounded operands. `errors` are by node, [samples, channels]
    of each batch."""

    def __init__(self, network: fx.GraphModule, layers: list[TorchLayer]) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.errors: dict[str, list[torch.Tensor]] = {layer.node.name: [] for layer in layers}
        self._layers = {layer.node.name: layer for layer in layers}
        self._weights = {layer.node.name: rounded(layer.weight_now(), layer.weight) for layer in layers}
        self._device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))

    def over(self, batch: Batch) -> int:
        """Run one batch; returns the number of its samples."""
        with torch.no_grad():
            self.run(*(tensor.to(self._device) for tensor in batch), enable_io_processing=False)
        return int(batch[0].shape[0]) if batch and batch[0].dim() else 1

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        layer = self._layers.get(n.name)
        if layer is None:
            return value
        x = self.env[n.args[0]]  # type: ignore[index]
        error = value - layer.operation(rounded(x, layer.data), self._weights[n.name], layer.bias_now())
        if error.dim() == -layer.output_axis:
            error = error.unsqueeze(0)  # one sample without a batch
        axis = layer.output_axis % error.dim()
        others = [index for index in range(1, error.dim()) if index != axis]
        mean = error.double().mean(dim=others) if others else error.double()
        if not bool(torch.isfinite(mean).all()):
            raise InvalidValueError(f"layer '{layer.name}': NaN or Inf in its output on calibration data")
        self.errors[layer.node.name].append(mean.cpu())
        return value


def compensations(
    network: fx.GraphModule,
    layers: list[TorchLayer],
    corrections: Mapping[str, torch.Tensor],
    roundings: Mapping[str, Rounding],
    batch: Batch,
) -> dict[str, torch.Tensor]:
    """d for each layer, by its node. `roundings` says how a bias is rounded; layers without one pass shifts on."""
    with_rounding = {layer.node.name: layer for layer in layers if layer.node.name in roundings}
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    exact, shifted = (_Step(network, tuple(tensor.to(device) for tensor in batch)) for _ in range(2))
    shifts: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for node in network.graph.nodes:
            value, moved = exact.run_node(node), shifted.run_node(node)
            layer = with_rounding.get(node.name)
            if layer is not None:
                difference, shift = _shift(layer, value, moved, corrections.get(node.name), roundings[node.name])
                shifts[node.name] = difference.cpu()
                moved = moved + shift
            exact.keep(node, value)
            shifted.keep(node, moved)
    return shifts


class _Step(fx.Interpreter):
    """A network that runs one node at a time, so that two of them can run in step on any kind of batch."""

    def __init__(self, network: fx.GraphModule, inputs: Batch) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.args_iter = iter(inputs)

    def keep(self, node: fx.Node, value: Any) -> None:
        """Set what later nodes see of this one, and forget values that are not read any more."""
        self.env[node] = value
        for used in self.user_to_last_uses.get(node, ()):
            del self.env[used]


def _shift(
    layer: TorchLayer,
    exact: torch.Tensor,
    shifted: torch.Tensor,
    correction: torch.Tensor | None,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """d, and what to add to the shifted result: d and what rounding leaves of the bias, in its shape."""
    axis = layer.output_axis % exact.dim()
    others = [index for index in range(exact.dim()) if index != axis]
    error = exact.double() - shifted.double()
    difference = error.mean(dim=others) if others else error
    wanted = layer.bias_now().double() + difference
    if correction is not None:
        wanted = wanted + correction.to(wanted.device)
    left = rounding(wanted) - wanted
    shape = [-1 if index == axis else 1 for index in range(exact.dim())]
    return difference, (difference + left).reshape(shape).to(exact.dtype)
