"""The starting point of an export: a frozen network in eval mode on the CPU, and inputs to run it with."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quark.errors import InvalidValueError, QuarkError, UnsupportedOptionError
from quark.plan import DynamicChoice
from quark.text import get_logger
from quark.torch.capture import DynamicShapes, capture
from quark.torch.capture.batches import LABELS
from quark.torch.freeze import freeze
from quark.torch.graph import CALL, Network
from quark.torch.pickling import free_axes_of
from quark.torch.train.networks import QuantizedNetwork
from quark.torch.train.quantizers import DynamicQuantizer, Quantizer

if TYPE_CHECKING:
    from quark.torch.export.parity import ParityReport

Inputs: TypeAlias = tuple[torch.Tensor, ...]
SAMPLES = 8

_LOG = get_logger(__name__)
_IN_FLOAT32 = (torch.bfloat16, torch.float64)
_NOISE = 0.1  # in standard deviations of the example
_TALKATIVE = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


class ExportError(QuarkError, RuntimeError):
    """The network cannot be written as ONNX; the message names the node, and what to do."""


class ParityError(ExportError):
    """The exported file does not compute what the network computes; `report` has the figures."""

    def __init__(self, message: str, report: ParityReport) -> None:
        super().__init__(message)
        self.report = report


class KernelParityError(ParityError):
    """Every layer of the file is right, and the runtime's integer kernels are not exact for its numbers."""


def deployable(
    model: nn.Module | ExportedProgram, example_input: Any = None, dynamic_shapes: DynamicShapes | None = None
) -> fx.GraphModule:
    """Return the network to export, in eval mode and on the CPU.

    It is the given network, or a copy if it has to be frozen, moved or converted from bfloat16 or float64 to float32,
    because ONNX Runtime computes little in those types. A float model that is not a network yet is captured, traced
    with the example if necessary.
    """
    modules = model.modules() if isinstance(model, fx.GraphModule) else ()
    if isinstance(model, Network) or any(isinstance(module, Quantizer) for module in modules):
        if dynamic_shapes is not None:
            raise UnsupportedOptionError(
                "dynamic_shapes: the network was captured already, and has the free axes of then; hand dynamic_shapes "
                "to quantize_model"
            )
        network = frozen(model)
    else:
        network = capture(model, lambda: example_input, dynamic_shapes)
    tensors = [*network.parameters(), *network.buffers()]
    is_elsewhere = any(tensor.device.type != "cpu" for tensor in tensors)
    others = sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype in _IN_FLOAT32})
    if network.training or is_elsewhere or others:
        network = copy.deepcopy(network).cpu().eval()
    if others:
        network = network.float()
        _LOG.info("%s weights are exported as float32, which ONNX Runtime computes in", " and ".join(others))
    for module in network.modules():
        choice = module.choice() if isinstance(module, DynamicQuantizer) else None
        if isinstance(choice, DynamicChoice) and (choice.format != "uint8" or module.is_symmetric):
            raise ExportError(
                f"tensor '{module.tensor}' is quantized dynamically to {'symmetric ' if module.is_symmetric else ''}"
                f"{choice.format}: ONNX's DynamicQuantizeLinear has uint8 with a zero point only. Use Dtype.uint8 with "
                "symmetric=False for dynamic activations"
            )
    # The outputs of a file are tensors. The network may also return None, which is left out.
    outputs = pytree.tree_leaves(network.graph.output_node().args)
    if all(output is None for output in outputs):
        raise ExportError("the network returns nothing, and an ONNX file has outputs: let its forward return tensors")
    for number, output in enumerate(outputs):
        value = output.meta.get("val") if isinstance(output, fx.Node) else output
        is_tensor = isinstance(value, torch.Tensor) or (isinstance(output, fx.Node) and value is None)
        if output is None or is_tensor:
            continue
        what = "a size, which follows from the inputs" if isinstance(value, torch.SymInt) else f"{value!r:.40}"
        raise ExportError(
            f"output {number} of the network, counted from 0, is {what}: the outputs of an ONNX file are tensors. Let "
            "the forward return tensors only, or wrap the network in a module that leaves the others out"
        )
    return network


def frozen(model: nn.Module | ExportedProgram) -> fx.GraphModule:
    """Return the given network, or a frozen copy of one that still trains."""
    if not isinstance(model, fx.GraphModule):
        raise ExportError(
            f"expected a network from ModelQuantizer.quantize_model or freeze, got {type(model).__name__}"
        )
    if not isinstance(model, QuantizedNetwork):
        return model
    _LOG.info("the network was not frozen: a frozen copy of it is exported")
    return freeze(model)


def example_inputs(network: fx.GraphModule, example: Any) -> Inputs:
    """Return the inputs of the network in their order, on the CPU, from a tensor, a sequence or a dictionary.

    Floats are converted to the type of the weights, because bfloat16 and float64 networks are exported in float32.
    Raises InvalidValueError if an input is missing or unknown.
    """
    names = [str(node.target) for node in network.graph.nodes if node.op == "placeholder"]
    if isinstance(example, Mapping):
        call = network.meta.get(CALL)
        constants = {} if call is None else call.constants
        given = {name for name in example if name in names or (name not in LABELS and name not in constants)}
        if given != set(names):
            raise InvalidValueError(
                f"example input has {', '.join(map(str, example)) or 'nothing'}, and the network takes "
                f"{', '.join(names)}: use these names"
            )
        values = [example[name] for name in names]
    else:
        values = list(example) if isinstance(example, (list, tuple)) else [example]
    if len(values) != len(names):
        raise InvalidValueError(
            f"example input has {len(values)} tensors, and the network takes {len(names)}: {', '.join(names)}"
        )
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            raise InvalidValueError(f"example input '{name}': expected a tensor, got {type(value).__name__}")
        is_finite = value.isfinite() | value.isneginf() if "mask" in name else value.isfinite()
        if value.is_floating_point() and not bool(is_finite.all()):
            raise InvalidValueError(f"example input '{name}' holds NaN or Inf: expected a typical input")
    kinds = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    kind = kinds.pop() if len(kinds) == 1 else None
    plain = [value.detach().cpu() for value in values]
    return tuple(x.to(kind) if kind is not None and x.dtype in _IN_FLOAT32 else x for x in plain)


def batch_size(example: Sequence[torch.Tensor]) -> int:
    """The length of the first axis of the first input that has one; 1 if none has."""
    return next((int(tensor.shape[0]) for tensor in example if tensor.dim()), 1)


def free_axes(network: fx.GraphModule, example: Sequence[torch.Tensor], *, has_dynamic_batch: bool) -> list[set[int]]:
    """Return the axes of each input whose size is free in the file.

    The first axis is free, unless the batch is to be fixed, for inputs that have the batch of the example there; other
    axes are if the network was captured so.
    """
    size = batch_size(example)
    free = []
    for node, x in zip((node for node in network.graph.nodes if node.op == "placeholder"), example, strict=True):
        axes = free_axes_of(node) - {0}
        has_batch = has_dynamic_batch and x.dim() > 0 and x.shape[0] == size
        free.append(axes | ({0} if has_batch else set()))
    return free


def samples_around(example: Sequence[torch.Tensor], free: Sequence[set[int]]) -> list[Inputs]:
    """Return batches to compare on: the example itself, and with noise added to floats. `free` has the free axes.

    With a free batch it is one batch of `SAMPLES`, else two of the example's size. If other axes are free, a batch with
    half of their lengths follows.
    """
    generator = torch.Generator().manual_seed(0)

    def noisy(x: torch.Tensor, first: int) -> torch.Tensor:
        """Add noise from row `first` on."""
        if not x.is_floating_point() or not x.dim() or bool(x.isinf().any()):
            return x
        noise = torch.randn(x.shape, generator=generator) * (_NOISE * float(x.float().std(correction=0)))
        noise[:first] = 0
        return x + noise.to(x.dtype)

    if not any(0 in axes for axes in free):
        batches = [tuple(example), tuple(noisy(x, 0) for x in example)]
    else:
        size = batch_size(example)
        batch = []
        for x, axes in zip(example, free, strict=True):
            copies = -(-SAMPLES // size)
            batch.append(noisy(torch.cat([x] * copies)[:SAMPLES], size) if 0 in axes else x)
        batches = [tuple(batch)]
    lengths = {int(x.shape[axis]) for x, axes in zip(example, free, strict=True) for axis in axes if axis}
    if lengths and min(lengths) > 3:

        def shortened(x: torch.Tensor, axes: set[int]) -> torch.Tensor:
            for axis in axes - {0}:
                x = x.narrow(axis, 0, int(x.shape[axis]) // 2)
            return x.contiguous()

        batches.append(tuple(map(shortened, batches[0], free)))
    return batches


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporter: what it prints, warns and logs about itself is not for users of quark."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
