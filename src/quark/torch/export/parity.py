"""Check that an exported file computes what the network does.

ONNX Runtime and torch add in different orders, and the runtime's integer kernels add integers, so a value here and
there is rounded the other way. In a deep network that grows: after many layers the two may differ by as much as
rounding does, and both be right. So the check has two parts:

    outputs     the file, as anyone would run it, against the network. From `EQUAL_SQNR_DB` on that is enough
    layers      otherwise every layer by itself. The file's graph is cut at the tensors whose names are known in torch:
                what follows a cut reads torch's numbers, and what precedes it is compared with them. So no difference
                is passed on or hidden by another. A layer below `LAYER_SQNR_DB` computes something else, and an error
                names the first one

Where all layers agree and the outputs differ by more than rounding the activations does, or by more than
`SUSPICIOUS_SQNR_DB`, the runtime's integer kernels could still be wrong: they are judged by how much closer the same
file is without them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils import _pytree as pytree

from quark.compare import FidelityMeter, OutputFidelity
from quark.compare.measures import pair_sums
from quark.onnx.comparing import session_run
from quark.onnx.session import open_session
from quark.plan import Role
from quark.text import json_value
from quark.torch.export.deployable import Inputs, KernelParityError, ParityError
from quark.torch.graph import CALL, layer_name
from quark.torch.graph import outputs_of as output_nodes
from quark.torch.train.quantizers import DynamicQuantizer, Quantizer

Array = NDArray[Any]

EQUAL_SQNR_DB = 60.0
SUSPICIOUS_SQNR_DB = 10.0  # for outputs, if every layer agrees by itself
NEGLIGIBLE_SQNR_DB = 46.0  # for rounding, below which other kernels may differ by more
KERNEL_GAP_DB = 6.0  # twice the error, which is more than rounding the other way explains
LAYER_SQNR_DB = 60.0  # the same numbers are rounded the same way: only the order of sums differs
_LOOSE_SQNR_DB = 35.0  # float16 sums, and scales that are found at run time, whose layers cannot be told apart
_MOST_SAMPLES = 2  # samples for comparing layers: all tensors of the network are held at once


@dataclass(frozen=True)
class Divergence:
    """A layer that computes something else in the file: its tensor in torch, and how far apart the two are."""

    layer: str
    tensor: str
    sqnr_db: float
    max_abs_diff: float

    def __str__(self) -> str:
        name = "" if self.tensor == self.layer else f", tensor '{self.tensor}'"
        return f"'{self.layer}'{name} (SQNR {self.sqnr_db:.1f} dB, largest difference {self.max_abs_diff:.2g})"


@dataclass(frozen=True)
class ParityReport:
    """The file compared with the network over `samples`: the largest difference and the worst SQNR of all outputs, and
    the smallest share of samples with the same largest class, where an output has classes."""

    samples: int
    max_abs_diff: float
    sqnr_db: float
    agreement: float | None = None
    first_divergence: Divergence | None = None

    def __str__(self) -> str:
        classes = "" if self.agreement is None else f", same class for {self.agreement:.1%}"
        figures = f"SQNR {self.sqnr_db:.1f} dB, largest difference {self.max_abs_diff:.2g}"
        return f"{figures}{classes} over {self.samples} samples"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it; infinities are text."""
        return {key: json_value(value) for key, value in asdict(self).items()}


class Reference(Protocol):
    """The network that a file is compared with: it can be run, and asked for inner values."""

    @property
    def least_sqnr_db(self) -> float:
        """The agreement that is required of a single layer of the file."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the tensors that the network returns."""

    def run(self, inputs: Inputs) -> list[Array]:
        """The outputs of the network, flat and as arrays."""

    def record(self, inputs: Inputs, wanted: Collection[str]) -> Mapping[str, Array]:
        """The values of tensors in a run."""

    def layer_of(self, tensor: str) -> str:
        """The layer that computes a tensor."""


def check_parity(
    network: fx.GraphModule | Reference,
    path: Path,
    batches: Sequence[Inputs],
    values: Mapping[str, str],
    runtime: fx.GraphModule | None = None,
) -> ParityReport:
    """Compare the file with the network; `values` has the name in the file for names of nodes. A ParityError names the
    first layer that differs. `runtime` is the network with the runtime's arithmetic: a file that is equal to it is not
    compared further."""
    if runtime is not None:
        report = compare_outputs(runtime, path, batches)
        if report.sqnr_db >= EQUAL_SQNR_DB:
            return report
    network = _reference(network)
    report = compare_outputs(network, path, batches)
    if report.sqnr_db >= EQUAL_SQNR_DB:
        return report
    divergence = first_divergence(network, path, batches[0], values)
    if divergence is not None:
        report = replace(report, first_divergence=divergence)
        raise ParityError(
            f"'{path.name}' does not compute what the network computes ({report}). The first layer that differs, from "
            f"the same inputs, is {divergence}. Leave that layer out of quantization (exclude), or export with "
            "check=False and judge by the figures of a data set",
            report,
        )
    rounding = min(_rounding_sqnr_db(network, batches), NEGLIGIBLE_SQNR_DB)
    if report.sqnr_db < max(SUSPICIOUS_SQNR_DB, rounding - KERNEL_GAP_DB):
        plain = compare_outputs(network, path, batches, has_optimizations=False)
        if plain.sqnr_db > report.sqnr_db + KERNEL_GAP_DB:
            raise KernelParityError(
                f"'{path.name}' in ONNX Runtime differs from the network ({report}), and less so without the runtime's "
                f"integer kernels ({plain}): on this processor they are not exact for these numbers. Use int8 for "
                "activations and weights both, or fewer bits for weights; check=False leaves this check out",
                report,
            )
    return report


def _rounding_sqnr_db(network: Reference, batches: Sequence[Inputs]) -> float:
    """The distance by which rounding activations moves the outputs of a network: values that fall on the other side of
    a rounding can hardly cause more. -inf if it is unknown."""
    if not isinstance(network, GraphReference):
        return -math.inf
    differences = (
        pair_sums(exact, rounded)
        for batch in batches
        for exact, rounded in zip(network.run_in_float(batch), network.run(batch), strict=True)
    )
    return min((OutputFidelity.of("", sums).sqnr_db for sums in differences), default=-math.inf)


def compare_outputs(
    network: fx.GraphModule | Reference, path: Path, batches: Sequence[Inputs], *, has_optimizations: bool = True
) -> ParityReport:
    """Compare the outputs of the file in ONNX Runtime with those of the network."""
    network = _reference(network)
    session = open_session(path, has_optimizations=has_optimizations)
    run, names = session_run(session, f"'{path.name}'"), [input_.name for input_ in session.get_inputs()]
    meters = {output.name: FidelityMeter(output.name) for output in session.get_outputs()}
    for batch in batches:
        actual = run({name: numpy_of(x) for name, x in zip(names, batch, strict=True)}, list(meters))
        for (name, array), expected in zip(actual.items(), network.run(batch), strict=True):
            meters[name].add(expected.reshape(np.shape(array)), np.asarray(array))
    results = [meter.result() for meter in meters.values()]
    agreements = [result.agreement for result in results if result.agreement is not None]
    return ParityReport(
        samples=sum(len(batch[0]) if batch and batch[0].dim() else 1 for batch in batches),
        max_abs_diff=max(result.max_error for result in results),
        sqnr_db=min(result.sqnr_db for result in results),
        agreement=min(agreements) if agreements else None,
    )


def first_divergence(
    network: fx.GraphModule | Reference, path: Path, inputs: Inputs, values: Mapping[str, str]
) -> Divergence | None:
    """The first layer in the order of the file whose result is not torch's, although it is given the same numbers; None
    if all agree. `values` has the name in the file for names of nodes in torch."""
    network = _reference(network)
    model = ir.load(path)
    own = [str(value.name) for value in model.graph.outputs]
    arguments = list(model.graph.inputs)
    # the first samples, where the file takes batches of any length
    inputs = tuple(
        x[:_MOST_SAMPLES] if value.shape and not isinstance(value.shape[0], int) else x
        for value, x in zip(arguments, inputs, strict=True)
    )
    tensors = {name: tensor for tensor, name in values.items()}
    compared: dict[str, str] = {}  # the tensors in torch of what the graph returns, in its order
    given: dict[str, str] = {}  # and of its new inputs
    for value in [value for node in model.graph for value in node.outputs if value.name in tensors]:
        name = str(value.name)
        compared[name] = tensors[name]
        uses = list(value.uses())
        if uses:  # the readers get torch's numbers, so that errors do not add up
            fed = ir.Value(name=f"{name}/given", type=value.type, shape=value.shape)
            given[f"{name}/given"] = tensors[name]
            model.graph.inputs.append(fed)
            for use in uses:
                use.node.replace_input_with(use.idx, fed)
        if not value.is_graph_output():
            model.graph.outputs.append(value)
    for name, tensor in zip(own, network.outputs, strict=True):
        compared.setdefault(name, tensor)
    recorded = network.record(inputs, set(compared.values()))
    feeds = {str(value.name): numpy_of(x) for value, x in zip(arguments, inputs, strict=True)}
    feeds |= {name: recorded[tensor] for name, tensor in given.items()}
    results = session_run(open_session(model, has_optimizations=False), f"'{path.name}'")(feeds, list(compared))
    for name, actual in results.items():
        tensor = compared[name]
        expected = recorded[tensor].reshape(np.shape(actual))
        fidelity = OutputFidelity.of(tensor, pair_sums(expected, np.asarray(actual)))
        if fidelity.sqnr_db < network.least_sqnr_db:
            return Divergence(network.layer_of(tensor), tensor, fidelity.sqnr_db, fidelity.max_error)
    return None


def least_sqnr_db(network: torch.nn.Module) -> float:
    """The agreement required of a file's layers with a network of these types."""
    is_half = any(parameter.dtype is torch.float16 for parameter in network.parameters())
    is_dynamic = any(isinstance(module, DynamicQuantizer) for module in network.modules())
    return _LOOSE_SQNR_DB if is_half or is_dynamic else LAYER_SQNR_DB


def _reference(network: fx.GraphModule | Reference) -> Reference:
    return GraphReference(network) if isinstance(network, fx.GraphModule) else network


class GraphReference:
    """A network that is a graph: tensors are the results of its nodes."""

    def __init__(self, network: fx.GraphModule) -> None:
        self.network = network
        self.least_sqnr_db = least_sqnr_db(network)
        self.outputs = [str(node.name) for node in output_nodes(network.graph)]

    def run(self, inputs: Inputs) -> list[Array]:
        """The outputs of the network."""
        return outputs_of(self.network, inputs)

    def run_in_float(self, inputs: Inputs) -> list[Array]:
        """The outputs of the network without any rounding of activations."""
        quantizers = [module for module in self.network.modules() if isinstance(module, Quantizer)]
        hooks = [
            quantizer.register_forward_hook(lambda module, arguments, result: arguments[0])
            for quantizer in quantizers
            if quantizer.role is Role.ACTIVATION
        ]
        try:
            return outputs_of(self.network, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def record(self, inputs: Inputs, wanted: Collection[str]) -> Mapping[str, Array]:
        """The results of nodes."""
        recorder = _Recorder(self.network, set(wanted))
        with torch.no_grad():
            recorder.run(*inputs, enable_io_processing=False)
        return recorder.values

    def layer_of(self, tensor: str) -> str:
        """The layer of a node; a quantizer stands for the layer before it."""
        node = next(node for node in self.network.graph.nodes if node.name == tensor)
        while node.op == "call_module" and "nn_module_stack" not in node.meta and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return layer_name(node)


class _Recorder(fx.Interpreter):
    """Runs a network and keeps the values of some nodes."""

    def __init__(self, network: fx.GraphModule, wanted: set[str]) -> None:
        super().__init__(network)
        self.wanted = wanted
        self.values: dict[str, Array] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.wanted and isinstance(value, torch.Tensor):
            self.values[n.name] = numpy_of(value)
        return value


def outputs_of(network: fx.GraphModule, inputs: Inputs) -> list[Array]:
    """The outputs of the network, flat and as arrays."""
    with torch.no_grad():
        call = network.meta.get(CALL)  # inputs of the graph are not always the first parameters of the model
        result = network(*inputs) if call is None else network(**dict(zip(call.names, inputs, strict=True)))
    return [numpy_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def numpy_of(x: torch.Tensor) -> Array:
    """A tensor as a contiguous array."""
    return np.ascontiguousarray(x.detach().cpu().numpy())
